"""Temperatures that token gradients were solved at: a difference there changes no derivative by a log-prob."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.record import Record

LEAST = 1e-3
"""Relative difference below which a solved temperature is taken for the same one."""
MUCH = 10.0
"""Relative error of a temperature over the part of the gradients that nothing explains: rounding, or other terms."""


def judge_temperatures(
    actual: Record, golden: Iterable[Record], tolerance: Tolerance, *, place: Place, suffix: str
) -> tuple[Verdict, Tolerance] | None:
    """Return the verdict on the divisor of the logits, farthest from any golden one; None where a side tells none.

    The loss may depend on log-probs alike and these on other logits: ``d loss / d log-prob`` then holds.
    """
    records = list(golden)
    own, known = (
        _recorded_temperatures(actual),
        [value for record in records for value in _recorded_temperatures(record)],
    )
    if not own or not known:
        return None
    pairs = [(value, min(known, key=lambda one: abs(one - value))) for value in own]
    value, nearest = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    unexplained = max(_unexplained(record) for record in (actual, *records))
    bound = replace(tolerance, relative=max(LEAST, tolerance.relative, MUCH * unexplained), bitwise=False)
    verdict = judge_tensor(
        np.asarray(value),
        np.asarray(nearest),
        bound,
        quantity="token_gradient",
        name=f"temperature{suffix}",
        place=place,
        locate=lambda _: "divisor of the logits",
    )
    return verdict, bound


def _unexplained(record: Record) -> float:
    """Return the median part of a token's gradient that log-prob and entropy leave unexplained."""
    rest = record.tensors.get("token_residual")
    if rest is None:
        return 0.0
    values = rest.astype(np.float64)
    some = values[np.isfinite(values) & (values > 0)]
    return float(np.median(some)) if some.size else 0.0


def _recorded_temperatures(record: Record) -> list[float]:
    temperatures: Any = record.meta.get("temperatures")
    return (
        [float(one) for one in temperatures if isinstance(one, int | float)]
        if isinstance(temperatures, list)
        else []
    )
