"""A mini-batch in canonical form, and its projection onto token layouts.

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
from regress.layout import BatchPlan, TokenLayout, offsets_of, plan_microbatches


@dataclass(frozen=True)
class LossTokens:
    """Quantities of the loss, one value per loss token, ``[K]`` each; ``None`` where the objective needs none.

    ``sequence`` is the index of the token's sample, non-decreasing, in ``[0, num_sequences)``.
    """

    sequence: Tensor
    num_sequences: int
    weights: Tensor | None = None
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    sampler_log_probs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sequence)

    def select(self, index: Tensor, sequence: Tensor, num_sequences: int) -> LossTokens:
        """The tokens at ``index``, renumbered by ``sequence``."""
        chosen = {
            f.name: value[index]
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor) and f.name != "sequence"
        }
        return replace(self, sequence=sequence, num_sequences=num_sequences, **chosen)


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass reads: local ``[B, T]`` tensors and the loss tokens among them.

    ``local`` is the flat local index of each loss token, ``select`` its index among the mini-batch's ``K``
    tokens, ``sample_ids`` the key ``(group_id, run_id)`` of each sample that lies here.
    """

    layout: TokenLayout
    input_ids: Tensor
    position_ids: Tensor
    varlen: VarlenSegments
    local: Tensor
    select: Tensor
    sequence: Tensor
    sample_ids: tuple[tuple[str, int], ...]

    @property
    def targets(self) -> Tensor:
        """``[K]`` token ids that the model has to predict."""
        return self.input_ids.reshape(-1)[self.local]

    def scatter(self, values: Tensor) -> Tensor:
        """``[K]`` values of the loss tokens as a ``[B, T]`` tensor, each at its own token, 0 elsewhere."""
        out = values.new_zeros(self.input_ids.shape)
        out.view(-1)[self.local] = values
        return out


class TokenBatch:
    """Samples laid end to end.

    Args:
        trajectories: the samples, in canonical order.
        loss_masks: the positions that enter the loss, one list per sample; by default the trajectories' own.
        device: where the tensors live.

    Attributes:
        lengths: tokens of each sample.
        loss_masks: as given.
        offsets: ``[N + 1]`` start of each sample in flat token tensors.
        mask: ``[sum(lengths)]`` True at loss tokens.
        sequence: ``[K]`` sample index of each loss token.
    """

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        *,
        loss_masks: Sequence[Sequence[int]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.trajectories = trajectories
        self.device = device or torch.device("cpu")
        self.lengths = [len(trajectory.tokens) for trajectory in trajectories]
        self.offsets = offsets_of(self.lengths)
        self.loss_masks = loss_masks or [trajectory.loss_mask for trajectory in trajectories]
        self.mask = np.concatenate([np.asarray(mask, dtype=bool) for mask in self.loss_masks])
        sample = np.repeat(np.arange(len(trajectories)), self.lengths)
        self.sequence = self._tensor(sample[self.mask])

    def loss_tokens(self) -> LossTokens:
        """The ``K`` loss tokens of the batch, without quantities yet."""
        return LossTokens(self.sequence, len(self.trajectories))

    def sampler_log_probs(self, dtype: torch.dtype) -> Tensor | None:
        """``[K]`` log-probs recorded by the sampler, or ``None`` if any trajectory lacks them."""
        recorded = [trajectory.log_probs for trajectory in self.trajectories]
        if any(values is None for values in recorded):
            return None
        flat = np.concatenate([np.asarray(values) for values in recorded])
        return torch.from_numpy(flat[self.mask]).to(self.device, dtype)

    def microbatches(self, plan: BatchPlan) -> list[Microbatch]:
        """The batch under a plan: every token lies in exactly one microbatch."""
        tokens = np.concatenate([np.asarray(t.tokens, dtype=np.int64) for t in self.trajectories])
        order = np.cumsum(self.mask) - 1
        return [self._project(layout, tokens, order) for layout in plan_microbatches(self.lengths, plan)]

    def _project(
        self, layout: TokenLayout, tokens: NDArray[np.int64], order: NDArray[np.int64]
    ) -> Microbatch:
        canonical, local = layout.indices(self.offsets)
        wanted = self.mask[canonical]
        widths = [segment.stop - segment.start for segment in layout.segments]
        segment_of = np.repeat(np.arange(len(widths)), widths)
        keys = tuple(
            (self.trajectories[s.sample].group_id, self.trajectories[s.sample].run_id)
            for s in layout.segments
        )
        return Microbatch(
            layout=layout,
            input_ids=self._tensor(layout.scatter(tokens, self.offsets)),
            position_ids=self._tensor(layout.position_ids),
            varlen=VarlenSegments.of(layout, self._tensor(local)),
            local=self._tensor(local[wanted]),
            select=self._tensor(order[canonical[wanted]]),
            sequence=self._tensor(segment_of[wanted]),
            sample_ids=keys,
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
