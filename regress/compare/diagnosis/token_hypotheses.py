"""Hypotheses about token values: other quantities, other places, and counterfactuals of what gives them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.counterfactuals import MOVED, Counterfactual, affine, counterfactuals, same
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, Truth, changed, without_unchanged
from regress.compare.diagnosis.related_values import NOTHING, RelatedValues
from regress.compare.diagnosis.softmax_formula import gradient_parts
from regress.compare.diagnosis.term_decomposition import Term, Terms
from regress.compare.diagnosis.token_formulas import FEW, OF_LOGITS, WHOLE, TokenFormulas
from regress.compare.quantities import TOKEN_GRADIENTS
from regress.dump.numpy_arrays import Array, is_float
from regress.layout import TokenFrame

_SUMS = ("token_loss", "token_gradient")
_COEFFICIENTS = {"kl_coef": "KL", "entropy_coef": "entropy"}


@dataclass(frozen=True)
class TokenCounterfactuals:
    """Counterfactuals of the token quantities of an update."""

    formulas: TokenFormulas
    _made: dict[str, list[Counterfactual]] = field(default_factory=dict)
    _kept: dict[str, set[str]] = field(default_factory=dict)
    _bases: dict[str, Floats | None] = field(default_factory=dict)
    _lines: dict[str, list[tuple[str, float, Floats]]] = field(default_factory=dict)

    def of(self, quantity: str, tokens: NDArray[np.int64] | None = None) -> Iterator[Hypothesis]:
        """Yield what a quantity would be, ``[frame.size]`` or ``[frame.size, V]``.

        Args:
            tokens: those of the tensor that is asked for; None for all.
        """
        golden = self.formulas.golden(quantity)
        formula = None if golden is None else self.formulas.formula(quantity)
        if golden is None or formula is None:
            return
        if quantity in self._kept or golden.size <= FEW or quantity in WHOLE:
            for found in self._changes(quantity):
                yield changed(found, self.formulas.placed(found.values))
        else:
            yield from self._screened(quantity, tokens)
        base = self._base(quantity)
        matches = base is not None and same(base, golden)
        for key, coefficient, each in self._terms(quantity):
            without = golden - coefficient * each
            words = f"that with {key} in place of {coefficient:g}:"
            placed = self.formulas.placed(without), self.formulas.placed(each)
            yield Hypothesis("fitted", placed[0], {"what": words, "id": f"fit:{key}"}, placed[1])
            if coefficient and not matches:  # the golden values are made otherwise, but for this term
                said = {"what": f"that with {key}=0 in place of {coefficient:g}", "id": f"{key}=0"}
                yield Hypothesis("formula", placed[0], said)

    def keep(self, quantity: str, ids: Collection[str]) -> None:
        """Leave out all changes of a quantity but these."""
        self._kept[quantity] = {*ids} & self._kept.get(quantity, {*ids})

    def _changes(self, quantity: str) -> list[Counterfactual]:
        """Return the changes that may still explain all tensors of a quantity."""
        golden, formula = self.formulas.golden(quantity), self.formulas.formula(quantity)
        kept = self._kept.get(quantity)
        if quantity not in self._made and golden is not None and formula is not None:
            self._made[quantity] = [*counterfactuals(formula, quantity, golden, kept)]
        return [found for found in self._made.get(quantity, ()) if kept is None or found.id in kept]

    def _screened(self, quantity: str, tokens: NDArray[np.int64] | None) -> Iterator[Hypothesis]:
        """Yield what a few samples of a tensor would be, and all of it where that explains them."""
        golden, formula = self.formulas.golden(quantity), self.formulas.formula(quantity)
        if golden is None or formula is None:
            return
        asked = np.flatnonzero(self.formulas.loss_mask) if tokens is None else tokens
        section = self.formulas.section if quantity in OF_LOGITS else asdict(formula.settings)
        part, rows = self.formulas.part(asked, FEW // math.prod(golden.shape[1:]), section)
        for few in TokenCounterfactuals(part)._changes(quantity):

            def whole(few: Counterfactual = few) -> Hypothesis | None:
                for one in counterfactuals(formula, quantity, golden, {few.id}):
                    if one.number == few.number:
                        return changed(one, self.formulas.placed(one.values))
                return None

            if few.id.rpartition("=")[2] not in MOVED:
                yield replace(changed(few, part.placed(few.values)), partial=True, rows=rows, whole=whole)
            elif (every := whole()) is not None:
                yield every

    def plain(self, quantity: str) -> Floats | None:
        """Return what the objective makes of the golden inputs; None where that is unknown."""
        base = self._base(quantity)
        return None if base is None else self.formulas.placed(base)

    def _base(self, quantity: str) -> Floats | None:
        if quantity not in self._bases:
            formula = self.formulas.formula(quantity)
            found = None if formula is None else formula.values(quantity)
            self._bases[quantity] = None if found is None else found.double().numpy()
        return self._bases[quantity]

    def sums(self, quantity: str) -> Iterator[Terms]:
        """Yield a quantity as the sum of what each coefficient of the objective, or part of log-softmax, adds to it."""
        golden, formula = self.formulas.golden(quantity), self.formulas.formula(quantity)
        if formula is not None and quantity == "logit_gradient":
            parts = gradient_parts(formula).items()
            yield Terms(
                "terms", [Term(name, self.formulas.placed(one.numpy())) for name, one in parts if one.any()]
            )
        if golden is None or quantity not in _SUMS or formula is None:
            return
        rest, terms = golden, []
        for key, coefficient, each in self._terms(quantity):
            if coefficient or key == "entropy_coef":
                rest = rest - coefficient * each
                own = self.formulas.placed(coefficient * each if coefficient else each)
                terms.append(Term(f"the {_COEFFICIENTS[key]} term", own, 1.0 if coefficient else 0.0))
        yield Terms("terms", [Term("the policy loss", self.formulas.placed(rest)), *terms])

    def _terms(self, quantity: str) -> list[tuple[str, float, Floats]]:
        """Return each coefficient of the objective, its value, and what each unit of it adds to a quantity."""
        formula = self.formulas.formula(quantity)
        if formula is None or quantity not in ("entropy_gradient", *_SUMS):
            return []
        if quantity not in self._lines:
            found = ((key, affine(formula, quantity, key)) for key in _COEFFICIENTS)
            self._lines[quantity] = [
                (key, float(getattr(formula.settings, key)), line[1])
                for key, line in found
                if line is not None
            ]
        return self._lines[quantity]


_TOKENS = (
    *(
        "advantages",
        "log_probs",
        "entropy",
        "old_log_probs",
        "ref_log_probs",
        "sampler_weights",
        "kl",
        "ratio",
    ),
    *("policy_loss", "token_loss", "weights"),
)


def shifted(values: Array, frame: TokenFrame, by: int) -> Floats:
    """Return the value of the token ``by`` positions on, ``[frame.size, ...]``; NaN where its sample has none."""
    moved = np.full(values.shape, np.nan)
    for start, stop in zip(frame.offsets[:-1], frame.offsets[1:], strict=True):
        if stop - start > abs(by):
            if by > 0:
                moved[start : stop - by] = values[start + by : stop]
            else:
                moved[start - by : stop] = values[start : stop + by]
    return moved


@dataclass(frozen=True)
class TokenHypotheses:
    """Hypotheses about one token quantity of an update, in canonical form.

    Attributes:
        loss_mask: ``[frame.size]``.
        objective: section ``algorithm`` of the configuration, as far as it is known.
        related: further facts about the update.
        length: longest completion that is allowed; 0 where it is unknown.
    """

    truth: Truth
    frame: TokenFrame
    loss_mask: NDArray[np.bool_] | None
    objective: Mapping[str, Any]
    related: RelatedValues = NOTHING
    length: int = 0

    def of(self, quantity: str, name: str, tokens: NDArray[np.int64]) -> Iterator[Hypothesis]:
        """Yield hypotheses about a tensor of these tokens, each where it changes what the objective makes of them."""
        plain = self._plain(quantity, name)
        for guess in self._changes(quantity, name, tokens):
            yield without_unchanged(guess, plain)

    def _plain(self, quantity: str, name: str) -> Floats | None:
        """Return what the objective makes of the golden inputs, ``[frame.size]``; None where that is unknown."""
        if name == "position_ids":
            lengths = [np.arange(length) for length in self.frame.lengths]
            return np.concatenate(lengths).astype(np.float64) if lengths else None
        if quantity == "old_log_probs" and self.related.first():
            return next(iter(self.truth.get("log_probs", {}).values()), None)
        return None if self.counterfactuals is None else self.counterfactuals.plain(quantity)

    def _changes(self, quantity: str, name: str, tokens: NDArray[np.int64]) -> Iterator[Hypothesis]:
        values = self.truth[quantity][name]
        inside = self.loss_mask if quantity in _TOKENS else None
        known = np.where(inside, values, np.nan) if inside is not None else values
        for by in (1, -1):
            yield Hypothesis("shifted", shifted(known, self.frame, by), {"by": by})
        yield from self._others(quantity, values)
        if self.counterfactuals is not None:
            yield from self.counterfactuals.of(quantity, tokens)

    def explained(self, quantity: str, ids: Collection[str]) -> None:
        """Leave out, from now on, all changes of a quantity's formula but those that explain one of its tensors."""
        if self.counterfactuals is not None:
            self.counterfactuals.keep(quantity, ids)

    def gradients(self, quantity: str, tokens: NDArray[np.int64]) -> Iterator[Hypothesis]:
        """Yield hypotheses about the gradient of the loss by a token quantity; none for other quantities."""
        if quantity in TOKEN_GRADIENTS and self.counterfactuals is not None:
            plain = self.counterfactuals.plain(quantity)
            yield from (
                without_unchanged(guess, plain) for guess in self.counterfactuals.of(quantity, tokens)
            )

    def sums(self, quantity: str) -> Iterator[Terms]:
        """Yield decompositions of a token quantity into terms of the loss."""
        if self.counterfactuals is not None:
            yield from self.counterfactuals.sums(quantity)

    def _others(self, quantity: str, own: Array) -> Iterator[Hypothesis]:
        """Yield the constants 0 and 1, and every other token quantity of the update."""
        if quantity not in _TOKENS:
            return
        for value in (0.0, 1.0):
            yield Hypothesis("formula", np.full(own.shape, value), {"what": f"{value:g} everywhere"})
        if quantity == "old_log_probs" and self.related.sampler is not None:
            yield Hypothesis("equals", self.related.sampler, {"what": "those that the sampler reported"})
        for other, tensors in self.truth.items():
            for values in tensors.values() if other != quantity and other in _TOKENS else ():
                if values.shape == own.shape and is_float(values.dtype):
                    yield Hypothesis("equals", values.astype(np.float64), {"what": other})

    @cached_property
    def counterfactuals(self) -> TokenCounterfactuals | None:
        """Counterfactuals of the update's quantities; None without a loss mask."""
        from regress.compare.diagnosis.token_hypotheses import TokenCounterfactuals

        return None if self.formulas is None else TokenCounterfactuals(self.formulas)

    @cached_property
    def formulas(self) -> TokenFormulas | None:
        """Formulas of the update's quantities; None without a loss mask."""
        if self.loss_mask is None or not self.loss_mask.any():
            return None
        return TokenFormulas(
            self.truth, self.frame, self.loss_mask, self.objective, self.related, self.logits, self.length
        )

    @cached_property
    def logits(self) -> tuple[Floats, NDArray[np.int64]] | None:
        """``[frame.size, V]`` golden logits that predict each token (NaN where there are none), and the tokens."""
        outputs = self.truth.get("activations", {})
        found = next((outputs[name] for name in outputs if name.endswith("lm_head")), None)
        ids = self.truth.get("batch_inputs", {}).get("input_ids")
        if found is None or ids is None or self.loss_mask is None or found.ndim != 2:
            return None
        if found.shape[0] != int(self.loss_mask.sum()) or int(ids.max(initial=0)) >= found.shape[1]:
            return None
        rows = np.full((self.frame.size, found.shape[1]), np.nan)
        rows[self.loss_mask] = found
        return rows, ids.astype(np.int64)


def clip_range(objective: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the lowest and highest ratio of a section ``algorithm``; None unless it tells both."""
    low, high = objective.get("clip_low"), objective.get("clip_high")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    if objective.get("clip_bounds", "offset") == "absolute":
        return float(low), float(high)
    return 1.0 - float(low), 1.0 + float(high)
