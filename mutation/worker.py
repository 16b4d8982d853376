"""Worker: runs one check after another in ranks of its own pool, and says how each ended."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutation.checks import Cases, Check, Prepared
from mutation.mutants import Mutant, unchanged
from mutation.ranks import Lines, judge_mutated, raised_in, run_mutated, run_tests, run_traced, trace_tests
from mutation.unit_tests import Test
from regress.dump.dump_reader import DumpReader
from regress.errors import RankError, RegressError, reason
from regress.parallel.launch.rank_pool import RankPool

MODULES = ("mutation.warm",)
LIMIT = 8.0
"""A replay is given up after this many times its seconds without a mutant, and `GRACE` more."""
GRACE = 15.0


SHARED = "regress/layout/"
"""Code that the judge reads a dump by, too: its mutants are in force there as well."""


class ToolError(RegressError):
    """Fault of this tool, or of the machine: nothing is known about the mutant."""


@dataclass(frozen=True)
class Seen:
    """End of a check of a mutant.

    Attributes:
        how: ``right``, if nothing fails; ``verdict``; ``raised``, if an error passed through the mutated function;
            ``raised later``, if it arose elsewhere, or the dump cannot be judged; ``timeout``; ``unit test``.
        why: the failing verdict, or the error.
        quantity, tensor, place: of the failing verdict; the place in the source of an error.
    """

    how: str
    why: str = ""
    quantity: str = ""
    tensor: str = ""
    place: str = ""


RIGHT = Seen("right")


class Worker:
    """Runs checks, one at a time.

    A kill by anything but a verdict is believed only once the same check is right with the same function put into
    force unchanged, in ranks of the same kind.

    Args:
        cases: shared by all workers.
        modules: that the ranks' forkserver imports; unit tests need ``mutation.warm``.
    """

    def __init__(self, cases: Cases, modules: Sequence[str] = MODULES) -> None:
        self._cases = cases
        self._pool = RankPool(modules)
        self._folder = tempfile.TemporaryDirectory(dir=_memory())
        self._configs: dict[str, Any] = {}

    def close(self) -> None:
        """End the pool and leave nothing behind."""
        self._pool.close()
        self._folder.cleanup()

    def replayed(self, check: Check, mutant: Mutant) -> Seen:
        """Replay with a mutant, and judge until the first failing verdict.

        Raises:
            ToolError: if the replay does not fail by the mutant.
        """
        limit = LIMIT * check.seconds + GRACE
        seen = self._replayed(check, mutant, limit)
        if seen.how in ("right", "verdict"):
            return seen
        begun = time.monotonic()
        control = self._replayed(check, unchanged(mutant), limit)
        if control != RIGHT:
            raise ToolError(f"{check.name} fails without a mutant, too ({control.how}: {control.why})")
        if seen.how == "timeout" and time.monotonic() - begun > limit / 2:
            raise ToolError(f"{check.name} takes {time.monotonic() - begun:.0f} s without a mutant, too")
        return seen

    def tested(self, tests: Sequence[Test], mutant: Mutant) -> tuple[Seen, str]:
        """Run unit tests with a mutant until one fails, and return its name, too.

        Raises:
            ToolError: if the test fails without the mutant, too, or the tests come to no end.
        """
        limit = LIMIT * sum(test.seconds for test in tests) + GRACE
        found = self._tested([test.name for test in tests], mutant, limit)
        if found is None:
            if self._tested([test.name for test in tests], unchanged(mutant), limit) is None:
                raise ToolError(
                    f"unit tests of {mutant.path} take more than {limit:.0f} s without a mutant, too"
                )
            return Seen("timeout", f"more than {limit:.0f} s"), tests[0].name
        name, why = found
        if not why:
            return RIGHT, ""
        control = self._tested([name], unchanged(mutant), limit)
        if control is None or control[1]:
            raise ToolError(f"{name} fails without a mutant, too ({control})")
        return Seen("unit test", why), name

    def traced(self, case: str, variant: str, paths: Collection[str]) -> tuple[float, Lines]:
        """Return the seconds of a replay without a mutant, and what it reaches.

        Raises:
            ToolError: if it fails.
        """
        prepared = self._cases.prepared(case, variant)
        with self._emptied("traced") as folder:
            config = prepared.config(folder)
            start = time.monotonic()
            lines: dict[str, set[int]] = {}
            try:
                ranks = self._pool.run(run_traced, {"config": config, "paths": paths}, prepared.ranks)
                failed = prepared.first_failing(DumpReader(config.debug.dump_dir))
            except RegressError as error:
                raise ToolError(f"{case}/{variant} fails without a mutant: {reason(error)}") from error
            seconds = time.monotonic() - start
        if failed is not None:
            raise ToolError(f"{case}/{variant} fails without a mutant ({failed.quantity} {failed.name})")
        for rank in ranks:
            for path, found in rank.items():
                lines.setdefault(path, set()).update(found)
        return seconds, {path: sorted(found) for path, found in lines.items()}

    def traced_tests(self, names: Sequence[str], paths: Collection[str], timeout: float) -> list[Test]:
        """Return the unit tests of one file that pass, with what they reach."""
        with self._emptied("tests") as folder:
            arguments = {"names": names, "paths": paths, "folder": folder}
            (found,) = self._pool.run(trace_tests, arguments, 1, timeout=timeout)
        return list(found)

    def called(self, target: Any, **arguments: Any) -> Any:
        """Return what a function returns in a process that is forked from the warm one."""
        (found,) = self._pool.run(target, arguments, 1)
        return found

    def _replayed(self, check: Check, mutant: Mutant, limit: float) -> Seen:
        prepared = self._cases.prepared(check.case, check.variant)
        with self._emptied(f"{check.case}-{check.variant}") as folder:
            if check.name not in self._configs:
                self._configs[check.name] = prepared.config(folder)
            config = self._configs[check.name]
            arguments = {"config": config, "mutant": mutant, "folder": folder}
            start = time.monotonic()
            try:
                started = self._pool.run(
                    run_mutated, arguments, prepared.ranks, timeout=limit, patience=2 * limit
                )
            except RankError as error:
                return _error(folder, error, time.monotonic() - start > limit)
            if not any(started):
                raise ToolError(f"{mutant.function} of {mutant.path} does not run in {check.name}")
            if mutant.path.startswith(SHARED):
                return self._judged_with(mutant, check, config, limit)
            return _judged(prepared, config)

    def _judged_with(self, mutant: Mutant, check: Check, config: Any, limit: float) -> Seen:
        dump = Path(config.debug.dump_dir)
        arguments = {"case": check.case, "variant": check.variant, "dump": dump, "mutant": mutant}
        start = time.monotonic()
        try:
            (failed,) = self._pool.run(judge_mutated, arguments, 1, timeout=limit)
        except RankError as error:
            if time.monotonic() - start > limit:
                return Seen("timeout", reason(error))
            return Seen("raised later", f"the dump cannot be judged: {reason(error)}")
        if failed is None:
            return RIGHT
        quantity, tensor, place = failed
        return Seen("verdict", f"{quantity} {tensor} at {place}", quantity, tensor, f"{check.name} {place}")

    def _tested(self, names: Sequence[str], mutant: Mutant, limit: float) -> tuple[str, str] | None:
        with self._emptied("tests") as folder:
            arguments = {"names": names, "mutant": mutant, "folder": folder}
            start = time.monotonic()
            try:
                (found,) = self._pool.run(run_tests, arguments, 1, timeout=limit, patience=2 * limit)
            except RankError as error:
                if time.monotonic() - start > limit:
                    return None
                raise ToolError(f"unit tests of {mutant.path}: {reason(error)}") from error
        return found.name, found.why

    @contextmanager
    def _emptied(self, name: str) -> Iterator[Path]:
        folder = Path(self._folder.name) / name
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _error(folder: Path, error: RankError, late: bool) -> Seen:
    """Return how a replay ended whose ranks did not all return, from what they told before their end."""
    told = raised_in(folder)
    if not told or told[0].connection:
        if late:
            return Seen("timeout", reason(error))
        raise ToolError(f"ranks ended without a word of their own: {reason(error)}") from error
    if not any(one.started for one in told):
        raise ToolError(f"a replay ended before its mutated function ran: {told[0].error}") from error
    inside = [one for one in told if one.inside]
    first = [*inside, *told][0]
    return Seen("raised" if inside else "raised later", first.error, place=first.place)


def _judged(prepared: Prepared, config: Any) -> Seen:
    try:
        failed = prepared.first_failing(DumpReader(config.debug.dump_dir))
    except RegressError as error:
        return Seen("raised later", f"the dump cannot be judged: {reason(error)}")
    except Exception as error:  # the judge has to answer any dump with verdicts or one sentence
        raise ToolError(f"the judge raised {type(error).__name__}: {reason(error)}") from error
    if failed is None:
        return RIGHT
    where = f"{prepared.replay.name} {failed.place}"
    return Seen("verdict", _text(failed), failed.quantity, failed.name, where)


def _text(failed: Any) -> str:
    return f"{failed.quantity} {failed.name} at {failed.place}"


def _memory() -> str | None:
    """Return a folder in memory, if the machine has one."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() else None
