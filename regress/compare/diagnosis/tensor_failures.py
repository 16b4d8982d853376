"""Failure contexts of the tensors of an update: token attributes under their layouts, and hypotheses."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.diagnosis.hypotheses import Hypothesis, Truth
from regress.compare.diagnosis.related_values import NOTHING, RelatedValues
from regress.compare.diagnosis.term_decomposition import Terms
from regress.compare.diagnosis.token_attributes import TokenAttributes, token_classes, traits_of
from regress.compare.diagnosis.token_hypotheses import TokenHypotheses, clip_range, shifted
from regress.compare.diagnosis.update_hypotheses import UpdateHypotheses
from regress.compare.quantities import EVERYWHERE, QuantitySource, order_of
from regress.grpo.objective_presets import PRESETS
from regress.layout import TokenFrame, TokenLayout

_OF_LOGITS = ("log_probs", "entropy")
_OF_POSITIONS = re.compile("wpe|pos_emb|position")


@dataclass(frozen=True)
class FailureContexts:
    """Factory of `FailureContext` from the golden values of one update.

    Attributes:
        loss_mask: ``[frame.size]``, or None if nothing tells it.
        config: configuration of the run, nested, as far as it is known.
        pool: the different golden values of a token quantity in the whole update, sorted.
        related: further facts about the update.
        of_update: golden values of all samples of the update, where the frame has a part of them.
    """

    truth: Truth
    frame: TokenFrame
    loss_mask: NDArray[np.bool_] | None
    config: Mapping[str, Any]
    pool: Callable[[QuantitySource], NDArray[np.float64] | None] = lambda _: None
    related: RelatedValues = NOTHING
    of_update: Truth = field(default_factory=dict)
    _traits: dict[TokenLayout, TokenAttributes] = field(default_factory=dict)
    _least: list[int] = field(default_factory=list)

    def tokens(self, source: QuantitySource, layout: TokenLayout, leading: tuple[int, ...]) -> FailureContext:
        """Return the context of a tensor ``[*leading, ...]`` with a place for each of the layout's."""
        known = self.truth.get(source.quantity, {}).get(source.name)
        if known is None:
            return FailureContext(lambda: self.traits(layout), leading)
        canonical, local = layout.indices(self.frame.offsets)

        def placed(values: NDArray[Any], fill: float) -> NDArray[Any]:
            out = np.full((math.prod(leading), *values.shape[1:]), fill, values.dtype)
            out[local] = values[canonical]
            return out

        def spread(guess: Hypothesis) -> Hypothesis:
            values = placed(guess.values, math.nan)
            return replace(guess, values=values.reshape(*leading, *guess.values.shape[1:]))

        def guesses(affected: NDArray[np.bool_] | None) -> Iterator[Hypothesis]:
            first = self._is_first(source.quantity)
            place, asked = self._places(canonical, local), canonical
            if affected is not None:
                wrong = np.asarray(affected.reshape(math.prod(leading), -1).any(axis=1))
                asked = canonical[wrong[local]]
            for guess in self._guesses.of(source.quantity, source.name, asked) if first else ():
                yield spread(guess) if guess.rows is None else guess.at(place, spread)
            if source.name == "position_ids":
                columns = np.broadcast_to(np.arange(layout.shape[1], dtype=np.float64), layout.shape)
                own = self.traits(layout).position.reshape(layout.shape)
                yield Hypothesis("columns", np.where(columns == own, np.nan, columns))
            elif source.quantity == "activations" and _OF_POSITIONS.search(source.name):
                yield from self._of_columns(source, layout, leading)

        def sums() -> Iterator[Terms]:
            for found in self._guesses.sums(source.quantity):
                terms = [
                    replace(term, values=placed(term.values, math.nan).reshape(leading))
                    for term in found.terms
                ]
                yield replace(found, terms=terms)

        def logits() -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
            found = self._guesses.logits
            if found is None or source.quantity not in _OF_LOGITS:
                return None
            return placed(found[0], math.nan), placed(found[1], 0)

        return FailureContext(
            lambda: self.traits(layout),
            leading,
            guesses,
            sums if known.ndim == 1 else tuple,
            logits,
            source.quantity == "entropy",
            (lambda: self.pool(source)) if known.ndim == 1 else None,
            usual=self._usual(source, placed, leading),
            grouped=source.quantity == "advantages",
            explained=partial(self._guesses.explained, source.quantity),
        )

    def _of_columns(
        self, source: QuantitySource, layout: TokenLayout, leading: tuple[int, ...]
    ) -> Iterator[Hypothesis]:
        """Yield the embeddings of the columns of a row, as far as golden tokens of the update have these positions."""
        known = self.of_update or self.truth
        positions = known.get("batch_inputs", {}).get("position_ids")
        outputs = known.get(source.quantity, {}).get(source.name)
        if positions is None or outputs is None or positions.shape != outputs.shape[:1]:
            return
        if math.prod(leading) != math.prod(layout.shape):
            return
        table = np.full((max(layout.shape[1], int(positions.max(initial=0)) + 1), *outputs.shape[1:]), np.nan)
        table[positions] = outputs
        columns = np.tile(table[: layout.shape[1]], (layout.shape[0], *[1] * (outputs.ndim - 1)))
        yield Hypothesis("columns", columns.reshape(*leading, *outputs.shape[1:]), partial=True)

    def _usual(
        self,
        source: QuantitySource,
        placed: Callable[[NDArray[Any], float], NDArray[Any]],
        leading: tuple[int, ...],
    ) -> NDArray[np.bool_] | None:
        """Return the loss tokens, for quantities that are 0 at all others; None for any other quantity."""
        if source.quantity not in EVERYWHERE or self.loss_mask is None:
            return None
        return placed(self.loss_mask, False).reshape(leading)

    def rows(
        self, source: QuantitySource, layout: TokenLayout, tokens: NDArray[np.int64], shape: tuple[int, ...]
    ) -> FailureContext:
        """Return the context of rows ``[..., K, V]`` of loss tokens; ``tokens`` are their flat canonical indices."""

        def traits() -> TokenAttributes:
            known = self.traits(layout)
            place = np.full(self.frame.size, -1, np.int64)
            there = np.flatnonzero(known.token >= 0)
            place[known.token[there]] = there
            return known.at(place[tokens])

        def spread(guess: Hypothesis) -> Hypothesis:
            return replace(guess, values=guess.values[tokens].reshape(shape))

        def guesses(affected: NDArray[np.bool_] | None) -> Iterator[Hypothesis]:
            values = self.truth.get(source.quantity, {}).get(source.name)
            if values is None or self.loss_mask is None:
                return
            whole = np.full((self.frame.size, *values.shape[1:]), np.nan)
            whole[self.loss_mask] = values
            for by in (1, -1):
                yield Hypothesis("shifted", shifted(whole, self.frame, by)[tokens].reshape(shape), {"by": by})
            first, flat = self._is_first(source.quantity), tokens.reshape(-1)
            place = self._places(flat, np.arange(flat.size))
            asked = flat if affected is None else flat[affected.reshape(flat.size, -1).any(axis=1)]
            for guess in self._guesses.gradients(source.quantity, asked) if first else ():
                yield spread(guess) if guess.rows is None else guess.at(place, spread)

        def sums() -> Iterator[Terms]:
            for found in self._guesses.sums(source.quantity):
                own = [replace(t, values=t.values[tokens].reshape(shape)) for t in found.terms]
                yield replace(found, terms=own)

        explained = partial(self._guesses.explained, source.quantity)
        return FailureContext(traits, shape[:-1], guesses, sums, explained=explained)

    def whole(self, quantity: str, name: str) -> FailureContext:
        """Return the context of a full tensor of the update."""
        known = UpdateHypotheses(self.truth, self.config.get("optimizer") or {}, self.related)
        return FailureContext(
            guesses=lambda affected: known.of(quantity, name, affected) if self._is_first(quantity) else (),
            sums=lambda: known.sums(quantity, name),
        )

    def _places(self, tokens: NDArray[np.int64], local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the place of each token of the frame in a tensor, -1 for those that are not there."""
        place = np.full(self.frame.size, -1, np.int64)
        place[tokens] = local
        return place

    def _is_first(self, quantity: str) -> bool:
        """Return True unless a quantity before this one fails: a diagnosis is about the first."""
        order = order_of(quantity)
        if self._least and order > self._least[0]:
            return False
        self._least[:] = [order]
        return True

    def traits(self, layout: TokenLayout) -> TokenAttributes:
        """Return the attributes of the tokens of a layout."""
        if layout not in self._traits:
            self._traits[layout] = traits_of(layout, self.frame, self._classes)
        return self._traits[layout]

    @cached_property
    def _classes(self) -> dict[str, NDArray[np.bool_]]:
        found = self._guesses.formulas
        clip = clip_range(self._section or ({} if found is None else found.searched))
        return token_classes(self.truth, self.frame, self.loss_mask, clip, self.related.sampled())

    @cached_property
    def _guesses(self) -> TokenHypotheses:
        limit = (self.config.get("data") or {}).get("max_completion_length")
        length = limit if isinstance(limit, int) else 0
        return TokenHypotheses(self.truth, self.frame, self.loss_mask, self._section, self.related, length)

    @property
    def _section(self) -> Mapping[str, Any]:
        """Section ``algorithm`` of the configuration, with the fields of its preset."""
        section = self.config.get("algorithm") or {}
        return {**PRESETS.get(str(section.get("preset")), {}), **section}
