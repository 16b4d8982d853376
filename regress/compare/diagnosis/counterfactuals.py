"""Counterfactuals of a formula: what a quantity would be, had one thing been other than it is.

One setting has another value, two settings are exchanged, one input is another one, or one operation of the formula is
another one. Each is made by running the formula: nothing here knows whether it is the objective, log-softmax or AdamW.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regress.compare.diagnosis.operation_replacement import OPERATIONS, Operation
from regress.errors import RegressError

Floats = NDArray[np.float64]
Values = Mapping[str, Tensor]
Compute = Callable[[Values, Any], Mapping[str, Tensor]]
SAME = 1e-9
"""Relative difference up to which a counterfactual is the value itself, or a formula gives the golden one."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOVED = ("next", "previous", "token_before", "token_after")
"""Forms of an input that take the value of another token, and so depend on those around it."""
_UNCHANGED: AbstractContextManager[Any] = nullcontext()


class Change(IntEnum):
    """Kinds of changes, the simplest first: where several explain the same values, the simplest is reported."""

    OFF = 0
    SETTING = 1
    EXCHANGE = 2
    INPUT = 3
    MISTAKE = 4
    OPERATION = 5


@dataclass(frozen=True)
class Formula:
    """Quantities as a function of inputs and settings.

    Attributes:
        settings: a dataclass.
        choices: field of the settings -> other values that it may have had; only those that are read are tried.
        exchanges: fields whose values may have been taken for each other's.
        swaps: input -> inputs that may have been taken for it.
        mistakes: id -> what people are known to compute in its place, where that is more than one change.
    """

    compute: Compute
    inputs: Values
    settings: Any
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    exchanges: Iterable[tuple[str, str]] = ()
    swaps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mistakes: Mapping[str, Compute] = field(default_factory=dict)

    def values(self, quantity: str, mode: AbstractContextManager[Any] = _UNCHANGED) -> Tensor | None:
        """Return what the formula gives; None where an input is missing or the settings are not valid ones."""
        try:
            with mode, torch.enable_grad():
                found = self.compute(self.inputs, self.settings).get(quantity)
        except (
            RegressError,
            ArithmeticError,
            LookupError,
            ValueError,
            RuntimeError,
            AssertionError,
            TypeError,
        ):
            return None  # a changed formula need not make sense
        return None if found is None else found.detach()

    def reads(self, quantity: str) -> set[str]:
        """Return the names of the settings that are read, not only copied, as a quantity is computed."""
        seen: set[str] = set()

        def noted(settings: Any, name: str) -> Any:
            if sys._getframe(1).f_globals.get("__name__") != "dataclasses":
                seen.add(name)
            return object.__getattribute__(settings, name)

        traced = copy.copy(self.settings)
        own = type("Traced", (type(self.settings),), {"__getattribute__": noted})
        object.__setattr__(traced, "__class__", own)
        replace(self, settings=traced).values(quantity)
        return seen

    def changed(self, **settings: Any) -> Formula:
        """Return the formula with other settings."""
        return replace(self, settings=replace(self.settings, **settings))


@dataclass(frozen=True)
class Counterfactual:
    """The values of a formula with one thing changed.

    Attributes:
        number: of the change among all of the formula.
        id: what was changed, such as ``kl_estimator=k1``, ``input:weights=1``, ``op:minimum/maximum@ppo_clip``.
        words: the same, for people.
    """

    number: int
    id: str
    change: Change
    words: str
    values: Floats


def counterfactuals(
    formula: Formula, quantity: str, golden: Floats, only: Collection[str] | None = None
) -> Iterator[Counterfactual]:
    """Yield what a quantity would be; nothing where the formula does not give the golden values.

    Args:
        golden: in the shape of what the formula gives.
        only: ids of the changes that are asked for; None for all.
    """
    base = formula.values(quantity)
    if base is None or not same(base.double().numpy(), golden):
        return
    for number, (id, change, words, other, mode) in enumerate(_changes(formula, quantity)):
        if only is not None and id not in only:
            continue
        values = other.values(quantity, mode)
        if values is None or values.shape != base.shape or not bool(torch.isfinite(values).all()):
            continue
        if _differs(values, base):
            yield Counterfactual(number, id, change, words, values.double().numpy())


def with_change(formula: Formula, quantity: str, id: str) -> Formula | None:
    """Return the formula with a change of a setting, an input or the whole; None for an operation or no such change."""
    found = (
        other for name, _, _, other, mode in _changes(formula, quantity) if name == id and mode is _UNCHANGED
    )
    return next(found, None)


def _differs(values: Tensor, base: Tensor) -> bool:
    return not same(values.double().numpy(), base.double().numpy())


def gives(formula: Formula, quantity: str, golden: Floats) -> bool:
    """Return True if a formula gives these values."""
    found = formula.values(quantity)
    return found is not None and same(found.double().numpy(), golden)


