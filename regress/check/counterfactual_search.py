"""The search for the change of an objective that gives what somebody's function gave."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import CodeType
from typing import Any

import numpy as np
import torch

from regress.check.expected_objective import GRADIENT, LOSS, Expected
from regress.check.loss_calls import Result
from regress.check.objective_batches import Batch
from regress.compare.diagnosis.counterfactuals import (
    Counterfactual,
    Formula,
    counterfactuals,
    same,
    with_change,
)
from regress.compare.diagnosis.hypotheses import Floats
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_presets import PRESETS

FLOAT32 = 1e-5
"""Largest difference, relative to the value, that is called rounding of float32."""
_EXACT, _COARSE = 1e-7, 3e-5
"""Largest relative differences of values that are the same formula's, in float64, and in float32."""
_CLOSEST = 12
"""Changes that are tried together with every other: those that leave the fewest places unexplained."""
Run = tuple[Batch, Result]


@dataclass(frozen=True)
class Departures:
    """Hold the function's values on a batch beside the objective's, in units of the latter.

    Attributes:
        close: largest difference of values that are the same.
    """

    formula: Formula
    quantity: str
    plain: Floats
    found: Floats
    close: float = _EXACT

    @property
    def off(self) -> Floats:
        """Differences; NaN where the function gave NaN."""
        return np.abs(self.found - self.plain)

    @property
    def in_float32(self) -> bool:
        """True if the function computed in float32."""
        return self.close == _COARSE

    @property
    def right(self) -> bool:
        """True if they agree but for rounding of float32."""
        return bool(self.off.max() <= FLOAT32)

    def explained(self, values: Floats | None) -> bool:
        """Return True if these values are the function's."""
        if values is None or values.shape != self.found.shape:
            return False
        off = np.abs(values - self.found) / np.maximum(1.0, np.abs(values))
        return same(self.found, values) or bool(off.max() <= self.close)

    def factor(self) -> float | None:
        """Return what the objective is multiplied by, None where that is not one number."""
        square = float(np.vdot(self.plain, self.plain))
        factor = float(np.vdot(self.plain, self.found)) / square if square else 0.0
        return factor if factor and self.explained(factor * self.plain) else None


@dataclass(frozen=True)
class Search:
    """The function's results, to be explained by the objective.

    Attributes:
        from_rewards: True if the function makes advantages of rewards.
        by_token: True if it returns token losses.
    """

    function: Callable[..., Any]
    objective: ObjectiveFields
    from_rewards: bool
    by_token: bool

    def expected(self, batch: Batch) -> Expected:
        """Return what the objective makes of a batch."""
        return Expected(batch, self.objective, self.from_rewards, self.by_token)

    def beside(self, run: Run, quantity: str) -> Departures:
        """Return the result of a batch beside the objective's."""
        batch, result = run
        expected = self.expected(batch)
        own, numbers = expected.formula, _numbers(self.function)
        choices = {
            name: (*others, *numbers) if isinstance(getattr(own.settings, name), float) else others
            for name, others in own.choices.items()
        }
        given = result.gradient if quantity == GRADIENT else result.value
        found = given.flatten() / expected.scale[quantity]
        plain = own.compute(own.inputs, own.settings)[quantity]
        single = torch.equal(given, given.float().double()) and not torch.equal(given, given.round())
        close = _COARSE if single else _EXACT
        return Departures(replace(own, choices=choices), quantity, plain.numpy(), found.numpy(), close)

    def cause(self, runs: Sequence[Run], quantity: str) -> str | None:
        """Return the simplest change of the objective that gives what the function gave on all batches, in words.

        A change that gives its value, too, comes before others that give its gradient.
        """
        all_of_them = [self.beside(run, quantity) for run in runs]
        losses = [self.beside(run, LOSS) for run in runs]
        screen = max(all_of_them, key=lambda one: float(one.off.max()))
        changes = [*counterfactuals(screen.formula, quantity, screen.plain)]
        found = [
            one
            for one in sorted(changes, key=_rank)
            if screen.explained(one.values)
            and all(_gives(each, each.formula, one.id) for each in all_of_them)
        ]
        for one in found:
            if all(_gives(each, each.formula, one.id) for each in losses):
                return f"the objective {one.words}"
        if found:
            return f"the objective {found[0].words}"
        factors = [one.factor() for one in all_of_them]
        if factors[0] is not None and all(
            one is not None and abs(one - factors[0]) < all_of_them[0].close * abs(factors[0])
            for one in factors
        ):
            return f"the objective times {factors[0]:.6g}"
        return _preset(all_of_them) or _pair(all_of_them, screen, changes)


