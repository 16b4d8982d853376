"""Replay that tests tolerances: healthy, or with a fault in the engine."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from regress.compare.verdicts.tolerance import Tolerances
from regress.compare.verdicts.verdict import Status, Verdict
from regress.golden.golden_case import GoldenCase
from regress.replay.case_run import replay
from regress.replay.interprocess_lock import stated
from regress.replay.probes import Probe
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_requirements import keeps_microbatches
from regress.replay.variant_table import VARIANTS

HELD_OUT = (
    *("left", "mbs3", "packed", "packed-dynamic", "varlen", "eager", "reversed", "chunked", "threads2"),
    "adamw-fused",
)
"""Healthy variants that no tolerance is measured with: padding, microbatches, packing, kernels, order, threads."""


@dataclass(frozen=True)
class ValidationRun:
    """Result of one run.

    Attributes:
        name: name of the variant, or of the fault.
        relative: largest error of each quantity, over the scale of its tensor.
        multiples: the same in multiples of its tolerance; infinite for what no tolerance allows.
        first: quantity that is the first to fail, None if nothing does.
        worst: the tensor with the largest multiple, in words.
        problem: reason it could not be run.
    """

    name: str
    precision: Precision
    relative: Mapping[str, float] = field(default_factory=dict)
    multiples: Mapping[str, float] = field(default_factory=dict)
    first: str | None = None
    worst: str = ""
    problem: str | None = None

    @property
    def multiple(self) -> float:
        """Largest multiple of all quantities."""
        return max(self.multiples.values(), default=0.0)


def run_validation(
    case: GoldenCase,
    variant: str,
    precision: Precision,
    folder: Path,
    bounds: Tolerances,
    fault: Probe | None = None,
    also: Callable[[list[Verdict]], None] = lambda _: None,
) -> ValidationRun:
    """Replay and judge; a refusal by the engine, healthy or broken, is a problem, not an exception."""
    name = variant if fault is None else fault.words
    layout = Replay(case, VARIANTS[variant], precision)
    if not keeps_microbatches(layout):
        return ValidationRun(name, precision, problem="the values of the case depend on its microbatches")
    try:
        around = None if fault is None else fault.injected
        dump = replay(case, layout.variant, precision, folder, around=around)
        verdicts = judge_replay(case, dump, layout.plan, precision, tolerance=bounds, explained=False)
    except Exception as error:  # a broken engine may raise anything
        return ValidationRun(name, precision, problem=stated(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    also(verdicts)
    return _result(name, precision, verdicts)


def _result(name: str, precision: Precision, verdicts: Iterable[Verdict]) -> ValidationRun:
    relative: dict[str, float] = {}
    multiples: dict[str, float] = {}
    first, worst, most = None, "", 0.0
    for verdict in verdicts:
        found = verdict.multiple if verdict.status in (Status.OK, Status.DRIFT) else math.inf
        multiples[verdict.quantity] = max(multiples.get(verdict.quantity, 0.0), found)
        relative[verdict.quantity] = max(relative.get(verdict.quantity, 0.0), verdict.relative)
        if first is None and not verdict.ok:
            first = verdict.quantity
        if found > most:
            most, worst = found, f"{verdict.quantity} {verdict.name} at {verdict.place}"
    return ValidationRun(name, precision, relative, multiples, first, worst)
