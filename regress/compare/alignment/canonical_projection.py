"""Local tensors beside the canonical values of an update, given their layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.element_names import Locator, TokenText
from regress.compare.alignment.local_shard import whole_layout
from regress.compare.alignment.metric_scale import metric_scale, size_of
from regress.compare.alignment.token_overlap import Part
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.diagnosis.hypotheses import Truth
from regress.compare.diagnosis.related_values import NOTHING, RelatedValues
from regress.compare.diagnosis.tensor_failures import FailureContexts
from regress.compare.quantities import (
    AT_TOKENS,
    METRICS,
    SHARES,
    Kind,
    QuantitySource,
    quantity_named,
    sources_in,
)
from regress.compare.verdicts.tensor_case import Locate
from regress.dump.numpy_arrays import Array
from regress.errors import CompareError
from regress.layout import ShardLayout, TokenFrame, TokenLayout

_MASK = "without it nothing tells the loss tokens"
_POOL = 1 << 20
"""Most tokens of a quantity whose values are searched for among those of other tokens."""


class Chosen(Mapping[str, Array]):
    """Tensors that are sliced lazily, when they are asked for."""

    def __init__(self, tensors: Mapping[str, Array], part: Callable[[Array], Array]) -> None:
        self._tensors, self._part = tensors, part

    def __getitem__(self, name: str) -> Array:
        """Raise `KeyError` for one that is unknown."""
        return self._part(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Projection:
    """The golden values of one update, to be seen through token layouts.

    Args:
        truth: canonical values, see `regress.compare.alignment.canonical_tensors.canonicalize`.
        frame: the samples of the update.
        text: text of a token id, for words.
        config: configuration of the run, nested; hypotheses depend on its sections ``algorithm`` and ``optimizer``.
        related: further facts about the update, for hypotheses.
    """

    def __init__(
        self,
        truth: Truth,
        frame: TokenFrame,
        text: TokenText | None = None,
        config: Mapping[str, Any] | None = None,
        whole: Projection | None = None,
        related: RelatedValues = NOTHING,
    ) -> None:
        self.truth = truth
        self.frame = frame
        self._text = text
        self._scales: dict[tuple[str, str], float] = {}
        self._record_types: dict[str, list[QuantitySource]] = {}
        self._parts: dict[tuple[str, str], Part] = {}
        self._pools: dict[tuple[str, str], NDArray[np.float64] | None] = {}
        self._config = config or {}
        self._whole = whole or self
        self._beside = related

    @cached_property
    def locator(self) -> Locator:
        """Words for the tokens of the update."""
        return Locator(self.frame, self.truth.get("batch_inputs", {}).get("input_ids"), self._text)

    def of_samples(self, samples: Sequence[int]) -> Projection:
        """Return a projection of some samples only, which makes locating their elements cheaper."""
        if len(samples) == len(self.frame.samples):
            return self
        frame, offsets = self.frame.select(samples), self.frame.offsets
        runs = [np.arange(offsets[i], offsets[i + 1]) for i in samples]
        tokens = np.concatenate([np.zeros(0, np.int64), *runs])
        size, loss = self.frame.size, self.known_loss_mask

        def chosen(values: Array) -> Array:
            found: Array = values
            if values.shape[:1] == (size,):
                found = values[tokens]
            elif loss is not None:
                found = values[self._loss_rows[tokens[loss[tokens]]]]
            return found

        truth = {
            name: Chosen(tensors, chosen) if quantity_named(name).kind in AT_TOKENS else tensors
            for name, tensors in self.truth.items()
        }
        related = self._known_related.of_tokens(tokens)
        return Projection(truth, frame, self._text, self._config, self, related)

    @cached_property
    def _known_related(self) -> RelatedValues:
        """Further facts, with the number of loss tokens of each sample."""
        loss = self.known_loss_mask
        if self._beside.counts or loss is None:
            return self._beside
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(loss)])
        counts = np.diff(before[self.frame.offsets])
        return replace(self._beside, counts=dict(zip(self.frame.samples, counts.tolist(), strict=True)))

    @cached_property
    def _loss_rows(self) -> NDArray[np.int64]:
        """``[frame.size]`` row of each loss token among all of them."""
        return np.asarray(np.cumsum(self.loss_mask) - 1, np.int64)

    @cached_property
    def loss_mask(self) -> NDArray[np.bool_]:
        """``[frame.size]`` True at loss tokens."""
        mask = self._golden("batch_inputs", "response_mask", _MASK)
        return np.asarray(mask, bool)

    @property
    def known_loss_mask(self) -> NDArray[np.bool_] | None:
        """The loss mask, or None if there are no golden values of it."""
        return self.loss_mask if "response_mask" in self.truth.get("batch_inputs", {}) else None

    def record_type(self, record_type: str) -> list[QuantitySource]:
        """Return the tensors that a record of this type has to hold."""
        if record_type not in self._record_types:
            rows = ((name, [*tensors]) for name, tensors in self.truth.items())
            self._record_types[record_type] = [
                source for row in rows for source in sources_in(record_type, *row)
            ]
        return self._record_types[record_type]

    def context(
        self,
        source: QuantitySource,
        part: ShardLayout,
        layout: TokenLayout,
        rows: TokenLayout,
        *,
        rows_only: bool = False,
    ) -> FailureContext:
        """Return the failure context of a tensor of tokens, by its shape.

        Args:
            layout: in the frame's own sample numbers; ``rows`` the layout that rows of loss tokens follow.
            rows_only: True if the tensor is known to have rows of loss tokens only.
        """
        (B, T), shape = layout.shape, part.shape
        lead = next((lead for lead in ((B, T), (B * T,)) if shape[: len(lead)] == lead), None)
        if lead is not None and not rows_only:
            found = self.around.tokens(source, layout, lead)
        else:
            loss, (canonical, _) = self.known_loss_mask, rows.indices(self.frame.offsets)
            tokens = canonical if loss is None else canonical[loss[canonical]]
            if tokens.size != math.prod(shape[:-1]):
                return FailureContext()
            found = self.around.rows(source, rows, tokens, shape)
        return found if part.is_whole else found.part(part)

    def context_of_whole(self, source: QuantitySource, part: ShardLayout) -> FailureContext:
        """Return the failure context of a full tensor, or a shard of it."""
        found = self.around.whole(source.quantity, source.name)
        return found if part.is_whole else found.part(part)

    def part(self, source: QuantitySource) -> Part:
        """Return golden values as rows: one for each token, or one for each loss token.

        Raises:
            CompareError: if they are not those of the frame, or nothing tells its loss tokens.
        """
        key = source.quantity, source.name
        if key not in self._parts:
            values, kind = self.truth[source.quantity][source.name], quantity_named(source.quantity).kind
            by_loss = kind is Kind.HIDDEN and values.shape[:1] != (self.frame.size,)
            rows = np.flatnonzero(self.loss_mask) if by_loss else np.arange(self.frame.size)
            self._check_rows(source, values, rows.size)
            if kind is Kind.TOKEN and self.known_loss_mask is None:
                self._golden("batch_inputs", "response_mask", _MASK)
            self._parts[key] = Part(values, rows, whole_layout(values.shape[1:]), values.shape)
        return self._parts[key]

    @cached_property
    def around(self) -> FailureContexts:
        """Failure contexts of the tensors of the update."""
        return FailureContexts(
            self.truth,
            self.frame,
            self.known_loss_mask,
            self._config,
            self._whole.pool,
            self._known_related,
            self._whole.truth,
        )

    def pool(self, source: QuantitySource) -> NDArray[np.float64] | None:
        """Return the distinct golden values of a token quantity in the update, sorted; None for too many, or none."""
        key = source.quantity, source.name
        if key not in self._pools:
            values = self.truth.get(source.quantity, {}).get(source.name)
            mask = self.known_loss_mask
            usable = values is not None and values.ndim == 1 and values.size <= _POOL
            chosen = values if mask is None or values is None else values[mask]
            self._pools[key] = np.unique(chosen.astype(np.float64)) if usable and chosen is not None else None
        return self._pools[key]

    def share(self, name: str, canonical: NDArray[np.int64]) -> tuple[Array, float, Locate]:
        """Return a microbatch's share: the sum over its loss tokens of weight times term, its scale, and words for it.

        Args:
            canonical: the tokens of the microbatch.
        """
        tokens = canonical[self.loss_mask[canonical]]
        samples = np.unique(np.searchsorted(self.frame.offsets, canonical, side="right")).size
        words = f"{name} of {len(tokens)} loss tokens of {samples} samples"
        weights, terms = self._summands(name)
        total = math.fsum((weights[tokens] * terms[tokens]).tolist())
        return np.array(total), self._share_scale(name, weights[tokens], terms), lambda _: words

    def _size_of_share(self, name: str) -> float:
        """Return `share_scale`; 1 where nothing tells it, as advantages and ratios are of the order of 1."""
        known = {"weights", SHARES[name]} <= self.truth.keys() and self.known_loss_mask is not None
        return self.share_scale(name) if known else 1.0

    def share_scale(self, name: str) -> float:
        """Return the scale of the total of a loss over the update, see `_share_scale`."""
        weights, terms = self._summands(name)
        return self._share_scale(name, weights[self.loss_mask], terms)

    def _share_scale(self, name: str, weights: NDArray[np.float64], terms: NDArray[np.float64]) -> float:
        """Return the sum of the weights, each times the largest term of the update.

        Not the sum of the absolute terms at hand, ``sum |weight * term|``: a divergence near 0 is a difference of
        larger numbers, so it has no relative accuracy either. Measured on shares of the golden case `dense`, in
        spacings of float32 (bfloat16) over each of the two scales: healthy variants differ by at most 1.7 (1.2) of this
        one, and by 88 (88) of the sum of absolute terms; weights moved by one ulp change them by 3.9 (2.9), and by 540
        (127).
        Where no term is such a difference, as in ``pg_loss``, the two scales differ by a factor of 2 to 5.
        """
        largest_term = size_of(SHARES[name], terms[self.loss_mask], self.truth)
        return math.fsum(np.abs(weights).tolist()) * largest_term

    def _summands(self, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the weight and the term of each token, both ``[frame.size]``."""
        if name not in SHARES:
            raise CompareError(f"the loss has no part {name!r}; its parts are {', '.join(SHARES)}")
        why = f"{name} is the sum of its terms"
        weights = self._golden("weights", None, why).astype(np.float64)
        return weights, self._golden(SHARES[name], None, why).astype(np.float64)

    def _golden(self, quantity: str, name: str | None, why: str) -> Array:
        tensors = self.truth.get(quantity, {})
        found = next(iter(tensors.values()), None) if name is None else tensors.get(name)
        if found is None:
            label = quantity if name is None else f"{quantity}/{name}"
            raise CompareError(f"the golden values lack {label}, but {why}; record them with it")
        self._check_rows(QuantitySource("", quantity, quantity, name or quantity), found, self.frame.size)
        return found

    def _check_rows(self, source: QuantitySource, values: Array, count: int) -> None:
        if values.shape[:1] != (count,):
            raise CompareError(f"""the golden {source.label} has the shape {list(values.shape)}, but the samples of this
            update have {self.frame.size} tokens; golden values and rollouts are not of one recording""")

    def scale(self, source: QuantitySource) -> float:
        """Return the scale of tolerances: the largest absolute golden value over all ranks and microbatches; see
        `metric_scale` for metrics."""
        key = (source.quantity, source.name)
        if key not in self._scales:
            values = self.truth[source.quantity][source.name]
            if source.quantity in METRICS:
                self._scales[key] = metric_scale(source.name, values, self.truth, self._size_of_share)
            else:
                self._scales[key] = size_of(source.quantity, values, self.truth)
        return self._scales[key]
