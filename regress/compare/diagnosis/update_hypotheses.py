"""Hypotheses about gradients, optimizer states and parameters: another update than the one that was configured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.adamw_formula import (
    MOMENTS,
    STATE,
    AdamW,
    adamw_formula,
    direction,
    made_twice,
    proven_settings,
)
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, Truth, changed
from regress.compare.diagnosis.related_values import NOTHING, RelatedValues
from regress.compare.diagnosis.term_decomposition import Term, Terms
from regress.compare.dumps.adamw_settings import CLIP_EPS

if TYPE_CHECKING:
    from regress.compare.diagnosis.counterfactuals import Counterfactual, Formula

_PARTS = (2, 3, 4, 8)
"""Numbers of parts that ranks may hold of a tensor."""
_NOTHING = 1e-6
"""Size of a sum, relative to its parts, that is zero but for rounding."""
_BEGINS = 0.1
"""Part of an update by which its beginning may differ from the end of the last one, in other precision."""
_FEW = 1 << 14
"""Most elements of a tensor that all changes are made of: of more, as many are asked first."""
_LAST = "the gradient plus that of the last update"


@dataclass(frozen=True)
class UpdateHypotheses:
    """Hypotheses about the tensors of one optimizer update.

    Attributes:
        settings: section ``optimizer`` of the configuration, as far as it is known; where it is not, records of the
            optimizer's state tell them, or its golden values prove them.
        related: further facts about the update.
    """

    truth: Truth
    settings: Mapping[str, Any]
    related: RelatedValues = NOTHING
    _known: dict[str, AdamW | None] = field(default_factory=dict)

    def of(self, quantity: str, name: str, affected: NDArray[np.bool_] | None = None) -> Iterator[Hypothesis]:
        """Yield hypotheses about a tensor of ``gradient``, ``grad_norm``, ``optimizer`` or ``param``.

        Args:
            affected: its wrong elements, of which some are asked first where there are many; None for any.
        """
        if quantity == "gradient":
            yield from self._gradient(name)
        elif quantity in ("optimizer", "param"):
            yield from self._update(quantity, name, affected)

    def sums(self, quantity: str, name: str) -> Iterator[Terms]:
        """Yield decompositions of a tensor into what it is made of."""
        if quantity == "gradient":
            yield from self._shares(name)
        elif quantity == "optimizer":
            yield from self._shares_of_inputs(name)

    def _gradient(self, name: str) -> Iterator[Hypothesis]:
        """Yield gradients to which something is added that is none of this update."""
        golden, parameters = self._values("gradient", name), self._before(name)
        if golden is None:
            return
        earlier = self.related.before.get("gradient", {}).get(name)
        if earlier is not None and earlier.shape == golden.shape:
            last = earlier.astype(np.float64)
            factor = self._clip_factor(self.related.before)
            yield Hypothesis("formula", golden + factor * last, {"what": _LAST})
            if factor != 1.0:
                yield Hypothesis("formula", golden + last, {"what": f"{_LAST}, before it was clipped"})
            else:  # clipped by a norm that no configuration tells
                yield Hypothesis("fitted", golden, {"what": f"{_LAST}, times"}, last)
            yield Hypothesis("formula", last, {"what": "the gradient of the last update"})
        if parameters is not None:
            yield Hypothesis("fitted", golden, {"what": "the gradient plus its parameters times"}, parameters)
        factor = self._clip_factor()
        if factor != 1.0:
            yield Hypothesis("formula", golden * factor, {"what": "the gradient after it was clipped"})
        for number in _PARTS:
            if golden.ndim > 1 and golden.shape[0] % number == 0:
                added = golden.reshape(number, -1, *golden.shape[1:]).sum(axis=0)
                if float(np.abs(added).max()) <= _NOTHING * float(np.abs(golden).max()):
                    continue  # as those of a router, whose gradient adds up to zero over experts
                whole = np.concatenate([added] * number)
                yield Hypothesis("formula", whole, {"what": f"the {number} parts of the tensor added up"})

    def _shares(self, name: str) -> Iterator[Terms]:
        """Yield a gradient as the sum of its microbatches' own, and of its samples' own."""
        own = None if self.related.gradients is None else self.related.gradients(name)
        if own is None:
            return
        micros = self.related.microbatches
        there = [Term(name, own[one.samples].sum(axis=0)) for name, one in micros.items()]
        if len(there) > 1:
            places = {
                "of": {name: [one.ranks[0], one.number] for name, one in micros.items()},
                "holders": {name: [*one.ranks] for name, one in micros.items()},
            }
            yield Terms("microbatches", there, len(there), places)
        samples = [Term(f"sample {number}", values) for number, values in enumerate(own) if values.any()]
        if len(samples) > 1:
            yield Terms("samples", samples, most=len(samples))

    def _update(self, quantity: str, name: str, affected: NDArray[np.bool_] | None) -> Iterator[Hypothesis]:
        """Yield what a moment or parameter would be, had one thing of the update been another."""
        from regress.compare.diagnosis.counterfactuals import affine, counterfactuals

        parameter, _, kind = name.rpartition("/") if quantity == "optimizer" else (name, "", "param")
        golden, formula = self._values(quantity, name), self._formula(parameter)
        if golden is None or formula is None or kind not in STATE:
            return
        if math.isnan(formula.settings.learning_rate) and kind == "param":
            along = direction(self._state(self.truth, parameter), formula.settings)
            words = "that with the direction of the update added"
            yield Hypothesis("fitted", golden, {"what": words, "id": "fit:learning_rate"}, along)
            return
        if golden.size <= _FEW:
            yield from (changed(found, found.values) for found in counterfactuals(formula, kind, golden))
        else:
            yield from _screened(formula, kind, golden, affected)
        for key in ("learning_rate", "weight_decay", "beta1", "beta2"):
            line = affine(formula, kind, key)
            if line is not None:
                words = f"that with {key} in place of {getattr(formula.settings, key):g}:"
                yield Hypothesis("fitted", line[0], {"what": words, "id": f"fit:{key}"}, line[1])
        if kind == "exp_avg":  # linear in the gradient, which each rank may have clipped by another number
            share = _share(formula, kind, "gradient")
            yield Hypothesis("fitted", golden - share, {"what": "that with the gradient times"}, share)
        if kind == "param" and not self._begins_as_recorded(parameter, golden, formula):
            return
        again = made_twice(formula).values(kind)
        if again is not None:
            yield Hypothesis("formula", again.numpy(), {"what": "that of the update made twice"})
        before = formula.inputs[STATE[kind]].numpy()
        yield Hypothesis("formula", before, {"what": "that before this update"})

    def _shares_of_inputs(self, name: str) -> Iterator[Terms]:
        """Yield a moment as the sum of the last one and the gradient."""
        parameter, _, kind = name.rpartition("/")
        formula = self._formula(parameter) if kind in MOMENTS else None
        if formula is None:
            return
        terms = [
            Term("the state before this update", _share(formula, kind, MOMENTS[kind])),
            Term("the gradient", _share(formula, kind, "gradient")),
        ]
        if kind == "exp_avg" and "parameters" in formula.inputs:
            momentum = (1 - formula.settings.beta1) * formula.inputs["parameters"].numpy()
            terms.append(Term("the parameters", momentum, 0.0))
        yield Terms("terms", terms)

    def _formula(self, parameter: str) -> Formula | None:
        """Return the update of a parameter; None where some of its inputs are unknown."""
        after, gradient = self._state(self.truth, parameter), self._values("gradient", parameter)
        shapes = {values.shape for values in (*after.values(), *([] if gradient is None else [gradient]))}
        if len(shapes) != 1 or not {*MOMENTS} <= {*after} or not self._after_one_update(parameter):
            return None
        settings = self._settings(parameter)
        if settings is None:
            return None
        if math.isnan(settings.learning_rate):
            after.pop("param", None)
        return adamw_formula(settings, after, gradient, self._norm or 1.0)

    def _settings(self, parameter: str) -> AdamW | None:
        """Return the settings of the update of a parameter: as configured, as recorded, or as its values prove them."""
        if parameter in self._known:
            return self._known[parameter]
        count = self._values("optimizer", f"{parameter}/step")
        t = 1.0 if count is None or count.size != 1 else float(count.reshape(-1)[0])
        found = AdamW.of({**self.settings, **({"max_grad_norm": None} if self._norm is None else {})}, t)
        if found is None and not self.settings:
            found = self._proven(parameter, t)
        self._known[parameter] = found
        return found

    def _proven(self, parameter: str, count: float) -> AdamW | None:
        """Return settings that the update proves, or the next one, whose state before it is known."""
        told = self.related.optimizer(parameter)
        updates = (self.related.before, self.truth, count), (self.truth, self.related.after, count + 1)
        for before, after, number in updates:
            state, gradient = self._state(after, parameter), after.get("gradient", {}).get(parameter)
            if gradient is None or not {*MOMENTS} <= {*state}:
                continue
            norm = float(after.get("grad_norm", {}).get("grad_norm", 1.0))
            wide = gradient.astype(np.float64)
            found = proven_settings(state, self._state(before, parameter), wide, norm, number, *told)
            if found is not None:
                return replace(found, count=count)
        return None

    def _state(self, truth: Truth, parameter: str) -> dict[str, Floats]:
        """Return moments and values of a parameter, as far as they are known."""
        known = {kind: truth.get("optimizer", {}).get(f"{parameter}/{kind}") for kind in MOMENTS}
        known["param"] = truth.get("param", {}).get(parameter)
        return {kind: values.astype(np.float64) for kind, values in known.items() if values is not None}

    @property
    def _norm(self) -> float | None:
        norm = self.truth.get("grad_norm", {}).get("grad_norm")
        return None if norm is None else float(norm)

    def _after_one_update(self, parameter: str) -> bool:
        """Return False if the golden state is not the recorded one of the update before, updated once."""
        count = self._values("optimizer", f"{parameter}/step")
        earlier = self.related.before.get("optimizer", {}).get(f"{parameter}/step")
        if self.related.trusted or earlier is None or count is None:
            return True
        return bool((count == earlier.astype(np.float64) + 1).all())

    def _begins_as_recorded(self, name: str, golden: Floats, formula: Formula) -> bool:
        """Return False if the golden update does not begin with the parameters that the one before it left."""
        earlier, before = self.related.before.get("param", {}).get(name), formula.inputs["parameters"].numpy()
        if self.related.trusted or earlier is None or earlier.shape != before.shape:
            return True
        moved = float(np.abs(golden - before).max(initial=0.0))
        return float(np.abs(before - earlier).max(initial=0.0)) <= _BEGINS * moved

    def _before(self, name: str) -> Floats | None:
        """Return the parameters before the golden update; None where something that enters it is unknown."""
        formula = self._formula(name)
        parameters = None if formula is None else formula.inputs.get("parameters")
        return None if parameters is None else parameters.numpy()

    def _values(self, quantity: str, name: str) -> Floats | None:
        values = self.truth.get(quantity, {}).get(name)
        return None if values is None else values.astype(np.float64)

    def _clip_factor(self, truth: Truth | None = None) -> float:
        """Return the factor by which the golden gradient of this or another update was clipped."""
        norm = (self.truth if truth is None else truth).get("grad_norm", {}).get("grad_norm")
        bound = self.settings.get("max_grad_norm")
        if norm is None or not isinstance(bound, int | float):
            return 1.0
        return min(bound / (float(norm) + CLIP_EPS), 1.0)


def _share(formula: Formula, kind: str, key: str) -> Floats:
    """Return what an input adds to a moment, which is linear in it or in its square."""
    without = replace(formula, inputs={**formula.inputs, key: 0 * formula.inputs[key]})
    both, rest = formula.values(kind), without.values(kind)
    return np.zeros(()) if both is None or rest is None else (both - rest).numpy()


def _screened(
    formula: Formula, kind: str, golden: Floats, affected: NDArray[np.bool_] | None
) -> Iterator[Hypothesis]:
    """Yield what a few elements of a tensor would be, and all of it where that explains them."""
    from regress.compare.diagnosis.counterfactuals import counterfactuals

    rows = np.arange(golden.size) if affected is None else np.flatnonzero(affected)
    rows = rows[:: max(1, -(-rows.size // _FEW))]
    inputs = {name: one.reshape(-1)[rows] if one.dim() else one for name, one in formula.inputs.items()}
    for few in counterfactuals(replace(formula, inputs=inputs), kind, golden.reshape(-1)[rows]):

        def whole(few: Counterfactual = few) -> Hypothesis | None:
            every = counterfactuals(formula, kind, golden, {few.id})
            return next((changed(one, one.values) for one in every if one.number == few.number), None)

        yield replace(changed(few, few.values), partial=True, rows=rows, whole=whole)
