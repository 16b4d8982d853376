"""Mini-batch in canonical form, and its projection onto token layouts.

Every quantity of the loss is a flat tensor over the ``K`` loss tokens of the mini-batch, sample after sample.
A microbatch is a selection of them, together with the ``[B, T]`` tensors that the model reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.attention import VarlenSegments
from regress.layout import (
    BatchPlan,
    RankLayout,
    RankPlan,
    SampleKey,
    TokenLayout,
    offsets_of,
    plan_ranks,
)


@dataclass(frozen=True)
class LossTokens:
    """Quantities of the loss, one value per loss token, ``[K]`` each; ``None`` where the objective needs none.

    ``sequence`` is the index of the token's sample, non-decreasing, in ``[0, num_sequences)``. ``entropy_weights`` are
    those of the entropy bonus where they are not ``weights``; ``correction`` are sampler weights computed over the
    rollout, ``kept`` and ``penalized`` the `regress.grpo.token_selection.TokenSelection` of the mini-batch, ``counted``
    is True for tokens that metrics are of, where others have values, too.
    """

    sequence: Tensor
    num_sequences: int
    weights: Tensor | None = None
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sampler_log_probs: Tensor | None = None
    entropy_weights: Tensor | None = None
    correction: Tensor | None = None
    kept: Tensor | None = None
    penalized: Tensor | None = None
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    def select(self, index: Tensor, sequence: Tensor, num_sequences: int) -> LossTokens:
        """Return the tokens at ``index``, renumbered by ``sequence``."""
        chosen = {
            f.name: value[index]
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor) and f.name != "sequence"
        }
        return replace(self, sequence=sequence, num_sequences=num_sequences, **chosen)


@dataclass(frozen=True)
class Microbatch:
    """Inputs of one forward pass on one rank: local ``[B, T]`` tensors, and the loss tokens that it predicts.

    Attributes:
        place: layouts of the inputs and of the loss values.
        input_ids, position_ids: ``[B, T]``.
        response_mask: ``[B, T]`` 1 at loss tokens that count, where the inputs lie.
        target_ids: ``[B, T]`` token ids where the values of the loss lie; 0 where there is no token.
        targets: ``[K]`` token ids that the model has to predict.
        varlen: the segments, for attention kernels that see no padding.
        local: ``[K]`` flat local index at which the values of each loss token are recorded.
        predictors: ``[K]`` flat local index of the hidden state that predicts it.
        effective: ``[K]`` 1 for loss tokens that count; on others the loss does not depend, which only show their
            log-probs.
        select: ``[K]`` index among the mini-batch's loss tokens.
        sequence: ``[K]`` index of the token's sample in ``sample_ids``, non-decreasing.
        sample_ids: key ``(group_id, run_id)`` of each sample whose loss tokens may lie in this microbatch.
        keys: key of every sample of the mini-batch.
    """

    place: RankLayout
    input_ids: Tensor
    position_ids: Tensor
    response_mask: Tensor
    target_ids: Tensor
    targets: Tensor
    varlen: VarlenSegments
    local: Tensor
    predictors: Tensor
    effective: Tensor
    select: Tensor
    sequence: Tensor
    sample_ids: tuple[SampleKey, ...]
    keys: tuple[SampleKey, ...]

    @property
    def layout(self) -> TokenLayout:
        """Layout of the inputs."""
        return self.place.tokens

    def samples_of(self, layout: TokenLayout) -> tuple[SampleKey, ...]:
        """Return the key of the sample of each segment."""
        return tuple(self.keys[segment.sample] for segment in layout.segments)

    def scatter(self, values: Tensor) -> Tensor:
        """Return ``[K]`` values of the loss tokens as a ``[B, T]`` tensor, each at its place, 0 elsewhere.

        Where a position has several targets only one of their values is shown.
        """
        out = values.new_zeros(self.place.targets.shape)
        out.view(-1)[self.local] = values
        return out


class TokenBatch:
    """Samples laid end to end.

    Args:
        trajectories: the samples, in canonical order.
        loss_masks: the positions that enter the loss, one list per sample; by default the trajectories' own.
        targets: the token ids that the model has to predict, in place of the samples' own, one list per sample.
        effective: the positions of the loss that count, one list per sample; by default all of them.
        choices: for each sample, the token ids that the model is scored against at each position, one or more where
            the loss mask is set: each is a loss token of its own. By default the one of ``targets``.
        device: device of the tensors.

    Attributes:
        lengths: tokens of each sample.
        keys: ``(group_id, run_id)`` of each sample.
        loss_masks: the masks in use: those given, or the trajectories' own.
        offsets: ``[N + 1]`` start of each sample in flat token tensors.
        mask: ``[sum(lengths)]`` True at loss tokens.
        tokens, targets: ``[sum(lengths)]`` token ids, and those that the model has to predict at their places.
        effective: ``[sum(lengths)]`` True at loss tokens that count.
        sequence: ``[K]`` sample index of each loss token.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        *,
        loss_masks: Sequence[Sequence[int]] | None = None,
        targets: Sequence[Sequence[int]] | None = None,
        effective: Sequence[Sequence[int]] | None = None,
        choices: Sequence[Sequence[Sequence[int]]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.trajectories = trajectories
        self.device = device or torch.device("cpu")
        self.lengths = [len(trajectory.tokens) for trajectory in trajectories]
        self.keys: tuple[SampleKey, ...] = tuple(trajectory.key for trajectory in trajectories)
        self.offsets = offsets_of(self.lengths)
        self.loss_masks = loss_masks or [trajectory.loss_mask for trajectory in trajectories]
        self.mask = _flat(self.loss_masks, np.bool_)
        self.tokens = _flat([trajectory.tokens for trajectory in trajectories], np.int64)
        self.targets = self.tokens if targets is None else _flat(targets, np.int64)
        self.effective = self.mask if effective is None else self.mask & _flat(effective, np.bool_)
        self._counts = self.mask.astype(np.int64)  # loss tokens at each position
        self._scored = self.targets[self.mask]
        if choices is not None:
            numbers = _flat([[len(here) for here in row] for row in choices], np.int64)
            self._counts *= numbers
            self._scored = _flat([here for row in choices for here in row], np.int64)[
                np.repeat(self.mask, numbers)
            ]
        sample = np.repeat(np.arange(len(trajectories)), self.lengths)
        self.sequence = self._tensor(np.repeat(sample, self._counts))

    def loss_tokens(self) -> LossTokens:
        """Return the ``K`` loss tokens of the batch, without quantities yet."""
        return LossTokens(self.sequence, len(self.trajectories))

    def sampler_log_probs(self, dtype: torch.dtype) -> Tensor | None:
        """Return the ``[K]`` log-probs recorded by the sampler, or ``None`` if any trajectory lacks them."""
        recorded = [trajectory.log_probs for trajectory in self.trajectories]
        if any(values is None for values in recorded):
            return None
        flat = np.concatenate([np.asarray(values) for values in recorded])
        return torch.from_numpy(flat[self.mask]).to(self.device, dtype)

    def microbatches(self, plan: BatchPlan, ranks: RankPlan | None = None, rank: int = 0) -> list[Microbatch]:
        """Return the microbatches of a rank under a plan: every token lies in exactly one, on one of the ranks."""
        starts = np.cumsum(self._counts) - self._counts
        places = plan_ranks(self.lengths, plan, ranks or RankPlan())[rank]
        return [self._project(place, starts) for place in places]

    def partition(self, plan: BatchPlan, ranks: RankPlan | None = None) -> list[list[int]]:
        """Return the samples of each microbatch that has some, of all ranks that hold different samples."""
        ranks = ranks or RankPlan()
        shares = {
            ranks.mesh.data_index(rank): places
            for rank, places in enumerate(plan_ranks(self.lengths, plan, ranks))
        }
        found = [
            [segment.sample for segment in place.whole.segments]
            for places in shares.values()
            for place in places
        ]
        return [samples for samples in found if samples]

    def _project(self, place: RankLayout, starts: NDArray[np.int64]) -> Microbatch:
        canonical, local = place.targets.indices(self.offsets)
        counts = self._counts[canonical]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        select = np.repeat(starts[canonical], counts) + within
        present = [
            segment.sample for segment in place.whole.segments
        ]  # the same numbers on all ranks that share them
        number = {sample: index for index, sample in enumerate(present)}
        sequence = [np.full(s.stop - s.start, number[s.sample]) for s in place.targets.segments]
        samples = np.repeat(np.concatenate([np.zeros(0, np.int64), *sequence]), counts)
        canonical, local = np.repeat(canonical, counts), np.repeat(local, counts)
        shifted = place.targets is not place.tokens  # values lie where their token is predicted
        return Microbatch(
            place=place,
            input_ids=self._tensor(place.tokens.scatter(self.tokens, self.offsets)),
            position_ids=self._tensor(place.tokens.position_ids),
            response_mask=self._tensor(place.tokens.scatter(self.effective.astype(np.int64), self.offsets)),
            target_ids=self._tensor(place.targets.scatter(self.targets, self.offsets)),
            targets=self._tensor(self._scored[select]),
            varlen=VarlenSegments.of(place.tokens, self._tensor(place.tokens.indices(self.offsets)[1])),
            local=self._tensor(local),
            predictors=self._tensor(local if shifted else local - 1),
            effective=self._tensor(self.effective[canonical].astype(np.int64)),
            select=self._tensor(select),
            sequence=self._tensor(samples),
            sample_ids=tuple(self.keys[sample] for sample in present),
            keys=self.keys,
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _flat(rows: Sequence[Sequence[int]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
