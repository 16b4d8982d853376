"""Microbatches and packed rows of a batch, beside the whole batch in rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from regress.check.check_report import DEPARTS, DEPENDS, RIGHT, UNSEEN, Checked
from regress.check.loss_arguments import BOUNDARIES
from regress.check.loss_calls import FLAT, PACKED, Caller, Form, Result
from regress.check.objective_batches import GROUP, Batch

_ROUNDING = 1e-5
"""Largest difference of two ways, relative to the largest gradient."""


def in_layouts(caller: Caller, form: Form, batch: Batch) -> Iterator[Checked]:
    """Yield whether microbatches and packed rows give the gradient of the whole batch in rows."""
    whole = caller.tried(batch, form)
    if isinstance(whole, str) or not bool(torch.isfinite(whole.gradient).all()):
        return
    cut = [[*range(GROUP)], [*range(GROUP, batch.count)]]
    parts = [batch.rows(rows) for rows in cut]
    found = [caller.tried(part, form, batch) for part in parts]
    yield _microbatches(caller, parts, found, [whole.gradient[rows] for rows in cut], batch)
    yield _packed(caller, form, batch, whole)


def _microbatches(
    caller: Caller,
    parts: Sequence[Batch],
    found: Sequence[Result | str],
    golden: Sequence[Tensor],
    batch: Batch,
) -> Checked:
    name = f"microbatches of {' and '.join(str(part.count) for part in parts)} samples"
    factors = []
    for one, own in zip(found, golden, strict=True):
        if isinstance(one, str):
            return Checked(name, DEPARTS, f"fails: {one}")
        factors.append(_factor(one.gradient, own))
    shares = {
        "they add up to the whole batch": [1.0 for _ in parts],
        "weigh each by its share of the loss tokens": [part.tokens / batch.tokens for part in parts],
        "weigh each by its share of the samples": [part.count / batch.count for part in parts],
    }
    for text, expected in shares.items():
        if all(f is not None and abs(f - e) <= 1e-6 for f, e in zip(factors, expected, strict=True)):
            if text.startswith("weigh"):
                return Checked(name, DEPENDS, f"each is averaged by itself: {text}, and add them up")
            return Checked(name, RIGHT, text)
    return Checked(
        name, DEPENDS, "no weights of the microbatches give the whole batch: its samples depend on each other"
    )


def _factor(values: Tensor, other: Tensor) -> float | None:
    """Return the number that values are to be multiplied by to be the others."""
    square = float((values * values).sum())
    factor = float((values * other).sum()) / square if square else 0.0
    close = (other - factor * values).abs().max() <= 1e-9 * other.abs().max()
    return factor if bool(close) else None


def _packed(caller: Caller, form: Form, batch: Batch, whole: Result) -> Checked:
    name = "packed into one row"
    terms = {argument.term for argument in caller.used()}
    if form.layout == FLAT:
        return Checked(name, RIGHT, "it takes loss tokens without padding")
    if form.advantages != "token" or {"rewards", "groups"} & terms:
        return Checked(name, UNSEEN, "it takes one value for each row")
    packed = caller.tried(batch, replace(form, layout=PACKED))
    bounded = bool(terms & {*BOUNDARIES})
    if isinstance(packed, str):
        return Checked(name, DEPARTS if bounded else UNSEEN, f"fails: {packed}")
    scale = float(whole.gradient.abs().max()) or 1.0
    if float((packed.gradient - whole.gradient).abs().max()) <= _ROUNDING * scale:
        return Checked(name, RIGHT, "")
    if bounded:
        return Checked(name, DEPARTS, "the gradient is not that of the same samples in rows")
    return Checked(
        name, UNSEEN, "it averages over rows, and takes nothing that tells where samples end in one"
    )
