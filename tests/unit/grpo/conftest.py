"""A tiny policy over random ragged batches, in float64, to test properties of objectives on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.kl_divergence import kl_penalty
from regress.grpo.loss_aggregation import batch_weights, entropy_scale, entropy_weights
from regress.grpo.objective import Objective
from regress.grpo.selective_log_softmax import token_log_probs
from regress.grpo.token_losses import TokenLoss, token_loss
from regress.grpo.token_samples import Samples
from regress.grpo.token_selection import Compared, TokenSelection, marks_of, normalized_weights

pytest.register_assert_rewrite("tests.unit.grpo.plain_losses")  # it compares values, too

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


def batch_advantages(batch: Batch, anchor: Tensor, objective: Objective) -> Tensor:
    """Advantages by any estimator: values, baselines and squared probabilities are those of the batch's own numbers."""
    old = anchor + batch.old_shift
    return token_advantages(
        batch.rewards,
        batch.groups,
        batch.sequence,
        objective,
        kl_penalty(old, batch.ref, objective) if objective.kl_in_reward else None,
        baselines_N=batch.rewards.cos(),
        values_K=batch.sampler_shift,
        old_log_probs_K=old.clamp(max=0.0),
        sum_pi_squared_K=0.5 * old.clamp(max=0.0).exp() + 0.5,
    )


def batch_marks(
    batch: Batch, anchor: Tensor, advantages: Tensor, objective: Objective
) -> tuple[TokenSelection | None, Tensor | None]:
    """Marks and normalized sampler weights of the whole batch, where the objective wants its tokens compared."""
    if not objective.compares_tokens or objective.statistics_scope == "microbatch":
        return None, None
    old = anchor + batch.old_shift
    entropy = batch.log_probs(batch.weight)[1].detach()
    samples = Samples(batch.sequence, batch.num_sequences)
    compared = Compared(anchor, old, advantages, samples, entropy, old + batch.sampler_shift)
    marks = marks_of(compared, objective)
    weights = normalized_weights(compared, objective) if objective.correction_normalize else None
    return (None if marks.kept_K is None and marks.penalized_K is None else marks), weights


def batch_gradient(
    batch: Batch, objective: Objective, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, list[TokenLoss]]:
    """Summed loss and gradient of the batch, computed in microbatches of whole samples as an engine does."""
    anchor = batch.log_probs(batch.weight)[0].detach()
    advantages = batch_advantages(batch, anchor, objective)
    of_batch = batch.sequence, batch.num_sequences, objective
    weights = batch_weights(
        *of_batch, max_completion_length=LONGEST, partition=parts, completion_lengths=batch.lengths.tolist()
    )
    (marks, correction), scale = batch_marks(batch, anchor, advantages, objective), None
    own = entropy_weights(*of_batch, partition=parts, kept_K=None if marks is None else marks.kept_K)
    if own is not None:
        scale = entropy_scale(weights, own)
    weight = batch.weight.clone().requires_grad_()
    total, losses = torch.zeros((), dtype=torch.float64), []
    for samples in parts:
        tokens, local = batch.take(samples)
        out = token_log_probs(batch.features[tokens] @ weight, batch.targets[tokens], entropy=True)
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
            marks=None if marks is None else marks.select(tokens),
            entropy_scale_K=None if scale is None else scale[tokens],
            correction_K=None if correction is None else correction[tokens],
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
