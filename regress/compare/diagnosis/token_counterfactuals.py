"""Counterfactuals of the token quantities of an update: their formulas with one thing changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.counterfactuals import MOVED, Counterfactual, affine, counterfactuals, same
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, changed
from regress.compare.diagnosis.softmax_formula import gradient_parts
from regress.compare.diagnosis.term_decomposition import Term, Terms
from regress.compare.diagnosis.token_formulas import FEW, OF_LOGITS, WHOLE, TokenFormulas

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
