"""Golden values in the branches that a replay took, where rounding carried tokens over a bound of the clip range.

A token whose ratio lies within rounding of a bound is clipped in one precision and not in another, and both are right;
the gradients of the update then differ by all that the token adds to them. No tolerance covers that. The golden values
are therefore computed once more, in float64, with the ratios that the replay recorded for these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from regress.compare.diagnosis.token_hypotheses import clip_range
from regress.compare.dumps.recorded_clipping import ratios_as_clipped
from regress.compare.quantities import quantity_named
from regress.compare.updates.invariant_counts import QUANTITY
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.engine.config import to_plain
from regress.golden.golden_case import GoldenCase
from regress.replay.case_run import replay
from regress.replay.case_truth import canonical
from regress.replay.noise_floor import SEMANTICS
from regress.replay.replay_configuration import replay_config
from regress.replay.replay_judge import judge_replay
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.temporary_workspace import Workspace
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE

if TYPE_CHECKING:
    from regress.engine.grpo_trainer import MiniBatch
    from regress.engine.run_construction import Run
    from regress.engine.training_step import StepOutcome

NAME = "clip_branches"
_REASON = (
    "rounding carried so many tokens over a bound of the clip range: the update is judged by golden values that were "
    "computed in the branches which the replay took"
)

Truth = Mapping[str, Mapping[str, Array]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BranchTruth:
    """Golden values in the branches of a replay.

    Attributes:
        truth: function of an update's name that returns its golden values.
        verdicts: one for each update with tokens that rounding carried over a bound, which tells how many.
    """

    truth: Callable[[str], Truth]
    verdicts: Sequence[Verdict]


def branch_truth(
    case: GoldenCase, dump: DumpReader, plan: Sequence[PlannedUpdate], truth: Callable[[str], Truth]
) -> BranchTruth | None:
    """Return the golden values of a case in the branches that a replay took.

    Returns:
        None where no token was carried over a bound, and where nothing computes such values: where the dump has gaps,
        other updates would sample other rollouts, or the engine does not give the golden values themselves (what a
        changed engine computes is no truth).
    """
    if case.sampled:
        return None
    with Workspace() as folder:
        try:
            shifts = _carried(case, folder, truth, canonical(case, dump, plan))
            if not any(shift.any() for shift in shifts.values()) or not _is_true(case, folder / "same"):
                return None
            prepare = partial(_shifted, [*shifts.values()])
            values = canonical(case, replay(case, BASE, Precision.FLOAT64, folder / "moved", prepare=prepare))
        except Exception:  # a broken engine may raise anything
            return None
    verdicts = []
    for update in (update for update in plan if shifts[update.where].any()):
        count = int(np.count_nonzero(shifts[update.where]))
        verdicts.append(Verdict(Status.OK, QUANTITY, NAME, update.place, count=count, reason=_REASON))
        old = values[update.where]["old_log_probs"]
        old |= {name: array + shifts[update.where] for name, array in old.items()}
    return BranchTruth(values.__getitem__, verdicts)


def _is_true(case: GoldenCase, folder: Path) -> bool:
    """Return True if the engine gives the golden values of a case."""
    base = Replay(case, BASE, Precision.FLOAT64)
    dump = replay(case, base.variant, base.precision, folder)
    exact = partial(_semantics, case)
    verdicts = judge_replay(case, dump, base.plan, base.precision, tolerance=exact, explained=False)
    return all(verdict.ok for verdict in verdicts)


def _semantics(case: GoldenCase, quantity: str) -> Tolerance | None:
    """Return the tolerance of a well-conditioned quantity in float64, which an unmeasured case has, too."""
    if quantity in case.leaves_out:
        return None
    return EXACT if quantity_named(quantity).exact else Tolerance(SEMANTICS)


def _carried(
    case: GoldenCase, folder: Path, truth: Callable[[str], Truth], actual: Mapping[str, Truth]
) -> dict[str, Floats]:
    """Return how far rounding moved the log-ratio of each token that it carried over a bound, ``[frame.size]``.

    Args:
        actual: values of the replay by update, in order.
    """
    config = to_plain(replay_config(case, BASE, Precision.FLOAT64, len(case.trajectories()), folder))
    clip = clip_range(config["algorithm"])
    shifts = {}
    for where, values in actual.items():
        now, old, theirs, before = (
            found[quantity][quantity].astype(np.float64)
            for found in (truth(where), values)
            for quantity in ("log_probs", "old_log_probs")
        )
        moved = old if clip is None else ratios_as_clipped(now, old, theirs - before, clip, np.inf)[0]
        shifts[where] = old - moved
    return shifts


def _shifted(shifts: Sequence[Floats], run: Run) -> None:
    """Let a run, on one rank, have other log-probs from before each update."""
    trainer, step = run.trainer, run.trainer._train_step

    def shifted(mini: MiniBatch) -> StepOutcome:
        shift = shifts[trainer.updates] if trainer.updates < len(shifts) else np.zeros(0)
        old = mini.tokens.old_log_probs
        if old is None or not shift.any():
            return step(mini)
        moved = old - torch.from_numpy(shift[mini.batch.mask]).to(old)
        return step(replace(mini, tokens=replace(mini.tokens, old_log_probs=moved)))

    trainer._train_step = shifted  # type: ignore[method-assign]  # of this run alone, as a fault breaks one
