"""Runs mutants through golden replays, the cheapest first, until one fails; what is left goes through unit tests."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation.checks import Check, fails
from mutation.mutants import Mutant
from mutation.scopes import Scope


@dataclass(frozen=True)
class Outcome:
    """Outcome of a mutant.

    Attributes:
        mutant: as a text.
        name: of the mutant.
        fate: ``killed``, ``alive``, or ``unreached`` if no check runs its line.
        by: the check that killed it.
        why: its first failing verdict, or the error.
        tried: number of checks that ran.
    """

    mutant: str
    name: str
    fate: str
    by: str = ""
    why: str = ""
    tried: int = 0


class Cache:
    """Outcomes by mutant and checks, in a file of one JSON object a line; a run that was broken off goes on from it."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, dict[str, Outcome]()
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                key = entry.pop("key")
                self._known[key] = Outcome(**entry)

    def get(self, key: str) -> Outcome | None:
        """Return the outcome under a key, if it is known."""
        return self._known.get(key)

    def add(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome."""
        self._known[key] = outcome
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **asdict(outcome)}) + "\n")


def run(scope: Scope, checks: Sequence[Check], cache: Cache, until: float) -> Iterator[Outcome]:
    """Yield the outcome of each mutant of a scope.

    Args:
        checks: with the lines that each reaches.
        until: time, as of ``time.time``, at which no further mutant is begun.
    """
    for mutant in scope.mutants():
        reaching = sorted(
            (check for check in checks if check.reaches(mutant)), key=lambda check: check.seconds
        )
        chosen = _spread(reaching, mutant)
        key = f"{mutant.name} {_digest(check.key for check in chosen)}"
        outcome = cache.get(key)
        if outcome is None:
            if time.time() > until:
                return
            outcome = _tried(mutant, chosen)
            cache.add(key, outcome)
        yield outcome


def _spread(checks: Sequence[Check], mutant: Mutant) -> list[Check]:
    """Order checks: the cheapest of each case first, then the others, drawn by the mutant's name."""
    first: dict[str, Check] = {}
    for check in checks:
        first.setdefault(check.case, check)
    others = [check for check in checks if check not in first.values()]
    random.Random(mutant.name).shuffle(others)
    return [*sorted(first.values(), key=lambda check: check.seconds), *others]


def _tried(mutant: Mutant, checks: Sequence[Check]) -> Outcome:
    if not checks:
        return Outcome(str(mutant), mutant.name, "unreached")
    for count, check in enumerate(checks, 1):
        with tempfile.TemporaryDirectory() as folder:
            why = fails(check, mutant, Path(folder))
        if why:
            return Outcome(str(mutant), mutant.name, "killed", check.name, why, count)
    return Outcome(str(mutant), mutant.name, "alive", tried=len(checks))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:12]
