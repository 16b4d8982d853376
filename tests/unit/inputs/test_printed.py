"""Texts as they may be printed."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from regress.cli import main
from regress.errors import DumpError, reason
from regress.printable_text import printable, printable_tree


@given(st.text(st.characters(codec=None)))
def test_nothing_acts_on_a_terminal(text: str) -> None:
    shown = printable(text)
    shown.encode()
    assert not {*"\x1b\x07\x9b\r\u202e\u2066\u200b\u2028"} & {*shown}
    assert printable(shown) == shown


@pytest.mark.parametrize("text", ["plain", "zwei\nZeilen\t", "日本語 ünï", "✗ 3 tolerances"])
def test_ordinary_texts_stay(text: str) -> None:
    assert printable(text) == text


def test_errors_are_printable_and_of_bounded_length() -> None:
    assert str(DumpError("a \x1b[2J \u202e \ud800 b")) == r"a \x1b[2J \u202e \ud800 b"
    assert reason(ValueError("\x1b")) == r"ValueError: \x1b"
    text = str(DumpError(f"{'a' * 9000}: copy it again"))
    assert len(text) < 2100
    assert text.endswith("copy it again")


def test_trees() -> None:
    assert printable_tree({"\x1b": ["\x07", 1, ("\u202e",)]}) == {r"\x1b": [r"\x07", 1, [r"\u202e"]]}


def test_a_command_prints_no_control_sequence_of_a_path() -> None:
    done = CliRunner().invoke(main, ["compare", "/no/\x1b[2J\u202epath", "/no/other"])
    assert done.exit_code == 2
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output
    assert r"\x1b[2J\u202e" in done.output
