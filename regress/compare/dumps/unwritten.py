"""Gradients and parameters of a single dump that are 0 throughout, though they cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from regress.compare.dumps.listing import Listed
from regress.compare.dumps.sides import Side
from regress.compare.verdicts.verdict import Place, Status, Verdict

_REMEDY = "the values were lost or never written; record them again"


def unwritten(side: Side, records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on gradients whose recorded norm is not that of zeros, and on models all of whose weights are 0.

    A tensor of zeros alone is none: experts without tokens have such gradients, and fresh adapters such weights.
    """
    gradients = [record for record in records if record.key.stage == "gradient"]
    norm = max((_norm(record) for record in gradients), default=0.0)
    if norm > 0:
        yield from _verdict(side, gradients, "gradient", place, f"though grad_norm is {norm:.9g}")
    weights = [record for record in records if record.key.stage == "param"]
    yield from _verdict(side, weights, "param", place, "which no trained model's are")


def _norm(record: Listed) -> float:
    norm = record.meta.get("grad_norm")
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not math.isfinite(norm):
        return 0.0
    return float(norm)


def _verdict(side: Side, records: Sequence[Listed], stage: str, place: Place, why: str) -> Iterator[Verdict]:
    """Yield a verdict if all values of all records are 0; the first other value ends the search."""
    count = 0
    for record in records:
        for array in side.read(record.name).tensors.values():
            if np.any(array != 0):
                return
            count += array.size
    if count > 1:
        detail = f"each of {count} values is 0, {why}: {_REMEDY}"
        yield Verdict.fault(Status.DRIFT, stage, stage, place, detail, count, count=count)
