"""Checks of a mutant: golden replays of the default matrix in true float64, and what each of them reaches."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation.mutants import ROOT, Mutant
from mutation.ranks import Mutated, Traced
from regress.errors import RegressError
from regress.golden.store import GoldenStore
from regress.parallel.launch.launchers import Launch
from regress.replay.judge import judge_replay
from regress.replay.layouts import LAYOUTS
from regress.replay.matrix import Replay
from regress.replay.run import replay
from regress.replay.variant_rows import VARIANTS
from regress.replay.variants import Extent, Precision

TIMES = 20.0
"""A mutant is given up, and killed, after this many times the seconds of the unchanged replay, and then some."""


TABLE = {**VARIANTS, **LAYOUTS}


@dataclass(frozen=True)
class Check:
    """A golden replay.

    Attributes:
        case, variant: which one.
        seconds: that it takes without a mutant.
        lines: of each file that it reaches.
        content: hash of the case's manifest.
    """

    case: str
    variant: str
    seconds: float
    lines: dict[str, list[int]]
    content: str

    @property
    def name(self) -> str:
        """Name as in test ids."""
        return f"{self.case}/{self.variant}"

    @property
    def key(self) -> str:
        """Name and content: a case that was recorded again is another check."""
        return f"{self.name}@{self.content}"

    def reaches(self, mutant: Mutant) -> bool:
        """Tell whether the replay runs the mutant's line."""
        return mutant.line in self.lines.get(mutant.path, ())


def fails(check: Check, mutant: Mutant, folder: Path) -> str:
    """Replay with a mutant and return the first failing verdict, or the error; an empty text if all are right."""
    return _first(
        check.case, check.variant, folder, Mutated(mutant=mutant, timeout=TIMES * check.seconds + 30)
    )


def traced(names: Iterable[tuple[str, str]], paths: Collection[str], cache: Path) -> Iterator[Check]:
    """Yield the checks of some cases and variants, with what they reach.

    Raises:
        RegressError: if a replay fails without a mutant.
    """
    cache.mkdir(parents=True, exist_ok=True)
    sources = hashlib.sha256(b"".join((ROOT / path).read_bytes() for path in sorted(paths))).hexdigest()[:12]
    for case, variant in names:
        content = hashlib.sha256((ROOT / "golden" / case / "manifest.json").read_bytes()).hexdigest()[:12]
        kept = cache / f"{case}-{variant}-{content}-{sources}.json"
        if not kept.exists():
            with tempfile.TemporaryDirectory() as folder:
                launch, start = Traced(paths=tuple(paths)), time.monotonic()
                why = _first(case, variant, Path(folder), launch)
                if why:
                    raise RegressError(f"{case}/{variant} fails without a mutant ({why}): mend it first")
                lines = {path: sorted(found) for path, found in launch.lines.items() if found}
                check = Check(case, variant, time.monotonic() - start, lines, content)
            kept.write_text(json.dumps(asdict(check)), encoding="utf-8")
        yield Check(**json.loads(kept.read_text(encoding="utf-8")))


def matrix(ranks: int, extent: Extent) -> list[tuple[str, str]]:
    """Return the cases and variants of a part of the matrix that run bare steps on at most some ranks."""
    store = GoldenStore(ROOT / "golden")
    cases = {name: store.case(name) for name in store.names()}
    found = []
    for variant in TABLE.values():
        if variant.program or variant.wire or variant.resume_at is not None:
            continue
        if Precision.FLOAT64 not in variant.precisions:
            continue
        first = variant.first_of(cases)
        named = [name for name in cases if variant.applies_to(name, extent)]
        chosen = [first] if extent is Extent.REDUCED and first else named
        replays = [Replay(cases[name], variant, Precision.FLOAT64) for name in chosen]
        found += [(replay.case.name, variant.name) for replay in replays if replay.world_size <= ranks]
    return found


def _first(case: str, variant: str, folder: Path, launch: Launch) -> str:
    chosen = Replay(GoldenStore(ROOT / "golden").case(case), TABLE[variant], Precision.FLOAT64)
    try:
        dump = replay(chosen.case, chosen.variant, chosen.precision, folder, launch=launch)
        verdicts = judge_replay(chosen.case, dump, chosen.plan, chosen.precision)
    except RegressError as error:
        return f"{type(error).__name__}: {error}"
    failed = next((verdict for verdict in verdicts if not verdict.ok), None)
    return "" if failed is None else f"{failed.quantity} {failed.name} at {failed.place}"
