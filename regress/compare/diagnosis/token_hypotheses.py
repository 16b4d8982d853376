"""Hypotheses about token values: other quantities, other places, and counterfactuals of what gives them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, Truth, without_unchanged
from regress.compare.diagnosis.related_values import NOTHING, RelatedValues
from regress.compare.diagnosis.term_decomposition import Terms
from regress.compare.diagnosis.token_formulas import TokenFormulas
from regress.compare.quantities import TOKEN_GRADIENTS
from regress.dump.numpy_arrays import Array, is_float
from regress.layout import TokenFrame

if TYPE_CHECKING:
    from regress.compare.diagnosis.token_counterfactuals import TokenCounterfactuals

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
        from regress.compare.diagnosis.token_counterfactuals import TokenCounterfactuals

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
