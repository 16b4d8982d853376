"""Check somebody's loss function against an objective of the catalogue, in float64: value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regress.check.check_report import DEPARTS, DEPENDS, RIGHT, UNSEEN, Checked, ObjectiveCheck
from regress.check.counterfactual_search import FLOAT32, Run, Search
from regress.check.expected_objective import GRADIENT, LOSS
from regress.check.loss_arguments import BOUNDARIES, arguments_of, name_of
from regress.check.loss_calls import FLAT, PACKED, Caller, Form, Result, call_lines, chosen_form
from regress.check.objective_batches import GROUP, Batch, batches
from regress.grpo.objective_presets import make_objective

_EXACT = 1e-9
"""Largest relative difference of two computations in float64."""


def check_objective(
    loss: Callable[..., Any],
    preset: str,
    *,
    settings: Mapping[str, Any] | None = None,
    terms: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ObjectiveCheck:
    """Check a loss function against an objective: padded, packed and in microbatches, value and gradient.

    The function is called by its arguments' names with log-probs, old log-probs, advantages, a mask and so on, of small
    seeded batches in float64. Where its gradient is not the objective's, the change of the objective that gives it is
    searched for.

    Args:
        preset: such as "dapo" or "trl:dr_grpo"; `regress objective` lists them.
        settings: fields of the objective that differ from the preset's.
        terms: argument -> term, where its name does not tell.
        arguments: argument -> value that it is called with whatever the batch.

    Raises:
        ConfigError: if there is no such objective, or the function cannot be called.
    """
    objective = make_objective(preset, **(settings or {}))
    loss = loss() if isinstance(loss, type) else loss
    given = dict(arguments or {})
    caller = Caller(loss, arguments_of(loss, terms or {}, given), given, objective)
    known = batches()
    form = chosen_form(caller, known[0])
    from_rewards = not any(argument.term == "advantages" for argument in caller.used())
    results = [caller.tried(batch, form) for batch in known]
    by_token = any(isinstance(one, Result) and one.by_token for one in results)
    own = _Results(known, results, Search(loss, objective, from_rewards, by_token))
    return ObjectiveCheck(
        name_of(loss),
        preset,
        dict(settings or {}),
        tuple(call_lines(caller, form)),
        (*own.rows(), *in_layouts(caller, form, known[0])),
        tuple(own.departures()),
        tuple(own.notes()),
    )


def assert_objective(
    loss: Callable[..., Any],
    preset: str,
    *,
    settings: Mapping[str, Any] | None = None,
    terms: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Fail unless a loss function is an objective of the catalogue; the arguments are those of `check_objective`.

    Raises:
        AssertionError: it departs; the message says by what.
        ConfigError: there is no such objective, or the function cannot be called.
    """
    __tracebackhide__ = True
    found = check_objective(loss, preset, settings=settings, terms=terms, arguments=arguments)
    if found.exit_code:
        raise AssertionError(found.to_text())


@dataclass(frozen=True)
class _Results:
    """The results of the batches, beside those of the objective."""

    batches: Sequence[Batch]
    results: Sequence[Result | str]
    search: Search

    @cached_property
    def runs(self) -> list[Run]:
        """Batches on which the function gave a finite gradient."""
        pairs = zip(self.batches, self.results, strict=True)
        return [(batch, one) for batch, one in pairs if isinstance(one, Result) and one.finite]

    @cached_property
    def wrong(self) -> dict[str, str]:
        """Batch -> first quantity that is not the objective's there."""
        found = {}
        for run in self.runs:
            for quantity in (LOSS, GRADIENT):
                if not self.search.beside(run, quantity).right:
                    found[run[0].name] = quantity
        return found

    def rows(self) -> Iterator[Checked]:
        """Yield a line for each batch."""
        for batch, result in zip(self.batches, self.results, strict=True):
            if isinstance(result, str):
                yield Checked(batch.name, DEPARTS, f"fails: {result}")
            elif not result.finite:
                count = int((~torch.isfinite(result.gradient)).sum())
                text = f"the gradient is not finite at {count} of {result.gradient.numel()} places"
                yield Checked(batch.name, DEPARTS, text)
            elif (quantity := self.wrong.get(batch.name)) == GRADIENT:
                yield Checked(batch.name, DEPARTS, self._worst((batch, result)))
            elif quantity == LOSS:
                yield Checked(batch.name, DEPARTS, "the gradient is right, the value is not")
            else:
                yield Checked(batch.name, RIGHT, "")

    def _worst(self, run: Run) -> str:
        """Return how many gradients are others, and the one that is furthest off."""
        batch, result = run
        beside = self.search.beside(run, GRADIENT)
        off = beside.off
        outside = int(((off > FLOAT32) & ~batch.mask.flatten().numpy()).sum())
        if outside:
            return f"{outside} places outside the mask have a gradient"
        row, column = divmod(int(np.argmax(off)), batch.width)
        ratio = float((batch.values["log_probs"] - batch.values["old_log_probs"])[row, column].exp())
        token = f"ratio {ratio:.3g}"
        if not self.search.from_rewards:
            token += f", advantage {float(batch.values['advantages'][row, column]):.3g}"
        scale = float(self.search.expected(batch).scale[GRADIENT][int(np.argmax(off))])
        golden = scale * float(beside.plain[int(np.argmax(off))])
        return (
            f"{int((off > FLOAT32).sum())} of {batch.tokens} loss tokens have another gradient: sample {row}, token "
            f"{column} ({token}) has {float(result.gradient[row, column]):.4g}, the objective's is {golden:.4g}"
        )

    def notes(self) -> Iterator[str]:
        """Yield what is worth knowing, and no departure."""
        if self.search.by_token:
            yield "it returns the loss of each token: how they are averaged was not seen"
        if self.wrong:
            return
        found = [self.search.beside(run, GRADIENT) for run in self.runs]
        off = max((float(one.off.max()) for one in found), default=0.0)
        if off <= _EXACT:
            return
        cause = None if any(one.in_float32 for one in found) else self.search.cause(self.runs, GRADIENT)
        yield (
            f"its gradient is that of {cause}, which hardly differs"
            if cause
            else (f"its gradient differs by {off:.1e} of the objective's, as in float32")
        )

    def departures(self) -> Iterator[str]:
        """Yield what the function does in place of the objective."""
        pairs = [*zip(self.batches, self.results, strict=True)]
        if failed := [f"{batch.name}: {one}" for batch, one in pairs if isinstance(one, str)]:
            yield "it fails on " + "; ".join(failed)
        if broken := [batch.name for batch, one in pairs if isinstance(one, Result) and not one.finite]:
            yield f"its gradient is not finite on {', '.join(broken)}"
        if not self.wrong:
            return
        if not any(result.gradient.any() for _, result in self.runs):
            yield "no gradient reaches the log-probs: they are detached, or the loss does not depend on them"
            return
        quantity = GRADIENT if GRADIENT in self.wrong.values() else LOSS
        cause = self.search.cause(self.runs, quantity)
        if quantity == GRADIENT:
            yield (
                f"its gradient is that of {cause}"
                if cause
                else ("no change of the objective that was tried gives its gradient")
            )
        else:
            statement = (
                f"that is the value of {cause}"
                if cause
                else "no change of the objective that was tried gives it"
            )
            yield f"its gradient is right, its value is not, on {', '.join(self.wrong)}: {statement}"


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
