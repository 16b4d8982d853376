"""Local tensors expected from canonical values, given a rank's layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.locate import Locator, TokenText
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.diagnosis.failure_contexts import FailureContexts
from regress.compare.metrics.stripes import largest
from regress.compare.quantities import (
    AT_TOKENS,
    EVERYWHERE,
    MICRO_STAGES,
    SHARES,
    Kind,
    Source,
    quantity_named,
    sources_in,
)
from regress.compare.verdicts.case import Locate, element
from regress.dump.arrays import Array
from regress.errors import CompareError
from regress.layout import SampleKey, ShardLayout, TokenFrame, TokenLayout

Truth = Mapping[str, Mapping[str, Array]]
"""``quantity -> tensor name -> canonical values`` of one update."""


_POOL = 1 << 20
"""Tokens whose values are looked for among those of others."""


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


@dataclass(frozen=True)
class Expected:
    """The expected values of a local tensor.

    Attributes:
        values: the golden values in the local layout, 0 in padding; None where there should be none.
        mask: ``[B, T]`` (or ``[B * T]``) where they are compared; None for everywhere.
        scale: scale of tolerances: the largest absolute golden value over all microbatches; for a share that of its
            terms, times the sum of their weights; None for the largest of ``values``.
        locate: canonical coordinates of an element, in words.
        surroundings: failure context of the elements.
    """

    values: Array | None
    mask: NDArray[np.bool_] | None = None
    scale: float | None = None
    locate: Locate | None = None
    surroundings: FailureContext | None = None

    def part(self, shards: ShardLayout, name: str) -> Expected:
        """Return the expected values of a part of this tensor; the scale stays that of the whole.

        Raises:
            ValueError: if the part is one of a tensor of another shape.
        """
        if self.values is None or shards.is_whole:
            return self
        mask = self.mask
        if mask is not None:
            mask = ShardLayout(mask.shape, shards.ranges[: mask.ndim]).project(mask)
        scale = largest(self.values) if self.scale is None else self.scale
        along = shards.along()
        whole = self.locate or (lambda index: element(index, shards.shape, name))

        def words(index: int) -> str:
            local = np.unravel_index(index, shards.local_shape)
            place = tuple(int(known[i]) for known, i in zip(along, local, strict=True))
            return whole(int(np.ravel_multi_index(place, shards.shape)))

        around = None if self.surroundings is None else self.surroundings.part(shards)
        return Expected(shards.project(self.values), mask, scale, words, around)


class Projection:
    """The golden values of one update, to be seen through token layouts.

    Args:
        truth: canonical values, see `regress.compare.alignment.canonical.canonicalize`.
        frame: the samples of the update.
        text: text of a token id, for the words of `Expected.locate`.
        config: configuration of the run, nested; hypotheses depend on its sections ``algorithm`` and ``optimizer``.
    """

    def __init__(
        self,
        truth: Truth,
        frame: TokenFrame,
        text: TokenText | None = None,
        config: Mapping[str, Any] | None = None,
        whole: Projection | None = None,
    ) -> None:
        self.truth = truth
        self.frame = frame
        self._text = text
        self._scales: dict[tuple[str, str], float] = {}
        self._pools: dict[tuple[str, str], NDArray[np.float64] | None] = {}
        self._config = config or {}
        self._whole = whole or self

    @cached_property
    def locator(self) -> Locator:
        """Words for the tokens of the update."""
        return Locator(self.frame, self.truth.get("batch_inputs", {}).get("input_ids"), self._text)

    @cached_property
    def index(self) -> Mapping[SampleKey, int]:
        """Number of each sample in the frame."""
        return {key: number for number, key in enumerate(self.frame.samples)}

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
        return Projection(truth, frame, self._text, self._config, self)

    @cached_property
    def _loss_rows(self) -> NDArray[np.int64]:
        """``[frame.size]`` row of each loss token among all of them."""
        return np.asarray(np.cumsum(self.loss_mask) - 1, np.int64)

    @cached_property
    def loss_mask(self) -> NDArray[np.bool_]:
        """``[frame.size]`` True at loss tokens."""
        mask = self._golden("batch_inputs", "response_mask", "without it nothing tells the loss tokens")
        return np.asarray(mask, bool)

    @property
    def known_loss_mask(self) -> NDArray[np.bool_] | None:
        """The loss mask, or None if there are no golden values of it."""
        return self.loss_mask if "response_mask" in self.truth.get("batch_inputs", {}) else None

    def stage(self, stage: str) -> list[Source]:
        """Return the tensors that a record of this stage has to hold."""
        return [
            source
            for name, tensors in self.truth.items()
            for source in sources_in(stage, name, list(tensors))
        ]

    def local(
        self,
        source: Source,
        layout: TokenLayout,
        shape: tuple[int, ...] | None = None,
        rows: TokenLayout | None = None,
    ) -> Expected:
        """Return the expected tensor of a microbatch.

        Args:
            layout: in the frame's own sample numbers.
            shape: shape of the recorded tensor, or of the whole tensor of a shard. Rows of tokens may come as
                ``[B, T, ...]`` or ``[B * T, ...]``, rows of loss tokens as ``[1, K, V]`` or ``[K, V]``; everything
                else has one shape.
            rows: the layout that rows of loss tokens follow, by default the same.

        Raises:
            CompareError: if the golden values needed are missing or do not fit the frame.
        """
        kind = quantity_named(source.quantity).kind
        if kind is Kind.SHARE:
            return self._share(source.name, layout)
        values = self.truth[source.quantity][source.name]
        scale = self._scale(source)
        if kind is Kind.HIDDEN:
            return self._hidden(source, values, scale, layout, shape, rows or layout)
        self._check_rows(source, values, (self.frame.size,))
        local = layout.scatter(values, self.frame.offsets)
        mask = self._mask(source, kind, layout)
        around = self.around.tokens(source, layout, layout.shape)
        return Expected(local, mask, scale, self.locator.grid(layout, layout.shape), around)

    def _mask(self, source: Source, kind: Kind, layout: TokenLayout) -> NDArray[np.bool_] | None:
        if kind is Kind.EXACT:
            return None if source.name.endswith("_mask") else layout.attention_mask
        if source.quantity in EVERYWHERE:
            return layout.attention_mask
        mask: NDArray[np.bool_] = layout.scatter(self.loss_mask, self.frame.offsets)
        return mask

    def _hidden(
        self,
        source: Source,
        values: Array,
        scale: float,
        layout: TokenLayout,
        shape: tuple[int, ...] | None,
        row_layout: TokenLayout,
    ) -> Expected:
        loss_tokens = int(self.loss_mask.sum())
        self._check_rows(source, values, (self.frame.size, loss_tokens))
        inner = values.shape[1:]
        if values.shape[0] == self.frame.size:
            canonical, local = layout.indices(self.frame.offsets)
            B, T = layout.shape
            flat = np.zeros((B * T, *inner), values.dtype)
            flat[local] = values[canonical]
            as_rows = shape is not None and shape == flat.shape and shape[:2] != (B, T)
            kept, mask = (
                (flat, layout.attention_mask.reshape(-1))
                if as_rows
                else (
                    flat.reshape(B, T, *inner),
                    layout.attention_mask,
                )
            )
            around = self.around.tokens(source, layout, (B * T,) if as_rows else (B, T))
            return Expected(kept, mask, scale, self.locator.grid(layout, kept.shape), around)
        canonical, _ = row_layout.indices(self.frame.offsets)
        tokens = canonical[self.loss_mask[canonical]]
        rows = values[(np.cumsum(self.loss_mask) - 1)[tokens]]
        locate = self.locator.rows(tokens, math.prod(inner))
        local_rows = rows if shape == rows.shape else rows[None]
        around = self.around.rows(source, row_layout, tokens, local_rows.shape)
        return Expected(local_rows, None, scale, locate, around)

    def whole(self, quantity: str, name: str) -> Expected:
        """Return the expected full tensor of an update."""
        around = self.around.whole(quantity, name)
        return Expected(self.truth[quantity][name], surroundings=around)

    @cached_property
    def around(self) -> FailureContexts:
        """Failure contexts of the tensors of the update."""
        return FailureContexts(self.truth, self.frame, self.known_loss_mask, self._config, self._whole.pool)

    def pool(self, source: Source) -> NDArray[np.float64] | None:
        """Return the distinct golden values of a token quantity in the update, sorted; None for too many, or none."""
        key = source.quantity, source.name
        if key not in self._pools:
            values = self.truth.get(source.quantity, {}).get(source.name)
            mask = self.known_loss_mask
            usable = values is not None and values.ndim == 1 and values.size <= _POOL
            chosen = values if mask is None or values is None else values[mask]
            self._pools[key] = np.unique(chosen.astype(np.float64)) if usable and chosen is not None else None
        return self._pools[key]

    def _share(self, name: str, layout: TokenLayout) -> Expected:
        """Return a microbatch's share: the sum over its loss tokens of weight times term."""
        canonical, _ = layout.indices(self.frame.offsets)
        tokens = canonical[self.loss_mask[canonical]]
        words = f"{name} of {len(tokens)} loss tokens of {len({s.sample for s in layout.segments})} samples"
        weights, terms = self._summands(name)
        total = math.fsum((weights[tokens] * terms[tokens]).tolist())
        return Expected(np.array(total), None, self._share_scale(weights[tokens], terms), lambda _: words)

    def share_scale(self, name: str) -> float:
        """Return the scale of the total of a loss over the update, see `_share_scale`."""
        weights, terms = self._summands(name)
        return self._share_scale(weights[self.loss_mask], terms)

    def _share_scale(self, weights: NDArray[np.float64], terms: NDArray[np.float64]) -> float:
        """Return the sum of the weights, each times the largest term of the update.

        Not the sum of the absolute terms at hand, ``sum |weight * term|``: a divergence near 0 is a difference of
        larger numbers, so it has no relative accuracy either. Measured on shares of the golden case `dense`, in
        spacings of float32 (bfloat16) over each of the two scales: healthy variants differ by at most 1.7 (1.2) of this
        one, and by 88 (88) of the sum of absolute terms; weights moved by one ulp change them by 3.9 (2.9), and by 540
        (127).
        Where no term is such a difference, as in ``pg_loss``, the two scales differ by a factor of 2 to 5.
        """
        return math.fsum(np.abs(weights).tolist()) * largest(terms[self.loss_mask])

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
        self._check_rows(Source("", quantity, quantity, name or quantity), found, (self.frame.size,))
        return found

    def _check_rows(self, source: Source, values: Array, allowed: tuple[int, ...]) -> None:
        if not values.ndim or values.shape[0] not in allowed:
            raise CompareError(
                f"the golden {source.label} has the shape {list(values.shape)}, but the samples of this update have "
                f"{self.frame.size} tokens; golden values and rollouts are not of one recording"
            )

    def _scale(self, source: Source) -> float:
        key = (source.quantity, source.name)
        if key not in self._scales:
            self._scales[key] = largest(self.truth[source.quantity][source.name])
        return self._scales[key]


def expected_micro(
    truth: Truth, frame: TokenFrame, layout: TokenLayout, text: TokenText | None = None
) -> dict[str, dict[str, Expected]]:
    """Return the expected tensors of one microbatch, as ``stage -> tensor -> expected``."""
    projection = Projection(truth, frame, text)
    return {
        stage: {source.tensor: projection.local(source, layout) for source in sources}
        for stage in MICRO_STAGES
        if (sources := projection.stage(stage))
    }
