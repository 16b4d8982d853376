"""Policy that is one number for each loss token, a batch of four samples, and what its loss has to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regress.dump.trajectory import Trajectory
from regress.engine.mini_batch import LossTokens, Microbatch, TokenBatch
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import make_objective
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.grpo.token_losses import TokenLoss, token_loss
from regress.layout import BatchPlan

LENGTHS = (3, 2, 4, 1)
K = sum(LENGTHS)


class Numbers:
    """Policy whose log-prob of loss token k is its k-th parameter, and whose entropy is 2 minus it."""

    sums_gradients = False
    backward_scale = 1.0

    def __init__(
        self, values: Sequence[float] | None = None, *, computes: bool = True, missing: bool = False
    ) -> None:
        given = [-0.2 - 0.15 * k for k in range(K)] if values is None else list(values)
        self.theta = nn.Parameter(torch.tensor(given, dtype=torch.float64))
        self.computes_losses, self._missing = computes, missing
        self.seen: list[int] = []

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        return [self.theta.detach()[micro.select] for micro in microbatches]

    def values(self, microbatches: Sequence[Microbatch], *, entropy: bool) -> list[TokenLogProbs]:
        return [TokenLogProbs(values, 2.0 - values) for values in self.log_probs(microbatches)]

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Callable[..., Any]) -> list[Any]:
        found = []
        for micro in microbatches:
            values = self.theta[micro.select]
            share, result = loss(micro, TokenLogProbs(values, 2.0 - values))
            share.backward()
            found.append(result)
        return found

    def zero_grad(self) -> None:
        self.theta.grad = None

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        return nn.utils.get_total_norm([self.theta.grad]) if self.theta.grad is not None else torch.zeros(())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "theta", self.theta

    def shard(self, name: str) -> None:
        return None

    def sum_over_context_parallel(self, values: Tensor) -> Tensor:
        return values.add_(1.0) if self._missing else values  # in place, as a collective does


def trajectory(run_id: int, completion: int) -> Trajectory:
    return Trajectory("g", run_id, [2] * (2 + completion), [0] * 2 + [1] * completion, 0.0, 2, "stop")


BATCH = TokenBatch([trajectory(number, length) for number, length in enumerate(LENGTHS)])
WEIGHTS = torch.linspace(0.05, 0.15, K, dtype=torch.float64)
ADVANTAGES = torch.tensor([(1.0, -0.5, 0.7, -1.2)[sample] for sample in BATCH.sequence], dtype=torch.float64)


def tokens(**more: Any) -> LossTokens:
    shift = torch.linspace(-0.4, 0.3, K, dtype=torch.float64)
    known = {
        "weights": WEIGHTS,
        "advantages": ADVANTAGES,
        "old_log_probs": Numbers().theta.detach() + shift,
        "ref_log_probs": Numbers().theta.detach() - 2 * shift,
    }
    return LossTokens(BATCH.sequence, len(LENGTHS), **{**known, **more})


def micros(size: int) -> list[Microbatch]:
    return BATCH.microbatches(BatchPlan(micro_batch_size=size))


def objective(**fields: Any) -> Objective:
    return make_objective(**{"kl_coef": 0.1, "entropy_coef": 0.02, **fields})


def expected(of: LossTokens, fields: Objective, theta: Tensor) -> tuple[float, Tensor, TokenLoss]:
    """Loss, gradient and terms of the whole batch at once."""
    values = theta.detach().clone().requires_grad_()
    assert of.advantages is not None
    loss = token_loss(
        values,
        values.detach() if of.old_log_probs is None else of.old_log_probs,
        of.advantages,
        of.sequence,
        of.num_sequences,
        fields,
        ref_log_probs_K=of.ref_log_probs,
        entropy_K=2.0 - values,
    )
    total = (WEIGHTS * loss.loss_K).sum()
    total.backward()
    assert values.grad is not None
    return float(total.detach()), values.grad, loss


def poisoned(name: str, value: float = math.nan) -> tuple[Numbers, LossTokens]:
    """Policy and tokens with one value of a sample of several tokens that is not finite."""
    if name == "log_probs":
        return Numbers([-1.0] * (K - 2) + [value, -1.0]), tokens()
    values = getattr(tokens(sampler_log_probs=tokens().old_log_probs), name).clone()
    values[-2] = value  # the last of the four of sample 2
    return Numbers(), tokens(**{name: values})
