"""A command that is ended by SIGTERM leaves nothing in the temporary directory, and no process."""

from __future__ import annotations

import os
import re
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


@pytest.mark.extended
@pytest.mark.parametrize(
    ("generation", "name"),
    [(1, "the forkserver of the ranks"), (2, r"rank \d of 2")],
    ids=["forkserver", "rank"],
)
def test_a_replay_one_of_whose_processes_is_stopped_ends_by_itself(
    tmp_path: Path, generation: int, name: str
) -> None:
    """The seconds are those of parallel.timeout."""
    command = ("replay", "dense", "--variants", "dp2", "--tier", "semantics", "--set", "parallel.timeout=2")
    with subprocess.Popen(
        [sys.executable, "-m", "regress", *command, "--golden-dir", str(GOLDEN)],
        env=_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        _until(lambda: bool(_descendants(process.pid, 2)) or process.poll() is not None)
        family = [one for number in (1, 2) for one in _descendants(process.pid, number)]
        stopped = _descendants(process.pid, generation)[0]
        os.kill(stopped, signal.SIGSTOP)
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait() == 2, printed
    assert re.search(rf"{name} \(process {stopped}\) is stopped by a signal such as SIGSTOP", printed), (
        printed
    )
    for one in family:
        _until(lambda one=one: not Path(f"/proc/{one}").exists())
    assert not [*tmp_path.glob("regress-*")]


@pytest.mark.extended
def test_what_a_killed_replay_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "regress", "replay", "dense", "--golden-dir", str(GOLDEN), "--variants"]
    environment = _environment(tmp_path)
    with subprocess.Popen([*command, "dp2"], env=environment, stdout=subprocess.DEVNULL) as process:
        _until(lambda: bool([*tmp_path.glob("regress-work-*")]) or process.poll() is not None)
        process.kill()
    assert [*tmp_path.glob("regress-work-*")]
    subprocess.run([*command, "base", "--tier", "semantics"], check=True, env=environment)
    assert not [*tmp_path.glob("regress-*")]


def _descendants(process: int, generation: int) -> list[int]:
    """Return the children of a process, or the processes that these have started."""
    found = [process]
    for _ in range(generation):
        texts = (Path(f"/proc/{one}/task/{one}/children") for one in found)
        found = [int(word) for text in texts if text.exists() for word in text.read_text().split()]
    return found
