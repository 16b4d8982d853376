"""Training step: forward, loss, backward, clip, update. Written once, for every layout.

Wrapping and placement of the model are left to the policy, and the place of tokens to the layout.
Denominators come in as per-token weights computed over the whole mini-batch, so the shares of microbatches
and ranks only have to be added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.dump.taps import failure
from regress.engine import optimizer as optim
from regress.engine import step_taps
from regress.engine.batch_token_selection import compared
from regress.engine.engine_ranks import SingleProcess, World
from regress.engine.mini_batch import LossTokens, Microbatch
from regress.engine.policy_interface import Policy
from regress.engine.router_loss import RouterLoss
from regress.engine.training_passes import Part, accumulate, sums
from regress.engine.user_components import LossFunction
from regress.errors import DumpError, NotFinite
from regress.grpo.loss_aggregation import batch_weights, drawn_weights
from regress.grpo.objective import Objective
from regress.grpo.update_metrics import Metric, add_metrics


@dataclass(frozen=True)
class StepOutcome:
    """Loss of the mini-batch, gradient norm before clipping, metrics over its loss tokens, and the loss's terms.

    ``terms`` add up to the loss: those of policy, KL and entropy, as far as the objective has them. ``skipped`` is
    True where loss or gradient norm is not finite and no update was made; the loss is then NaN, and there are no
    metrics.
    """

    loss: float
    grad_norm: float
    metrics: dict[str, Metric]
    terms: dict[str, float] = field(default_factory=dict)
    skipped: bool = False


def weigh(
    tokens: LossTokens,
    partition: Sequence[Sequence[int]],
    objective: Objective,
    *,
    max_completion_length: int,
    ranks: int = 1,
    completion_lengths: Sequence[int] | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the ``[K]`` weight of every loss token: the aggregation and its denominator, over the whole mini-batch.

    With ``denominator_scope=microbatch`` each microbatch is averaged separately, and then the microbatches of all ranks
    are averaged. See `regress.grpo.loss_aggregation.batch_weights`.

    Args:
        partition: samples of each microbatch, of all ranks.
        ranks: ranks that hold different samples.
        completion_lengths: tokens of each sample's completion.
        counts: how often each sample is in the mini-batch; once by default.
    """
    layout: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "partition": partition,
        "ranks": ranks,
        "completion_lengths": completion_lengths,
    }
    if counts is not None:
        sequence = tokens.sequence.cpu()
        return drawn_weights(sequence, counts, objective, **layout).to(tokens.sequence.device)
    return batch_weights(tokens.sequence, tokens.num_sequences, objective, **layout)


def train_step(
    policy: Policy,
    optimizer: Optimizer,
    tokens: LossTokens,
    microbatches: Sequence[Microbatch],
    objective: Objective,
    *,
    world: World | None = None,
    max_grad_norm: float | None,
    target_params: str = ".*",
    loss_function: LossFunction | None = None,
    skip_nonfinite: bool = False,
    router: RouterLoss | None = None,
) -> StepOutcome:
    """Make one optimizer update on one mini-batch, by all ranks together.

    Args:
        tokens: weights, advantages and recorded log-probs of its ``K`` loss tokens; old log-probs of ``None`` are
            those of the forward pass itself, so that every ratio is 1.
        microbatches: microbatches of this rank: the same tokens, or its part of them, under a layout.
        world: the ranks; by default this process alone.
        max_grad_norm: the gradient is scaled down to this 2-norm; ``None`` leaves it.
        target_params: pattern of the parameters whose gradients, values and optimizer state are dumped.
        loss_function: loss of each token, with the signature of `token_loss`, which it is by default.
        skip_nonfinite: leave the update out, on all ranks, where the loss or the gradient of one is not finite.
        router: load-balancing loss of the policy's routers, a term of the loss of the mini-batch.

    Raises:
        NotFinite: if the loss or the gradient is not finite; parameters and optimizer state are then unchanged.
    """

    tokens = compared(policy, tokens, microbatches, objective, world or SingleProcess())
    policy.zero_grad()
    balanced = (
        nullcontext(0.0) if router is None else router.of_update(microbatches, world or SingleProcess())
    )
    with balanced as router_loss:
        part = accumulate(
            policy,
            tokens,
            microbatches,
            objective,
            loss_function=loss_function,
            beside=None if router is None else router.share,
        )
    outcome = update(
        policy,
        optimizer,
        part,
        world=world,
        max_grad_norm=max_grad_norm,
        target_params=target_params,
        skip_nonfinite=skip_nonfinite,
    )
    if router is None or outcome.skipped:
        return outcome
    terms = {**outcome.terms, "router": router_loss}
    return replace(outcome, loss=outcome.loss + router_loss, terms=terms)


def update(
    policy: Policy,
    optimizer: Optimizer,
    part: Part,
    *,
    world: World | None = None,
    max_grad_norm: float | None,
    target_params: str = ".*",
    skip_nonfinite: bool = False,
) -> StepOutcome:
    """Make one optimizer update from the gradients that are there, by all ranks together.

    Args:
        part: this rank's part of the passes that the gradients come from, or ``Part()`` if those were settled before.

    The other arguments and errors are those of `train_step`.
    """
    step_taps.gradients(policy, target_params)
    grad_norm = policy.clip_grad_norm(max_grad_norm)
    step_taps.grad_norm(grad_norm)
    problem = part.problem
    if problem is None and failure() is not None:
        problem = DumpError(str(failure()))
    try:
        own_part = replace(part, problem=problem, grad_norm=grad_norm.item())
        outcome = _combined(world or SingleProcess(), own_part, grad_norm)
    except NotFinite:  # on all ranks alike
        if not skip_nonfinite:
            raise
        policy.zero_grad()
        outcome = StepOutcome(math.nan, grad_norm.item(), {}, skipped=True)
    else:
        optim.update(optimizer)
    step_taps.after_update(policy, optimizer, target_params)
    return outcome


def step_outcome(world: World, part: Part) -> StepOutcome:
    """Return passes of all ranks as a whole, before any update; there is no gradient norm yet.

    Raises:
        RegressError: on every rank, if the pass of one of them has a problem, or it cannot record.
    """
    if part.problem is None and failure() is not None:
        part = replace(part, problem=DumpError(str(failure())))
    return _combined(world, part, torch.zeros(()))


def _combined(world: World, own: Part, grad_norm: Tensor) -> StepOutcome:
    """Return the update as a whole: tensor-parallel ranks compute the same loss, so one of each group counts.

    Raises:
        RegressError: on every rank, if one of them has a problem.
        NotFinite: on every rank, if that problem is a loss that is not finite, or if the gradient norm is not.
    """
    parts = world.gather(own)
    problems = [part.problem for part in parts if part.problem is not None]
    for problem in sorted(problems, key=lambda problem: isinstance(problem, NotFinite)):  # those last
        raise problem
    for part in parts:
        if not math.isfinite(part.grad_norm):
            raise NotFinite(f"""the gradient norm is {part.grad_norm}, so the update was not made; look for the
            parameter with debug.dump_options.gradient=true""")
    mesh = world.plan.mesh
    distinct = [part for rank, part in enumerate(parts) if mesh.coordinates(rank)["tp"] == 0]
    metrics = functools.reduce(add_metrics, (part.metrics for part in distinct))
    terms = sums([part.terms for part in distinct])
    return StepOutcome(math.fsum(part.loss for part in distinct), grad_norm.item(), metrics, terms=terms)
