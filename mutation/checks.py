"""Checks of a mutant: golden replays of the default matrix in true float64, and what each of them reaches."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mutation.mutants import ROOT, Mutant
from regress.compare.verdicts.verdict import Verdict
from regress.dump.dump_reader import DumpReader
from regress.engine.config.config_schema import Config
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.replay.replay_configuration import replay_config
from regress.replay.replay_judge import Truth, stored_tolerances, verdicts_in_order
from regress.replay.test_matrix import Replay, replays
from regress.replay.variant import LOCAL, Extent, Precision
from regress.replay.variant_requirements import has_other_values
from regress.replay.variant_table import VARIANTS

_COMPOSING = threading.Lock()
"""Hydra composes one configuration of a process at a time."""


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
        return mutant.reached(self.lines.get(mutant.path, ()))


@dataclass(frozen=True)
class Prepared:
    """A replay whose golden values and plan are read once, by the engine as it is.

    Attributes:
        replay: case and variant, in float64.
        truths: golden values by update, as far as they were asked for.
    """

    replay: Replay
    truths: dict[str, Truth]

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replay.world_size

    def config(self, folder: Path) -> Config:
        """Return the engine's configuration with its dump in ``folder/dump``."""
        case, variant = self.replay.case, self.replay.variant
        with _COMPOSING:
            return replay_config(case, variant, self.replay.precision, len(case.trajectories()), folder)

    def truth(self, where: str) -> Truth:
        """Return the golden values of an update."""
        if where not in self.truths:
            self.truths[where] = self.replay.case.truth(where)
        return self.truths[where]

    def first_failing(self, dump: DumpReader) -> Verdict | None:
        """Return the first verdict that fails, and judge nothing after it."""
        case, precision = self.replay.case, self.replay.precision
        bound = stored_tolerances(case, precision)
        verdicts = verdicts_in_order(case, dump, self.replay.plan, precision, self.truth, bound)
        return next((verdict for verdict in verdicts if not verdict.ok), None)


@dataclass
class Cases:
    """Golden cases and replays of them, opened once for all threads."""

    _cases: dict[str, tuple[GoldenCase, dict[str, Truth]]] = field(default_factory=dict)
    _replays: dict[tuple[str, str], Prepared] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def prepared(self, case: str, variant: str) -> Prepared:
        """Return a replay, ready to be judged."""
        with self._lock:
            if case not in self._cases:
                self._cases[case] = (GoldenStore(ROOT / "golden").case(case), {})
            if (case, variant) not in self._replays:
                opened, truths = self._cases[case]
                replay = Replay(opened, VARIANTS[variant], Precision.FLOAT64)
                assert replay.plan  # made while the layout is as it is
                self._replays[case, variant] = Prepared(replay, truths)
            return self._replays[case, variant]


def content_of(case: str) -> str:
    """Return the hash of a case's manifest."""
    return hashlib.sha256((ROOT / "golden" / case / "manifest.json").read_bytes()).hexdigest()[:12]


def matrix(ranks: int, extent: Extent) -> list[tuple[str, str]]:
    """Return the cases and variants of a part of the matrix that run bare steps on at most some ranks; all cases
    are among them.

    Left out are those whose values are not the stored ones, but computed for their ranks by the engine itself.
    """
    found = [name for name, count in _enumerated(extent) if count <= ranks]
    shown = {case for case, _ in found}
    return [*found, *((case, "base") for case in GoldenStore(ROOT / "golden").names() if case not in shown)]


def _enumerated(extent: Extent) -> Iterator[tuple[tuple[str, str], int]]:
    store = GoldenStore(ROOT / "golden")
    cases = [store.case(name) for name in store.names()]
    rows = {
        name: variant
        for name, variant in VARIANTS.items()
        if not variant.program and variant.trainer == LOCAL and variant.resume_at is None
    }
    for replay in replays(cases, rows, [Precision.FLOAT64], extent):
        if not has_other_values(replay):
            yield (replay.case.name, replay.variant.name), replay.world_size
