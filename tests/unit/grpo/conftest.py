"""A tiny policy over random ragged batches, in float64, to test properties of objectives on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from regress.grpo.advantages import token_advantages
from regress.grpo.aggregation import token_weights
from regress.grpo.logprobs import token_log_probs
from regress.grpo.losses import TokenLoss, token_loss
from regress.grpo.objective import Objective

FEATURES, VOCABULARY, LONGEST = 3, 7, 6


@dataclass
class Batch:
    """N samples in groups of G; sample i has ``lengths[i]`` loss tokens (0 for some), all tokens are flat."""

    lengths: Tensor
    groups: Tensor
    rewards: Tensor
    features: Tensor
    targets: Tensor
    old_shift: Tensor
    ref: Tensor
    sampler_shift: Tensor
    weight: Tensor

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def sequence(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    def log_probs(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        out = token_log_probs(self.features @ weight, self.targets, entropy=True)
        assert out.entropy is not None
        return out.log_probs, out.entropy

    def take(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token indices and local sample indices of some samples, in the order given."""
        tokens = [torch.nonzero(self.sequence == sample)[:, 0] for sample in samples]
        local = torch.repeat_interleave(torch.arange(len(samples)), self.lengths[list(samples)])
        return torch.cat(tokens), local


def random_batch(seed: int, *, groups: int = 3, group_size: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    N = groups * group_size
    lengths = torch.randint(0, LONGEST + 1, (N,), generator=generator)
    lengths[0] = 1
    K = int(lengths.sum())
    return Batch(
        lengths=lengths,
        groups=torch.arange(groups).repeat_interleave(group_size),
        rewards=normal(N),
        features=normal(K, FEATURES),
        targets=torch.randint(0, VOCABULARY, (K,), generator=generator),
        old_shift=0.4 * normal(K),
        ref=normal(K) - 2,
        sampler_shift=0.2 * normal(K),
        weight=normal(FEATURES, VOCABULARY),
    )


def batch_gradient(
    batch: Batch, objective: Objective, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, list[TokenLoss]]:
    """Summed loss and gradient of the batch, computed in microbatches of whole samples as an engine does."""
    advantages = token_advantages(batch.rewards, batch.groups, batch.sequence, objective)
    weights = token_weights(batch.sequence, batch.num_sequences, objective, max_completion_length=LONGEST)
    anchor = batch.log_probs(batch.weight)[0].detach()
    weight = batch.weight.clone().requires_grad_()
    total, losses = torch.zeros((), dtype=torch.float64), []
    for samples in parts:
        tokens, local = batch.take(samples)
        out = token_log_probs(batch.features[tokens] @ weight, batch.targets[tokens], entropy=True)
        if objective.denominator_scope == "microbatch":
            shares = token_weights(local, len(samples), objective, max_completion_length=LONGEST) / len(parts)
        else:
            shares = weights[tokens]
        loss = token_loss(
            out.log_probs,
            (anchor + batch.old_shift)[tokens],
            advantages[tokens],
            local,
            len(samples),
            objective,
            ref_log_probs_K=batch.ref[tokens],
            sampler_log_probs_K=(anchor + batch.old_shift + batch.sampler_shift)[tokens],
            entropy_K=out.entropy,
        )
        share = (shares * loss.loss_K).sum()
        share.backward()
        total += share.detach()
        losses.append(loss)
    assert weight.grad is not None
    return total, weight.grad, losses


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return random_batch


@pytest.fixture(scope="session")
def run_batch() -> Callable[..., tuple[Tensor, Tensor, list[TokenLoss]]]:
    return batch_gradient
