"""Short supervised start, so that a tiny model samples right answers often enough to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.task_config import WarmStartConfig
from regress.engine.engine_ranks import World
from regress.engine.mini_batch import Microbatch, TokenBatch
from regress.engine.optimizer import adamw, update
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import BatchPlan


def warm_start(
    policy: LocalPolicy,
    examples: Callable[[int], Sequence[Trajectory]],
    config: WarmStartConfig,
    advance: Callable[[], None],
    world: World,
    *,
    stages: int = 1,
) -> float:
    """Maximize the mean log-prob of the answers' tokens for ``config.steps`` AdamW steps, by all ranks together.

    Args:
        examples: the demonstrations of a step: prompts with right answers, answers in the loss mask.
        advance: called after every step.
        world: the ranks, which share the examples.
        stages: stages of the pipeline; if there are several, as many microbatches are made.

    Returns:
        The negative mean log-prob of the last step, in nats per token (0 without steps).
    """
    optimizer = adamw(policy.named_parameters(), config.learning_rate)
    last = 0.0
    for step in range(config.steps):
        batch = TokenBatch(examples(step), device=policy.device)
        count = len(batch.sequence)

        def loss(_: Microbatch, out: TokenLogProbs, count: int = count) -> tuple[Tensor, Tensor]:
            share = -out.log_probs.sum() / count
            return share, share.detach()

        policy.zero_grad()
        plan = BatchPlan() if stages == 1 else _filling(stages, world.plan.samples(len(batch.keys), 0))
        shares = policy.forward_backward(batch.microbatches(plan, world.plan, world.rank), loss)
        policy.clip_grad_norm(1.0)
        update(optimizer)
        advance()
        own = sum(
            (share.double() for share in shares), torch.zeros((), dtype=torch.float64, device=policy.device)
        )
        last = world.sum(own).item()
    policy.zero_grad()
    return last


def _filling(stages: int, samples: Sequence[int]) -> BatchPlan:
    """Return a plan with at least one microbatch per stage, as some schedules require, if there are enough
    samples.
    """
    return BatchPlan(micro_batch_size=max(1, len(samples) // stages))
