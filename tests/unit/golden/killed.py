"""Run as a program: kill a writer at random moments, and say what the files hold after each kill.

Usage: killed.py WRITER FOLDER ATTEMPTS SEED. Prints JSON: how often each state was found, in how many attempts
something was left over, and what was wrong. The writer is a forked child, so that a kill costs milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump import Recorder, Trajectory, at, read, recording, tap, tap_trajectories
from regress.dump.dump_files import TEMPORARY
from regress.dump.dump_manifest import MANIFEST
from regress.durable_files import unfinished
from regress.golden.case_manifest import ToleranceEntry
from regress.golden.case_update import commit, leftovers
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore


def state(number: int) -> dict[str, Any]:
    """Two states of a case that share a file, differ in one, and have one each that the other lacks."""
    shared = {"log_probs": {"log_probs": np.arange(50.0)}}
    gradient = {f"p{i}": np.full(300, float(number + i)) for i in range(3)}
    own = (
        {"loss": {"loss": np.float64(1)}}
        if number
        else {"kl": {"kl": np.ones(7)}, "ratio": {"r": np.ones(9)}}
    )
    truth = {f"step_{step:06d}": {**shared, "gradient": gradient, **own} for step in range(2)}
    tolerances = {"loss": {"float32": ToleranceEntry(1e-6 * (number + 1), reason="measured")}}
    return {"truth": truth, "tolerances": tolerances, "provenance": {"state": number}, "replace": True}


def seen(folder: Path) -> str:
    """Return which of the two states a case is in, every value compared; raises for anything else."""
    case = GoldenCase(folder)
    case.verify_inputs()
    entry = case.tolerance("loss", "float32")
    assert entry is not None
    assert case.manifest is not None
    number = round((entry.relative or 0.0) * 1e6) - 1
    expected = state(number)
    assert case.manifest.provenance == expected["provenance"]
    assert {where: case.quantities(where) for where in case.wheres()} == {
        where: sorted(row) for where, row in expected["truth"].items()
    }
    for where, row in expected["truth"].items():
        for quantity, tensors in case.truth(where).items():
            for name, values in tensors.items():
                assert np.array_equal(values, row[quantity][name]), (where, quantity, name)
    return f"state {number}"


class Commits:
    """A writer that commits the one state and the other, for ever."""

    def __init__(self, folder: Path) -> None:
        self.store = GoldenStore(folder)
        self.case = folder / "case"
        self.case.mkdir(parents=True)
        (self.case / "case.yaml").write_text("reason: to be killed\n")
        commit(self.case, **state(0))

    def write(self, moment: int) -> None:
        commit(self.case, **state(moment % 2))

    def check(self) -> str:
        GoldenStore(self.store.root)  # finishes or discards what was interrupted
        return seen(self.case)

    def left(self) -> bool:
        return unfinished(self.store.root) or bool(leftovers(self.case, GoldenCase(self.case).manifest))

    def settle(self) -> None:
        """The next update sees no trace of the kill."""
        commit(self.case, **state(0))
        assert seen(self.case) == "state 0"
        assert not self.left()


class Dumps:
    """A writer that records a run into a fresh folder each time; what it leaves are whole records."""

    def __init__(self, folder: Path) -> None:
        self.root, self.attempt = folder, 0

    @property
    def folder(self) -> Path:
        return self.root / str(self.attempt)

    def write(self, moment: int) -> None:
        if moment:
            time.sleep(60)
        with recording(Recorder(self.folder, options={"loss": True, "trajectory": True})):
            for step in range(12):
                with at(step=step):
                    tap_trajectories([Trajectory("g", run, [1, 2, 3], [0, 1, 1], 0.5, 1) for run in range(4)])
                    tap("loss", x=np.full(500, step))

    def check(self) -> str:
        files = [path for path in self.folder.rglob("step_*") if not path.name.startswith(TEMPORARY)]
        for path in files:
            record = read(path)
            assert record.type == "trajectory" or (record.tensors["x"] == record.step).all()
        if (self.folder / MANIFEST).exists():
            assert len(files) == 24
            return "complete"
        return "partial" if files else "empty"

    def left(self) -> bool:
        return any(self.folder.rglob(f"{TEMPORARY}*"))

    def settle(self) -> None:
        self.attempt += 1


def killed(write: Callable[[int], None], delay: float) -> None:
    """Run a writer in a child and kill it after a moment."""
    pid = os.fork()
    if not pid:
        try:
            for moment in count():
                write(moment)
        finally:
            os._exit(1)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), "the writer failed on its own"


def usual(subject: Commits | Dumps) -> float:
    """Seconds in which a child usually writes twice, or all it has to write; not many of them."""
    start = time.monotonic()
    for moment in (1, 0):
        if not (moment and isinstance(subject, Dumps)):
            subject.write(moment)
    span = time.monotonic() - start
    subject.check()
    subject.settle()
    return min(span + 0.005, 0.3)  # a busy machine must not make the test long, nor all kills come too early


def main(writer: str, folder: str, attempts: str, seed: str) -> None:
    """See the docstring of the module."""
    # a killed process loses nothing that it wrote, and other tests need the disk; but a disk takes its time, so a
    # kill between the write and the rename is likely on a fast machine too
    os.fsync = lambda handle: time.sleep(0.001)
    rng = random.Random(seed)
    subject = {"commit": Commits, "dump": Dumps}[writer](Path(folder))
    found: Counter[str] = Counter()
    wrong: list[str] = []
    left = 0
    span = usual(subject)
    for attempt in range(20 * int(attempts)):
        if attempt >= int(attempts) and left and len({name.partition(",")[0] for name in found}) > 1:
            break  # enough attempts, and at least one kill came in between
        killed(subject.write, rng.uniform(0, span))
        try:
            left += subject.left()
            found[subject.check()] += 1
            subject.settle()
        except Exception as error:  # whatever is wrong is what the test asks for
            wrong.append(f"attempt {attempt}: {error!r}")
    print(json.dumps({"found": found, "left": left, "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
