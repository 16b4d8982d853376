"""Launchers: the rank that failed is named, and whatever ends a launch leaves no process."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from regress.errors import ConfigError, RankError, ReplayError
from regress.parallel.launch.cluster_launchers import Launch

GUARD = 200.0
"""Seconds after which something hangs."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_rank_that_fails_is_named_with_what_it_printed(launcher: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        Launch(launcher).run(
            tmp_path / "no.yaml", 1 if launcher == "torchrun" else 2, tmp_path / "ranks", "dense/dp2"
        )
    assert str(caught.value).startswith("dense/dp2: rank ")
    assert str(caught.value).endswith(" ended with exit code 2")
    (note,) = caught.value.__notes__
    assert f"error: config_path={tmp_path}/no.yaml is not a directory and no .yaml file" in note
    assert "Traceback" not in note


def test_what_takes_too_long_is_ended_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", str(tmp_path))
    with pytest.raises(ReplayError, match=r"^dense/dp2 did not come to an end within 0\.5 s; "):
        Launch("torchrun", timeout=0.5).run(tmp_path / "no.yaml", 2, tmp_path / "ranks", "dense/dp2")
    assert not all_marked(str(tmp_path))


@pytest.mark.parametrize(
    ("mark", "name"),
    [
        ("torch.distributed.run", "the launcher of node 0"),
        pytest.param("RANK=1", "rank 1", marks=pytest.mark.extended),
    ],
)
def test_a_stopped_process_is_named_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, name: str
) -> None:
    """The launcher, or a rank: it is stopped as soon as it is there."""
    monkeypatch.setenv("TOKEN_OF_TEST", str(tmp_path))
    told: list[int] = []

    def stop() -> None:
        end = time.monotonic() + GUARD
        while not told and time.monotonic() < end:
            for process in all_marked(str(tmp_path)):
                if said(process, mark):
                    os.kill(int(process.name), signal.SIGSTOP)
                    told.append(int(process.name))

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(ReplayError) as caught:
        Launch("torchrun").run(tmp_path / "no.yaml", 2, tmp_path / "ranks", "dense/dp2", standstill=1.0)
    stopper.join()
    assert str(caught.value) == (
        f"dense/dp2: {name} (process {told[0]}) is stopped by a signal such as SIGSTOP: see who sent it, and run it "
        "again"
    )
    assert not all_marked(str(tmp_path))


def all_marked(token: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*") if marked(path, token)]


def said(process: Path, mark: str) -> bool:
    """Return True if a mark is an argument or a variable of a process."""
    try:
        return any(mark in (process / name).read_text().split("\0") for name in ("cmdline", "environ"))
    except OSError:
        return False


def marked(process: Path, token: str) -> bool:
    try:
        return (
            process.name != str(os.getpid())
            and f"TOKEN_OF_TEST={token}".encode() in (process / "environ").read_bytes()
        )
    except OSError:
        return False


def test_what_nodes_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dense/tp3 has 3 ranks, which 2 nodes cannot share evenly"):
        Launch("torchrun", nnodes=2).run(tmp_path / "c.yaml", 3, tmp_path, "dense/tp3")
