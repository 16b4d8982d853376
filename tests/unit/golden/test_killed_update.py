"""The end of an update, killed at every step, and so is whoever finishes it: all goldens are old, or all are new."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.durable_files import UPDATE, unfinished
from regress.errors import GoldenError
from regress.golden import GoldenStore
from regress.golden.case_update import commit
from regress.golden.golden_files import changing
from regress.golden.golden_verification import verify
from regress.golden.stored_checks import StoredCheck
from regress.golden.value_tree import Tree
from regress.plugin.golden_update import SessionFacts, StagedValues, apply_staged

OPERATIONS = [(os, "write"), (os, "fsync")]
OPERATIONS += [(Path, name) for name in ("replace", "unlink", "mkdir", "rmdir")]  # type: ignore[misc]  # owners


def check(name: str, value: float) -> StoredCheck:
    return StoredCheck("test_it.py::test_it", name, Tree.of(np.full(4, value)), 0.0, 0.0, "", {})


class Update:
    """A golden directory with cases and checks, and what a session on two workers has staged for it.

    Attributes:
        root: the golden directory as it was.
        staged: what is to become golden.
    """

    def __init__(self, recorded: Path, make_truth: Any, folder: Path) -> None:
        self.root, self.staged = recorded.parent, folder / "staged"
        shutil.copytree(recorded, self.root / "other")
        for name in ("kept", "drifted"):
            path = self.root / check(name, 1.0).file
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(check(name, 1.0).encode())
        for name in ("tiny", "other"):
            self._stage_case(name, make_truth(3.0)["step_000001"])
        for worker, found in (("gw0", check("drifted", 2.0)), ("gw1", check("new", 2.0))):
            StagedValues(self.staged, worker, worker).put(found.file, [found.encode()])
        StagedValues(self.staged, "gw1", "failed").put(
            check("failed", 0).file, [check("failed", 1.0).encode()]
        )

    def _stage_case(self, name: str, row: Any) -> None:
        shutil.copytree(self.root / name, self.staged / name)
        truth = {"step_000001": {"log_probs": row["log_probs"], "gradient": row["gradient"]}}
        commit(self.staged / name, truth=truth, provenance={"after": True})
        told = {"status": "drift", "multiple": 9.0, "max_error": 1.0, "old": 1.0, "new": 2.0}
        changes = [
            {"where": "step_000001", "quantity": quantity, "name": tensor, **told}
            for quantity, tensors in truth["step_000001"].items()
            for tensor in tensors
        ]
        text = json.dumps({"changes": changes, "compared": {}, "error": None})
        shutil.copy(self.root / name / "manifest.json", self.staged / f"{name}.base")
        (self.staged / f"{name}.json").write_text(text)

    def copy(self, folder: Path) -> Path:
        return shutil.copytree(self.root, folder)

    def write(self, root: Path) -> None:
        """Write the update as the controller does at the end of the session."""
        found = apply_staged(self.staged, root, SessionFacts(failed={"failed"}))
        assert found.problems == []


def forked(action: Callable[[], None], kill_at: int | None = None) -> list[str] | None:
    """Run in a child, killed instead of (or in the middle of) a file operation; returns those that it made.

    None: it was killed.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            real_write, made = os.write, _watched(kill_at)
            action()
            real_write(writer, " ".join(made).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.waitstatus_to_exitcode(status) == 0, "the action failed by itself"
    return text.split()


def _watched(kill_at: int | None) -> list[str]:
    """List all file operations of this process, and kill it at one of them."""
    made: list[str] = []

    def replacement(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) - 1 == kill_at:
                if name == "write":  # torn
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return None if name == "fsync" else real(*arguments, **options)

        return operation

    for owner, name in OPERATIONS:
        setattr(owner, name, replacement(name, getattr(owner, name)))
    return made


@pytest.fixture
def update(recorded: Path, make_truth: Any, tmp_path: Path) -> Update:
    import_module("regress.replay.drift_update")  # here rather than in each child
    return Update(recorded, make_truth, tmp_path)


@pytest.fixture
def ends(update: Update, content: Any, tmp_path: Path) -> tuple[Any, Any, list[str]]:
    """All files before the update and after it, and the file operations that it makes."""
    root = update.copy(tmp_path / "whole")
    made = forked(lambda: update.write(root))
    assert made is not None
    old, new = content(update.root), content(root)
    assert {name.split("/")[0] for name in old.keys() | new.keys() if old.get(name) != new.get(name)} == {
        "checks",
        "tiny",
        "other",
    }
    assert [finding for finding in verify(GoldenStore(root)) if finding.damage] == []
    assert not any("failed" in name for name in new)
    assert len(made) > 40
    return old, new, made


def opened(root: Path) -> None:
    GoldenStore(root)


FEW = pytest.param("few", id="few")
ALL = pytest.param("all", id="all", marks=pytest.mark.extended)


@pytest.mark.parametrize("extent", [FEW, ALL])
def test_killed_at_every_step(update: Update, ends: Any, extent: str, tmp_path: Path, content: Any) -> None:
    old, new, made = ends
    states = []
    for step in range(0, len(made), 1 if extent == "all" else 13):
        root = update.copy(tmp_path / f"at{step}")
        assert forked(lambda root=root: update.write(root), step) is None  # type: ignore[misc]  # called at once
        opened(root)
        found = content(root)
        assert found in (old, new), f"a mixture after step {step}"
        assert not unfinished(root)
        states.append(found == new)
        update.write(root)
        assert content(root) == new, f"traces of step {step}"
        shutil.rmtree(root)
    assert states == sorted(states), "there is one moment at which the update is decided"
    assert {True, False} == set(states)


@pytest.mark.extended
@pytest.mark.parametrize("extent", [FEW, ALL])
def test_the_recovery_killed_at_every_step(
    update: Update, ends: Any, extent: str, tmp_path: Path, content: Any
) -> None:
    old, new, made = ends
    every = extent == "all"
    moments = 0
    for step in range(len(made) - 1, 0, -3 if every else -7):
        killed = update.copy(tmp_path / f"at{step}")
        assert forked(lambda killed=killed: update.write(killed), step) is None  # type: ignore[misc]  # the same
        whole = shutil.copytree(killed, tmp_path / "recovered")
        last = forked(lambda whole=whole: opened(whole))  # type: ignore[misc]  # the same
        assert last is not None
        end = content(whole)
        assert end in (old, new)
        shutil.rmtree(whole)
        for moment in range(0, len(last), 2 if every else 5):
            root = shutil.copytree(killed, tmp_path / "again")
            assert forked(lambda root=root: opened(root), moment) is None  # type: ignore[misc]  # the same
            opened(root)
            assert content(root) == end, f"recovery of step {step} killed at {moment}"
            shutil.rmtree(root)
            moments += 1
        shutil.rmtree(killed)
    assert moments > 5


def decided(update: Update, ends: Any, root: Path) -> Path:
    """A golden directory whose update was killed when all of it but one file was in force."""
    made: list[str] = ends[2]
    last = len(made) - 1 - made[::-1].index("replace")
    assert forked(lambda: update.write(update.copy(root)), last) is None
    assert (root / UPDATE).exists()
    return root


def test_several_open_it_at_once(update: Update, ends: Any, tmp_path: Path, content: Any) -> None:
    root = decided(update, ends, tmp_path / "half")
    children = []
    for _ in range(6):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                store = GoldenStore(root)
                code = 0 if store.case("tiny").manifest is not None and not unfinished(root) else 2
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 6
    assert content(root) == ends[1]


@contextlib.contextmanager
def read_only() -> Iterator[None]:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system", str(self))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "unlink", "mkdir", "rmdir"):
            patch.setattr(Path, name, refuse)
        yield


def test_where_nothing_can_be_written(update: Update, ends: Any, tmp_path: Path, content: Any) -> None:
    root = decided(update, ends, tmp_path / "half")
    with (
        read_only(),
        pytest.raises(
            GoldenError,
            match=r"half/\.update is an update that was interrupted, and cannot be finished, because .* cannot be "
            r"written \(Read-only file system\): the file system is read-only: choose another folder",
        ),
    ):
        opened(root)
    opened(root)
    assert content(root) == ends[1]


def test_what_was_not_decided_hinders_no_reader(
    update: Update, ends: Any, tmp_path: Path, content: Any
) -> None:
    root = update.copy(tmp_path / "young")
    assert forked(lambda: update.write(root), 12) is None
    assert unfinished(root)
    with read_only():
        assert GoldenStore(root).case("tiny").wheres()
    opened(root)
    assert content(root) == ends[0]


def test_an_error_within_a_transaction_changes_nothing(recorded: Path, content: Any) -> None:
    before = content(recorded.parent)

    def broken() -> None:
        with changing(recorded.parent) as changes:
            changes.write(recorded / "manifest.json", [b"new"])
            changes.remove(recorded / "case.yaml")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert content(recorded.parent) == before
