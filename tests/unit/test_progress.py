"""Progress of commands, on a terminal and in a file."""

from __future__ import annotations

import re

import pytest

from regress.printable_text import echo
from regress.progress_bar import EVERY, progress


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("regress.progress_bar.monotonic", found)
    return found


def test_a_file_gets_a_line_every_half_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("dense", 12) as bar:
        for done in range(12):
            clock.now = done * 0.4 * EVERY  # every third is later than half a minute after the last line
            bar.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.sub(r"after \d+ s", "after N s", err).splitlines() == [
        f"{done} of 12 after N s: dense" for done in (4, 7, 10)
    ]


def test_quick_work_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("dense", 12) as bar:
        clock.now = EVERY - 0.1
        bar.advance(12)
    assert capsys.readouterr() == ("", "")


def test_names_and_totals_of_a_line(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as bar:
        bar.name("a\x1b[2Jb")
        clock.now = EVERY
        bar.advance(3)
        bar.expect(7)
        clock.now = 2 * EVERY
        bar.advance()
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"3 after \d+ s: a\\x1b\[2Jb", first)
    assert re.fullmatch(r"4 of 7 after \d+ s: a\\x1b\[2Jb", second)


def test_a_terminal_gets_a_bar(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress("[red]dense", 12) as bar:
        clock.now = 2 * EVERY
        bar.advance(5)
        echo("found")
    out, err = capsys.readouterr()
    assert out == "found\n"  # a file of results stays one
    assert "5/12" in err
    assert "[red]dense" in err
    assert "after" not in err
