"""Counterfactuals of the token quantities of an update: their formulas with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.counterfactual import Counterfactual, affine, counterfactuals, gives
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, changed
from regress.compare.diagnosis.softmax import TOKEN_GRADIENTS
from regress.compare.diagnosis.terms import Term, Terms
from regress.compare.diagnosis.token_formulas import FEW, OF_LOGITS, WHOLE, TokenFormulas

_COEFFICIENTS = {"kl_coef": "KL", "entropy_coef": "entropy"}


@dataclass(frozen=True)
class TokenCounterfactuals:
    """Counterfactuals of the token quantities of an update."""

    formulas: TokenFormulas
    _made: dict[str, list[Counterfactual]] = field(default_factory=dict)
    _kept: dict[str, set[str]] = field(default_factory=dict)

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
        for key, coefficient, each in self._terms(quantity):
            without = golden - coefficient * each
            words = f"that with {key} in place of {coefficient:g}:"
            placed = self.formulas.placed(without), self.formulas.placed(each)
            yield Hypothesis("fitted", placed[0], {"what": words, "id": f"fit:{key}"}, placed[1])
            if coefficient and not gives(
                formula, quantity, golden
            ):  # the golden values are not those of the objective, whatever else it is
                said = {"what": f"that with {key}=0 in place of {coefficient:g}", "id": f"{key}=0"}
                yield Hypothesis("formula", placed[0], said)

    def keep(self, quantity: str, ids: Collection[str]) -> None:
        """Leave out all changes of a quantity but these."""
        if self.formulas.formula(quantity) is not None:
            self._kept[quantity] = {*ids} & self._kept.get(quantity, {*ids})

    def _changes(self, quantity: str) -> list[Counterfactual]:
        """Return the changes that may still explain all tensors of a quantity."""
        golden, formula, kept = (
            self.formulas.golden(quantity),
            self.formulas.formula(quantity),
            self._kept.get(quantity),
        )
        if quantity not in self._made and golden is not None and formula is not None:
            self._made[quantity] = [*counterfactuals(formula, quantity, golden, kept)]
        return [found for found in self._made.get(quantity, ()) if kept is None or found.id in kept]

    def _screened(self, quantity: str, tokens: NDArray[np.int64] | None) -> Iterator[Hypothesis]:
        """Yield what a few samples of a tensor would be, and all of it where that explains them."""
        golden, formula = self.formulas.golden(quantity), self.formulas.formula(quantity)
        if golden is None or formula is None:
            return
        asked = np.flatnonzero(self.formulas.loss_mask) if tokens is None else tokens
        section: Mapping[str, Any] = (
            self.formulas.section if quantity in OF_LOGITS else asdict(formula.settings)
        )
        part, rows = self.formulas.part(asked, FEW // math.prod(golden.shape[1:]), section)
        for few in TokenCounterfactuals(part)._changes(quantity):

            def whole(few: Counterfactual = few) -> Hypothesis | None:
                for one in counterfactuals(formula, quantity, golden, {few.id}):
                    if one.words == few.words:
                        return changed(one, self.formulas.placed(one.values))
                return None

            yield replace(changed(few, part.placed(few.values)), partial=True, rows=rows, whole=whole)

    def plain(self, quantity: str) -> Floats | None:
        """Return what the objective makes of the golden inputs; None where that is unknown."""
        formula = self.formulas.formula(quantity)
        found = None if formula is None else formula.values(quantity)
        return None if found is None else self.formulas.placed(found.double().numpy())

    def sums(self, quantity: str) -> Iterator[Terms]:
        """Yield a quantity as the sum of what each coefficient of the objective adds to it, and of the rest."""
        golden = self.formulas.golden(quantity)
        if (
            golden is None
            or quantity not in ("token_loss", "token_gradient")
            or not self.formulas.formula(quantity)
        ):
            return
        rest, terms = golden, []
        for key, coefficient, each in self._terms(quantity):
            if coefficient or key == "entropy_coef":
                rest = rest - coefficient * each
                own = self.formulas.placed(coefficient * each if coefficient else each)
                terms.append(Term(f"the {_COEFFICIENTS[key]} term", own, 1.0 if coefficient else 0.0))
        yield Terms("terms", [Term("the policy loss", self.formulas.placed(rest)), *terms])

    def _terms(self, quantity: str) -> Iterator[tuple[str, float, Floats]]:
        """Yield each coefficient of the objective, its value, and what each unit of it adds to a quantity."""
        formula = self.formulas.formula(quantity)
        for key in (
            _COEFFICIENTS if formula is not None and quantity in ("token_loss", *TOKEN_GRADIENTS) else ()
        ):
            line = None if formula is None else affine(formula, quantity, key)
            if formula is not None and line is not None:
                yield key, float(getattr(formula.settings, key)), line[1]
