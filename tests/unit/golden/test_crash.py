"""Killed at any moment, a case holds what it held or what it will hold, and the next update finds no trace."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.errors import GoldenError
from regress.golden import GoldenCase, GoldenStore
from regress.golden.case_update import commit, leftovers

PROGRAM = Path(__file__).with_name("killed.py")


@pytest.mark.parametrize(
    ("writer", "attempts", "states"),
    [
        ("commit", 20, {"state 0", "state 1"}),
        ("dump", 20, {"empty", "partial", "complete"}),
        pytest.param("commit", 200, {"state 0", "state 1"}, marks=pytest.mark.extended),
        pytest.param("dump", 200, {"empty", "partial", "complete"}, marks=pytest.mark.extended),
    ],
)
def test_kill_at_random_moments(writer: str, attempts: int, states: set[str], tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), writer, str(tmp_path / "w"), str(attempts), "7"],
        capture_output=True,
        text=True,
        env=environ,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert sum(result["found"].values()) >= attempts
    assert result["left"] > 0, "no kill came in between: the test would pass without any care"
    found = {name.partition(",")[0] for name in result["found"]}
    assert found <= states
    assert len(found) > 1


class Killed(BaseException):
    """No handler of ours catches it, as none catches a kill."""


OPERATIONS = [
    (os, "write"),
    (os, "fsync"),
    (Path, "replace"),
    (Path, "unlink"),
    (Path, "mkdir"),
    (Path, "rmdir"),
]


@contextmanager
def stopping_at(number: int, error: BaseException, names: set[str]) -> Iterator[list[str]]:
    """Raise instead of the file operation of that number; the list tells those that were asked for."""
    asked: list[str] = []

    def replacement(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            asked.append(name)
            if len(asked) - 1 == number:
                raise error
            return (
                None if name == "fsync" else real(*arguments, **options)
            )  # it takes long, and shows nowhere

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in OPERATIONS:
            if name in names:
                patch.setattr(owner, name, replacement(name, getattr(owner, name)))
        yield asked


ALL = {name for _, name in OPERATIONS}


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything a case tells, read through its verified interface."""
    case = GoldenCase(folder)
    case.verify_inputs()
    return {
        f"{where}/{quantity}/{name}": values.tolist()
        for where in case.wheres()
        for quantity, tensors in case.truth(where).items()
        for name, values in tensors.items()
    }


def changes(make_truth: Any) -> Any:
    row = make_truth(3.0)["step_000001"] | {"optimizer": None, "loss": {"loss": np.ones(2)}}
    return {"truth": {"step_000001": row}, "provenance": {"after": True}}


def test_a_commit_stopped_at_every_operation(
    recorded: Path, make_truth: Any, tmp_path: Path, content: Any
) -> None:
    old = snapshot(recorded)
    bitwise_reference = shutil.copytree(recorded, tmp_path / "twin")
    commit(bitwise_reference, **changes(make_truth))
    new, final = snapshot(bitwise_reference), content(bitwise_reference)
    assert old != new
    states = []
    for number in range(1000):
        folder = shutil.copytree(recorded, tmp_path / f"at{number}")
        try:
            with stopping_at(number, Killed(), ALL) as asked:
                commit(folder, **changes(make_truth))
        except Killed:
            found = snapshot(folder)
            assert found in (old, new), f"a mixture after {asked[-1]}, operation {number}"
            states.append(found == new)
            commit(folder, **changes(make_truth))
            assert content(folder) == final, f"traces of {asked[-1]}, operation {number}"
        else:
            break
    assert len(states) > 20
    assert states == sorted(states), "there is one moment at which the new state is in force"
    assert {True, False} == set(states)


@pytest.mark.parametrize(
    ("code", "operation", "says"),
    [
        (
            errno.ENOSPC,
            "write",
            "cannot be written (No space left on device), so the golden is as it was before: free",
        ),
        (
            errno.EDQUOT,
            "write",
            "(Disk quota exceeded), so the golden is as it was before: your quota is used up",
        ),
        (errno.EIO, "fsync", "(Input/output error), so the golden is as it was before: choose another"),
        (
            errno.EROFS,
            "replace",
            "(Read-only file system), so the golden is as it was before: the file system is",
        ),
        (
            errno.EACCES,
            "replace",
            "(Permission denied), so the golden is as it was before: choose a folder in which you may write",
        ),
    ],
)
def test_a_disk_that_fails_at_every_operation(
    code: int, operation: str, says: str, recorded: Path, make_truth: Any, tmp_path: Path, content: Any
) -> None:
    before, failures = content(recorded), 0
    bitwise_reference = shutil.copytree(recorded, tmp_path / "twin")
    commit(bitwise_reference, **changes(make_truth))
    final = content(bitwise_reference)
    for number in range(1000):
        folder = shutil.copytree(recorded, tmp_path / f"at{number}")
        try:
            with stopping_at(number, OSError(code, os.strerror(code)), {operation}) as asked:
                commit(folder, **changes(make_truth))
        except GoldenError as error:
            failures, told = failures + 1, str(error)
            assert told.startswith(str(tmp_path))
            if "in the middle of an update, which the next command" in told:
                assert operation == "replace"
                GoldenStore(tmp_path)
                assert content(folder) == final
                continue
            assert says in told
            after = content(folder)
            assert {name: after[name] for name in before} == before, f"operation {number}"
            assert not [name for name in after if ".partial-" in name]
            assert set(after) - set(before) == set(leftovers(folder, GoldenCase(folder).manifest))
        else:
            if number >= len(asked):  # fsync of a folder may fail without harm
                break
    assert failures >= 5


LIMITED = """
import resource, sys
import numpy as np
from pathlib import Path
from regress.errors import GoldenError
from regress.golden.case_update import commit
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    big = np.random.default_rng(0).normal(size=5000)
    commit(Path(sys.argv[1]), truth={"step_000001": {"gradient": {"big": big}}}, provenance={})
except GoldenError as error:
    print(error)
"""


@pytest.mark.parametrize(("limit", "victim"), [(30_000, "gradient."), (41_500, None), (2_000, "gradient.")])
def test_a_limit_on_file_sizes(recorded: Path, content: Any, limit: int, victim: str | None) -> None:
    before = content(recorded)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(recorded), str(limit)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    if victim is None:
        assert done.stdout == ""
        assert "big" in GoldenCase(recorded).truth_of("step_000001", "gradient")
        return
    assert victim in done.stdout
    assert (
        "(File too large), so the golden is as it was before: a limit on file sizes is in force"
        in done.stdout
    )
    assert content(recorded) == before


def test_a_folder_where_a_file_is_needed(recorded: Path, make_truth: Any) -> None:
    (recorded / "truth" / "step_000002").write_text("mine")
    with pytest.raises(
        GoldenError, match=r"written \((File exists|Not a directory)\), so the golden is as it was"
    ):
        commit(recorded, truth={"step_000002": {"loss": {"loss": 1.0}}}, provenance={})
    snapshot(recorded)


def test_using_a_case_writes_nothing(recorded: Path) -> None:
    def stats() -> dict[str, Any]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_ino) for p in recorded.parent.rglob("*")}

    before = stats()
    with stopping_at(0, AssertionError("a reader writes"), ALL):
        snapshot(recorded)
        GoldenStore(recorded.parent).names()
    assert stats() == before
