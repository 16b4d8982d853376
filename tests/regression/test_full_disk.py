"""A disk that is really full: the run ends on all ranks with one sentence, and goes on when there is room again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import regress
from regress.engine.checkpoint import checkpoints, latest, read_state
from regress.parallel.launch.rank_pool import RankPool
from tests.regression.resumed import DUMPED, SAVED, SMALL, Bench, require_same

LAYOUTS = {"one": (), "ddp2": ("parallel.dp=2", "parallel.data_parallel=ddp")}
COMMANDS = {
    "one": ("-m", "regress"),
    "ddp2": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "regress"),
}


@pytest.fixture(scope="module")
def bench(pool: RankPool, targets: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    known: dict[str, Bench] = {}

    def make(layout: str) -> Bench:
        if layout not in known:
            given = [*SMALL, *LAYOUTS[layout]]
            home = tmp_path_factory.mktemp(layout)
            known[layout] = Bench(pool, targets, home, given, ranks=1 if layout == "one" else 2)
        return known[layout]

    return make


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``disk(size)``: a file system of that many bytes, which grows when it is asked for again."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def sized(size: int) -> Path:
        grows = ["remount"] if folder.is_mount() else []
        options = ",".join([*grows, f"size={size}"])
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        return folder

    yield sized
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def size_of(folder: Path) -> int:
    """Return the bytes that files and folders take on a disk of pages of 4 KiB."""
    return sum(4096 + -(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


def require_valid(run: Path) -> None:
    """Every checkpoint that is there is whole."""
    for path in checkpoints(run):
        read_state(path)


def require_one_sentence(told: list[str]) -> None:
    """All ranks end with the same sentence, which says what is the matter and what to do."""
    (sentence,) = set(told)
    assert "\n" not in sentence
    assert sentence.count("No space left on device") + sentence.count("File too large") == 1
    assert "free space there" in sentence or "raise it" in sentence


@pytest.mark.one_in(24)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", [0.55, 0.25, 0.35, 0.45, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 0.95])
def test_a_run_whose_disk_is_full_ends_and_goes_on(
    bench: Callable[[str], Bench], disk: Callable[[int], Path], layout: str, part: float
) -> None:
    """The disk has room for a part of what the run needs, so it fills up wherever that is."""
    found = bench(layout)
    whole = found.uninterrupted()
    run = disk(int(part * size_of(whole))) / "run"
    require_one_sentence(found.refused(run))
    require_valid(run)
    disk(8 * size_of(whole))
    found.resume(run)
    require_same(whole, run)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("layout", ["one", "ddp2"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_file_that_cannot_grow_ends_the_run(
    bench: Callable[[str], Bench], layout: str, count: int, tmp_path: Path
) -> None:
    """The limit of the kernel on the size of a file, which needs no privilege."""
    found = bench(layout)
    whole, run = found.uninterrupted(), tmp_path / "run"
    require_one_sentence(found.refused(run, room=(count, 20_000)))
    require_valid(run)
    assert latest(run) is not None
    found.resume(run)
    require_same(whole, run)


@pytest.mark.extended
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_command_fails_when_the_disk_is_full(
    bench: Callable[[str], Bench], disk: Callable[[int], Path], layout: str
) -> None:
    """As a user starts it: the exit code is not 0, and what is printed is the sentence, no traceback."""
    whole = bench(layout).uninterrupted()
    run = disk(int(0.55 * size_of(whole))) / "run"
    keys = [*DUMPED, *SAVED, *SMALL, *LAYOUTS[layout], f"output_dir={run}"]
    done = subprocess.run(
        [sys.executable, *COMMANDS[layout], "train", *keys],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    said = {line for line in done.stderr.splitlines() if line.startswith("error: ")}
    require_one_sentence(list(said))
    assert str(Path(regress.__file__).parent) not in done.stderr, "no line of a traceback"
    require_valid(run)