def depends_on(formula: Formula, quantity: str, key: str, others: Iterable[Any]) -> bool:
    """Return True if any of these other values of a setting gives other values of a quantity."""
    if (base := formula.values(quantity)) is None:
        return False
    found = (formula.changed(**{key: other}).values(quantity) for other in others)
    return any(values is not None and _differs(values, base) for values in found)


def branches(formula: Formula, quantity: str) -> Iterator[tuple[str, bool]]:
    """Yield each minimum and maximum that a quantity is made with, taken otherwise, and True if it is another one."""
    base = formula.values(quantity)
    for id, _, words, other, mode in _changes(formula, quantity):
        if id.startswith(("op:minimum/", "op:maximum/")) and "/detached@" not in id:
            values = other.values(quantity, mode)
            yield words, base is not None and values is not None and _differs(values, base)


def affine(formula: Formula, quantity: str, key: str) -> tuple[Floats, Floats] | None:
    """Return a quantity where a setting is 0, and what each unit of it adds.

    None where the quantity is not a linear function of the setting, or does not depend on it.
    """
    values = [formula.changed(**{key: value}).values(quantity) for value in (0.0, 1.0, 2.0)]
    none, one, two = (None if each is None else each.double().numpy() for each in values)
    if none is None or one is None or two is None or same(one, none) or not same(one - none, two - one):
        return None
    return none, one - none


def same(values: Floats, other: Floats) -> bool:
    """Return True for values that agree but for rounding in float64."""
    if values.shape != other.shape:
        return False
    size = float(np.abs(other).max(initial=0.0))
    return float(np.abs(values - other).max(initial=0.0)) <= SAME * max(size, 1e-300)


_Changed = tuple[str, Change, str, Formula, AbstractContextManager[Any]]


def _changes(formula: Formula, quantity: str) -> Iterator[_Changed]:
    read = formula.reads(quantity)
    yield from _of_settings(formula, read)
    yield from _exchanges(formula, read)
    yield from _of_inputs(formula)
    for id, compute in formula.mistakes.items():
        words = f"with {id.replace('_', ' ')}"
        yield f"mistake:{id}", Change.MISTAKE, words, replace(formula, compute=compute), _UNCHANGED
    recorder = Operation()
    formula.values(quantity, recorder)
    for number, (name, source, function) in enumerate(recorder.calls):
        for other, words, call in OPERATIONS[name]:
            id, description = f"op:{name}/{other}@{function}", words.format(f"{source} of {function}")
            yield id, Change.OPERATION, description, formula, Operation(number, call)


def _of_settings(formula: Formula, read: Collection[str]) -> Iterator[_Changed]:
    for key, others in formula.choices.items():
        if key not in read:
            continue
        known = getattr(formula.settings, key)
        for value in dict.fromkeys(others):
            if value != known:
                change = Change.SETTING if value or value is False else Change.OFF
                words = f"with {key}={_shown(value)} in place of {_shown(known)}"
                other = formula.changed(**{key: value})
                yield f"{key}={_shown(value)}", change, words, other, _UNCHANGED


def _exchanges(formula: Formula, read: Collection[str]) -> Iterator[_Changed]:
    for one, two in formula.exchanges:
        first, second = getattr(formula.settings, one), getattr(formula.settings, two)
        if first != second and {one, two} & {*read}:
            other = formula.changed(**{one: second, two: first})
            words = f"with {one} and {two} exchanged"
            yield f"exchange:{one},{two}", Change.EXCHANGE, words, other, _UNCHANGED


def _of_inputs(formula: Formula) -> Iterator[_Changed]:
    inputs = formula.inputs
    for name, others in formula.swaps.items():
        if name not in inputs:
            continue
        known, said = inputs[name], name.replace("_", " ")
        forms = {
            other: (f"with {other.replace('_', ' ')} in place of {said}", inputs[other])
            for other in others
            if other in inputs and inputs[other].shape == known.shape
        }
        for form, (words, values) in {**forms, **_forms(known)}.items():
            other = replace(formula, inputs={**inputs, name: values})
            yield f"input:{name}={form}", Change.INPUT, words.format(said), other, _UNCHANGED


def _forms(known: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Return an input rounded, left out, reversed, or of another token, by name, with words for it."""
    if not known.is_floating_point():
        return {}
    found = {
        name: (f"that of {{}} rounded to {name}", known.to(dtype).to(known.dtype))
        for name, dtype in _DTYPES.items()
    }
    found["1"] = "with {} of 1", torch.ones_like(known)
    found["0"] = "with {} of 0", torch.zeros_like(known)
    found["reversed"] = "with {} reversed", -known
    if known.dim() == 1 and len(known) > 1:
        found["next"] = "with {} one place on", known.roll(-1)
        found["previous"] = "with {} one place back", known.roll(1)
    return found


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
