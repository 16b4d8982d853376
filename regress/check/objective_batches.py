"""Small batches of samples on which objectives differ, in float64, from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LONGEST = 12
"""Longest completion that is allowed, in tokens; none of the batches has one."""
GROUP = 3
_LENGTHS = (5, 1, 7, 3, 6, 2)


@dataclass(frozen=True)
class Batch:
    """Samples in rows padded on the right.

    Attributes:
        name: what is special about it.
        mask: [N, T] True at loss tokens.
        spans: [N] tokens of each completion, those without loss included.
        values: term -> [N, T]; padding holds values as ordinary as all others.
        rewards: [N].
        groups: [N].
    """

    name: str
    mask: Tensor
    spans: Tensor
    values: dict[str, Tensor]
    rewards: Tensor
    groups: Tensor

    @property
    def count(self) -> int:
        """Samples."""
        return len(self.spans)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return int(self.mask.shape[1])

    @property
    def tokens(self) -> int:
        """Loss tokens."""
        return int(self.mask.sum())

    @property
    def inside(self) -> Tensor:
        """[N, T] True at tokens of completions, False in padding."""
        return torch.arange(self.width) < self.spans[:, None]

    def rows(self, chosen: Sequence[int]) -> Batch:
        """Return the batch of some of the samples, as wide as before."""
        index = torch.tensor(chosen, dtype=torch.int64)
        values = {term: each[index] for term, each in self.values.items()}
        return replace(
            self,
            mask=self.mask[index],
            spans=self.spans[index],
            values=values,
            rewards=self.rewards[index],
            groups=self.groups[index],
        )


def batches(seed: int = 0) -> list[Batch]:
    """Return batches with ratios on both sides of every clip range, each with something that objectives differ in."""
    plain = _batch("padded on the right", _LENGTHS, seed)
    holes = _batch("tokens without loss in the middle", (4, 9, 2, 6, 8, 3), seed + 1)
    holes.mask[1, 3:6] = holes.mask[4, 0] = holes.mask[4, 5:7] = False
    empty = _batch("a sample without loss tokens", (6, 3, 8, 2, 5, 4), seed + 2)
    empty.mask[3] = False
    same = _batch("old log-probs are those of the policy", (3, 5, 1, 8, 4, 2), seed + 3)
    same.values["old_log_probs"] = same.values["log_probs"].clone()
    far = _batch("ratios far from 1", (2, 10, 4, 1, 5, 3), seed + 4)
    far.values["old_log_probs"] = far.values["log_probs"] - 12 * (
        far.values["log_probs"] - far.values["old_log_probs"]
    )
    far.values["ref_log_probs"] = far.values["log_probs"] - 12 * (
        far.values["log_probs"] - far.values["ref_log_probs"]
    )
    return [plain, holes, empty, same, far]


def _batch(name: str, lengths: Sequence[int], seed: int) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)

    def normal(scale: float, *size: int) -> Tensor:
        return scale * torch.randn(*(size or shape), generator=drawn, dtype=torch.float64)

    policy = -torch.rand(*shape, generator=drawn, dtype=torch.float64) * 3 - 0.05
    far = torch.rand(*shape, generator=drawn) < 0.2
    spans = torch.tensor(lengths)
    values = {
        "log_probs": policy,
        "old_log_probs": policy - normal(0.35) - torch.where(far, normal(1.5), 0.0),
        "ref_log_probs": policy - normal(0.5),
        "entropy": 0.2 + torch.rand(*shape, generator=drawn, dtype=torch.float64),
        "advantages": normal(1.0, len(lengths), 1).expand(shape).clone(),
    }
    values["sampler_log_probs"] = values["old_log_probs"] - normal(0.3)
    groups = torch.arange(len(lengths)) // GROUP
    rewards = torch.rand(len(lengths), generator=drawn, dtype=torch.float64)
    return Batch(name, torch.arange(shape[1]) < spans[:, None], spans, values, rewards, groups)