def _rank(one: Counterfactual) -> tuple[Any, ...]:
    """Return the place of a change among those that give the same: the simplest first, a sign before an exchange."""
    return one.change, not one.id.startswith("op:") or "/reversed@" not in one.id, one.number


def _gives(beside: Departures, own: Formula, id: str) -> bool:
    """Return True if a change of a formula gives what the function gave, or changes nothing that is right."""
    base = own.values(beside.quantity)
    if base is None:
        return False
    changes = [*counterfactuals(own, beside.quantity, base.numpy(), {id})]
    return any(beside.explained(one.values) for one in changes) or (
        not changes and beside.explained(base.numpy())
    )


def _preset(all_of_them: Sequence[Departures]) -> str | None:
    """Return the preset that the function is, whatever constants it was given."""
    for name, values in PRESETS.items():
        settings = replace(ObjectiveFields(), **values)
        found = (replace(one.formula, settings=settings).values(one.quantity) for one in all_of_them)
        pairs = zip(all_of_them, found, strict=True)
        if all(values is not None and one.explained(values.numpy()) for one, values in pairs):
            return name
    return None


def _pair(
    all_of_them: Sequence[Departures], screen: Departures, changes: Sequence[Counterfactual]
) -> str | None:
    """Return two changes that together give it, the first of them one that comes close."""
    quantity = screen.quantity
    first = [one for one in changes if not one.id.startswith("op:")]
    for one in sorted(first, key=lambda one: _distance(one.values, screen.found))[:_CLOSEST]:
        changed = [with_change(each.formula, quantity, one.id) or each.formula for each in all_of_them]
        bases = [each.values(quantity) for each in changed]
        rest = next(
            (
                (beside, own, base)
                for beside, own, base in zip(all_of_them, changed, bases, strict=True)
                if base is not None and not beside.explained(base.numpy())
            ),
            None,
        )
        if rest is None:
            continue
        for other in counterfactuals(rest[1], quantity, rest[2].numpy()):
            pairs = zip(all_of_them, changed, strict=True)
            if rest[0].explained(other.values) and all(_gives(each, own, other.id) for each, own in pairs):
                return f"the objective {one.words} and {other.words}"
    return None


def _distance(values: Floats, target: Floats) -> float:
    """Return how far values are from the target, a place counting at most as much as the objective has there."""
    return float(np.minimum(np.abs(values - target), 1.0).mean())


def _numbers(function: Callable[..., Any]) -> tuple[float, ...]:
    """Return the numbers of a function's code and defaults, which may be constants of its objective."""
    plain = inspect.unwrap(function)
    plain = getattr(plain, "forward", plain) if isinstance(plain, torch.nn.Module) else plain
    plain = getattr(plain, "__func__", plain)
    code, spaces = getattr(plain, "__code__", None), getattr(plain, "__globals__", {})
    known = [*(getattr(plain, "__defaults__", None) or ())]
    known += (getattr(plain, "__kwdefaults__", None) or {}).values()
    for one in _codes(code) if code is not None else ():
        known += [*one.co_consts, *(spaces.get(name) for name in one.co_names)]
    found = dict.fromkeys(value for value in known if isinstance(value, float))
    near = dict.fromkeys(round(abs(1 - value), 12) for value in found if 0 < abs(1 - value) < 1)
    return (*islice({**found, **near}, 12),)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)
