"""A command that is ended by SIGTERM leaves nothing in the temporary directory, and no process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, tempfile, time
import click
from regress import cli

@cli.main.command()
def wait():
    with tempfile.TemporaryDirectory(prefix="regress-"):
        print("there", flush=True)
        time.sleep(600)

cli.main(["wait"])
"""
GOLDEN = Path(__file__).parents[3] / "golden"
SECONDS = 300.0
"""Time after which a command counts as hanging."""


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=_environment(tmp_path), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        assert [*tmp_path.glob("regress-*")]
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert not [*tmp_path.glob("regress-*")]


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "dense", "--variants", "dp2"),
        *(
            pytest.param(command, marks=pytest.mark.extended)
            for command in (
                ("faults", "run", "mean_of_means"),
                ("golden", "export", "dense", "exported"),
                ("golden", "calibrate", "dense"),
            )
        ),
    ],
    ids=lambda command: "-".join(command[:2]),
)
def test_commands_leave_neither_files_nor_processes(tmp_path: Path, command: tuple[str, ...]) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shutil.copytree(GOLDEN / "dense", tmp_path / "golden" / "dense")
    with subprocess.Popen(
        [sys.executable, "-m", "regress", *command, "--golden-dir", "golden"],
        env=_environment(temporary),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        _until(lambda: bool([*temporary.glob("regress-*")]) or process.poll() is not None)
        assert process.poll() is None, "it ended before it made anything"
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    _until(lambda: not _of_session(process.pid))
    assert [path.name for path in temporary.iterdir()] == []


def _environment(temporary: Path) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key != "RANK"}, "TMPDIR": str(temporary)}


def _until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.02)


def _of_session(leader: int) -> list[int]:
    """Return the processes of the session that this process led."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found
