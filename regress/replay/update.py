"""Update of golden values: recompute, and change only what drifted beyond its tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from regress.compare.alignment.project import Projection
from regress.compare.quantities import METRICS, Kind, Source, quantity_named
from regress.compare.verdicts.overrides import Overrides
from regress.compare.verdicts.tensor import judge_tensor
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import Array, dtype_name, raw
from regress.dump.coordinates import parse_stem
from regress.errors import RegressError
from regress.golden.case import GoldenCase
from regress.replay.judge import stored_tolerances
from regress.replay.matrix import Replay
from regress.replay.table import BASE
from regress.replay.truth import Truth, compute_truth, flat, require_case_signal
from regress.replay.variants import Precision

Selected = Callable[[str, str], bool]
"""Predicate of (``where``, ``quantity``): True if that quantity of an update is to be updated."""


@dataclass(frozen=True)
class Change:
    """One golden tensor that is replaced, added or removed; ``old`` and ``new`` where it changes most."""

    where: str
    quantity: str
    name: str
    status: Status
    multiple: float
    max_error: float
    old: float | None
    new: float | None


@dataclass
class Proposal:
    """Result of an update before it is written.

    Attributes:
        truth: the values after it, of all updates and quantities.
        changed: the tensors that change, by update and quantity; None for one that disappears.
        changes: tensor by tensor, in the order of computation.
        looked: updates and quantities that were compared.
        compared: number of compared tensors, by quantity.
    """

    truth: Truth
    changed: dict[str, dict[str, dict[str, Array | None]]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    looked: list[tuple[str, str]] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)


def propose(
    case: GoldenCase,
    workspace: Path,
    *,
    everything: bool = False,
    selected: Selected = lambda *_: True,
    scale: float = 1.0,
    overrides: Overrides | None = None,
) -> Proposal:
    """Recompute the golden values of a case.

    Args:
        everything: replace whatever differs in a bit, not only what drifted beyond its tolerance.
        selected: predicate of the quantities that may change; the others keep their old values.
        scale: factor on the tolerances.
        overrides: tolerances that the project sets by hand.

    Raises:
        RegressError: if the values are not finite, differ between two runs, or carry too little signal.
    """
    new = compute_truth(case, workspace)
    _refuse_nonfinite(case, new)
    require_case_signal(case, new)
    old: Truth = {where: dict(case.truth(where)) for where in case.wheres()}
    frames = {update.where: update.frame for update in Replay(case, BASE, Precision.FLOAT64).plan}
    proposal = Proposal(truth={})
    bound = stored_tolerances(case, Precision.FLOAT64, scale, overrides)
    for where in dict.fromkeys([*new, *old]):
        for quantity in dict.fromkeys([*new.get(where, {}), *old.get(where, {})]):
            before, after = old.get(where, {}).get(quantity, {}), new.get(where, {}).get(quantity, {})
            if selected(where, quantity):
                golden = Projection(old[where], frames[where]) if where in old and where in frames else None
                proposal.looked.append((where, quantity))
                after = _merge(bound(quantity), proposal, where, quantity, before, after, golden, everything)
            else:
                after = before
            if after:
                proposal.truth.setdefault(where, {})[quantity] = after
    return proposal


def _merge(
    tolerance: Tolerance | None,
    proposal: Proposal,
    where: str,
    quantity: str,
    before: dict[str, Array],
    after: dict[str, Array],
    golden: Projection | None,
    everything: bool,
) -> dict[str, Array]:
    """Return the tensors of a quantity after the update: old ones stay if they are within tolerance."""
    merged = {}
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        proposal.compared[quantity] = proposal.compared.get(quantity, 0) + 1
        verdict = _judge((tolerance or EXACT).of(name), where, quantity, name, old, new, golden)
        replaced = not verdict.ok or (everything and not _same(old, new))
        if replaced:
            proposal.changes.append(_change(where, verdict))
            proposal.changed.setdefault(where, {}).setdefault(quantity, {})[name] = new
        kept = new if replaced else old
        if kept is not None:
            merged[name] = kept
    return merged


def _judge(
    tolerance: Tolerance,
    where: str,
    quantity: str,
    name: str,
    old: Array | None,
    new: Array | None,
    golden: Projection | None,
) -> Verdict:
    coordinates = parse_stem(where)
    assert coordinates is not None
    scale = None
    if golden is not None and old is not None:
        if quantity_named(quantity).kind is Kind.SHARE:
            scale = golden.share_scale(name)
        elif quantity in METRICS:
            scale = golden.scale(Source(quantity, name, quantity, name))
    return judge_tensor(
        new,
        old,
        tolerance,
        quantity=quantity,
        name=name,
        place=Place(coordinates.step, coordinates.update),
        scale=scale,
        dtype=None if old is None else dtype_name(old.dtype),
    )


def _change(where: str, verdict: Verdict) -> Change:
    worst = verdict.worst
    values = (None, None) if worst is None else (worst.golden, worst.actual)
    return Change(
        where, verdict.quantity, verdict.name, verdict.status, verdict.multiple, verdict.max_error, *values
    )


def _same(old: Array | None, new: Array | None) -> bool:
    return old is not None and new is not None and raw(old) == raw(new)


def _refuse_nonfinite(case: GoldenCase, truth: Truth) -> None:
    bad = [
        key for key, array in flat(truth).items() if array.dtype.kind == "f" and not np.isfinite(array).all()
    ]
    if bad:
        where, quantity, name = bad[0]
        raise RegressError(
            f"case {case.name}: {quantity} {name} at {where} is not finite ({len(bad)} tensors are), so it cannot be "
            "golden; find the first of them with regress dump show"
        )
