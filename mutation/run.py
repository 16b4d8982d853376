"""Runs mutants through golden replays and unit tests until one fails.

The cheapest replays of some cases come first, then the unit tests that reach the line, then the other replays.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from mutation.checks import Check, content_of
from mutation.mutants import Mutant, unchanged
from mutation.scopes import Scope
from mutation.unit_tests import Test, files
from mutation.worker import RIGHT, Seen, ToolError, Worker

FIRST = 1
"""Replays that come before the unit tests."""
QUICK = 0.05
"""Seconds below which all parameters of a test run."""
ALTOGETHER, LEAST = 10.0, 3
"""Seconds of the unit tests of a mutant, the cheapest of those that reach its line; and how many run anyway."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mutant.

    Attributes:
        mutant: as a text.
        name: of the mutant.
        fate: ``killed``, ``alive``, ``timeout`` if a check came to no end, ``unreached`` if no check runs its line,
            ``error`` if the tool or the machine failed, so that nothing is known.
        how: it was killed by a ``verdict``, ``raised``, ``raised later`` or ``unit test``; see `Seen`.
        by: name of the check that ended it.
        why, quantity, tensor, place: what that check saw.
        key: name and content of that check.
        tried: digests of the checks that were right.
    """

    mutant: str
    name: str
    fate: str
    how: str = ""
    by: str = ""
    why: str = ""
    quantity: str = ""
    tensor: str = ""
    place: str = ""
    key: str = ""
    tried: tuple[str, ...] = ()


class Cache:
    """Outcomes by mutant, in a file of one JSON object a line; a run that was interrupted goes on from it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._known, self._lock = path, dict[str, Outcome](), threading.Lock()
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self._known[entry["name"]] = Outcome(**{**entry, "tried": tuple(entry["tried"])})

    def get(self, name: str) -> Outcome | None:
        """Return what is known of a mutant; an error is not an outcome."""
        found = self._known.get(name)
        return None if found is None or found.fate == "error" else found

    def of(self, mutants: Iterable[Mutant]) -> list[tuple[Mutant, Outcome]]:
        """Return what is known of mutants, killed ones only while the check that killed them is as it was."""
        tests, cases = files(), cache(content_of)
        found = []
        for mutant in mutants:
            outcome = self.get(mutant.name)
            if outcome is None:
                continue
            by, _, content = outcome.key.rpartition("@")
            file = by.partition("::")[0]
            now = tests.get(file) if "::" in by else cases(by.partition("/")[0]) if by else content
            if now == content:
                found.append((mutant, outcome))
        return found

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome."""
        with self._lock:
            self._known[outcome.name] = outcome
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


@dataclass(frozen=True)
class Suite:
    """All checks.

    Attributes:
        replays, tests: with the lines that each reaches.
        most: replays that a mutant goes through at most; None: all that reach it.
        keys: of all, by name and content.
    """

    replays: Sequence[Check]
    tests: Sequence[Test]
    most: int | None = None
    keys: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        keys = frozenset([*(check.key for check in self.replays), *(test.key for test in self.tests)])
        object.__setattr__(self, "keys", keys)

    def of(self, mutant: Mutant) -> list[Check | list[Test]]:
        """Return the checks that reach a mutant, in their order; unit tests together."""
        replays = spread([check for check in self.replays if check.reaches(mutant)], mutant)
        tests = cheapest([test for test in self.tests if test.reaches(mutant)])
        return [*replays[:FIRST], *([tests] if tests else []), *replays[FIRST : self.most]]


def run(
    scope: Scope,
    suite: Suite,
    cache: Cache,
    workers: Sequence[Worker],
    until: float,
    most: int | None = None,
) -> Iterator[tuple[Mutant, Outcome]]:
    """Yield each mutant of a scope with its outcome, as they come.

    Args:
        workers: that share them.
        until: time, as of ``time.time``, at which no further mutant is begun.
        most: number of mutants, None for all; the first ones are a sample.

    Raises:
        ToolError: if a function that was put into force unchanged is not found to be alive.
    """
    prove(scope, suite, workers[0])
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def outcome(mutant: Mutant) -> Outcome | None:
        if time.time() > until:
            return known(mutant, suite, cache)
        worker = free.get()
        try:
            return decided(mutant, suite, cache, worker)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(len(workers)) as threads:
        futures: Mapping[Future[Outcome | None], Mutant] = {
            threads.submit(outcome, mutant): mutant for mutant in scope.mutants()[:most]
        }
        for future in as_completed(futures):
            found = future.result()
            if found is not None:
                yield futures[future], found


def prove(scope: Scope, suite: Suite, worker: Worker) -> None:
    """Show that a change which changes nothing is not taken for a mutant that was killed.

    Raises:
        ToolError: if it is.
    """
    for mutant in scope.mutants():
        check = next((found for found in suite.of(mutant) if isinstance(found, Check)), None)
        if check is not None:
            seen = worker.replayed(check, unchanged(mutant))
            if seen != RIGHT:
                raise ToolError(
                    f"{check.name} fails with {mutant.function} unchanged ({seen.how}: {seen.why})"
                )
            return


def known(mutant: Mutant, suite: Suite, cache: Cache) -> Outcome | None:
    """Return the outcome of a mutant if the cache has it, and the check that ended it is still the same."""
    found = cache.get(mutant.name)
    if found is None:
        return None
    if found.fate in ("killed", "timeout"):
        return found if found.key in suite.keys else None
    keys = {digest(one.key) for check in suite.of(mutant) for one in _each(check)}
    return found if keys <= {*found.tried} else None


def decided(mutant: Mutant, suite: Suite, cache: Cache, worker: Worker) -> Outcome:
    """Return the outcome of a mutant; checks that were right before are not run again."""
    found = known(mutant, suite, cache)
    if found is not None:
        return found
    before = cache.get(mutant.name)
    tried = [] if before is None else list(before.tried)
    try:
        found = _tried(mutant, suite.of(mutant), worker, tried)
    except ToolError as error:
        found = Outcome(str(mutant), mutant.name, "error", why=str(error), tried=tuple(tried))
    cache.add(found)
    return found


def _tried(mutant: Mutant, checks: Sequence[Check | list[Test]], worker: Worker, tried: list[str]) -> Outcome:
    for check in checks:
        left = [one for one in _each(check) if digest(one.key) not in tried]
        if not left:
            continue
        if isinstance(check, Check):
            seen, ended = worker.replayed(check, mutant), check.key
            by = check.name
        else:
            seen, by = worker.tested([one for one in left if isinstance(one, Test)], mutant)
            ended = next((one.key for one in left if one.name == by), "")
        if seen != RIGHT:
            return _ended(mutant, seen, by, ended, tried)
        tried += [digest(one.key) for one in left]
    return Outcome(str(mutant), mutant.name, "alive" if tried else "unreached", tried=tuple(tried))


def _ended(mutant: Mutant, seen: Seen, by: str, key: str, tried: Sequence[str]) -> Outcome:
    fate = "timeout" if seen.how == "timeout" else "killed"
    what = asdict(seen)
    return Outcome(str(mutant), mutant.name, fate, by=by, key=key, tried=tuple(tried), **what)


def _each(check: Check | list[Test]) -> Sequence[Check | Test]:
    return [check] if isinstance(check, Check) else check


def spread(checks: Sequence[Check], mutant: Mutant) -> list[Check]:
    """Order checks: the cheapest of each case first, then the others, drawn by the mutant's name."""
    ordered = sorted(checks, key=lambda check: check.seconds)
    first: dict[str, Check] = {}
    for check in ordered:
        first.setdefault(check.case, check)
    others = [check for check in ordered if check not in first.values()]
    random.Random(mutant.name).shuffle(others)
    return [*sorted(first.values(), key=lambda check: check.seconds), *others]


def cheapest(tests: Iterable[Test]) -> list[Test]:
    """Return what is quick, the cheapest parameters of each test, and others, as many as there is time for.

    A few are returned in any case.
    """
    by_cost = sorted(tests, key=lambda test: test.seconds)
    first: dict[str, Test] = {}
    for test in by_cost:
        first.setdefault(test.name.partition("[")[0], test)
    quick = [test for test in by_cost if test.seconds < QUICK]
    ordered = list({test.name: test for test in (*quick, *first.values(), *by_cost)}.values())
    ends = accumulate(test.seconds for test in ordered)
    return [
        test
        for number, (test, end) in enumerate(zip(ordered, ends, strict=True))
        if number < LEAST or end < ALTOGETHER
    ]


def digest(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]
