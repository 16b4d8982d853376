"""Ragged batches in float64, padded as packages hold them and flat as ours are."""

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

GROUP_SIZE = 3


@dataclass(frozen=True)
class Ragged:
    """B completions of up to T tokens; ``mask`` is 1 at loss tokens, and 0 at the answers of tools and at padding.

    Attributes:
        scores: [B] rewards.
        groups: [B] prompts.
        lengths: [B] tokens of each completion, tools' answers included.
    """

    mask: Tensor
    lengths: Tensor
    scores: Tensor
    groups: Tensor
    generator: torch.Generator

    @property
    def rows(self) -> int:
        return len(self.mask)

    @property
    def sequence(self) -> Tensor:
        return torch.arange(self.rows).repeat_interleave(self.mask.sum(1))

    def normal(self, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(self.mask.shape, generator=self.generator, dtype=torch.float64)

    def log_probs(self) -> Tensor:
        return -3 * torch.rand(self.mask.shape, generator=self.generator, dtype=torch.float64) - 0.01

    def flat(self, values: Tensor) -> Tensor:
        return values[self.mask.bool()]

    def padded(self, values_K: Tensor) -> Tensor:
        out = torch.zeros(self.mask.shape, dtype=values_K.dtype)
        out[self.mask.bool()] = values_K
        return out

    @property
    def token_rewards(self) -> Tensor:
        """[B, T] rewards on the last token of each completion."""
        out = torch.zeros(self.mask.shape, dtype=torch.float64)
        out[torch.arange(self.rows), self.lengths - 1] = self.scores
        return out


def make_ragged(seed: int, *, groups: int = 3, empty: bool = False, tools: bool = True) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    B, T = groups * GROUP_SIZE, 7
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    lengths[0], lengths[1] = T, 1
    mask = (torch.arange(T) < lengths[:, None]).long()
    if tools:
        answers = torch.rand(B, T, generator=generator) < 0.25
        last = torch.arange(T) == (lengths - 1)[:, None]
        mask = mask * ~(answers & ~last & (torch.arange(T) > 0))
    if empty:
        mask[3] = 0
    scores = torch.randint(0, 5, (B,), generator=generator).double() / 4
    scores[GROUP_SIZE : 2 * GROUP_SIZE] = 0.5
    return Ragged(mask, lengths, scores, torch.arange(groups).repeat_interleave(GROUP_SIZE), generator)


seeds = st.integers(0, 10**6)
quick = settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
