"""Training step: forward, loss, backward, clip, update. Written once, for every layout.

Wrapping and placement of the model are left to the policy, and the place of tokens to the layout.
Denominators come in as per-token weights computed over the whole mini-batch, so the shares of microbatches
and ranks only have to be added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.dump.taps import failure
from regress.engine import optim, taps, token_gradients
from regress.engine.batch import LossTokens, Microbatch
from regress.engine.components import LossFunction
from regress.engine.policy_interface import Policy
from regress.engine.world import SingleProcess, World
from regress.errors import DumpError, NotFinite, RegressError
from regress.grpo.aggregation import token_weights
from regress.grpo.inputs import InputError
from regress.grpo.logprobs import TokenLogProbs
from regress.grpo.losses import TokenLoss, token_loss
from regress.grpo.metrics import Metric, add_metrics, token_metrics
from regress.grpo.objective import Objective


@dataclass(frozen=True)
class Share:
    """A microbatch's share of the loss, its part of the metrics, and the shares of the loss's terms."""

    loss: Tensor
    metrics: dict[str, Metric]
    terms: dict[str, float] = field(default_factory=dict)


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
    microbatches: Sequence[Microbatch],
    objective: Objective,
    *,
    max_completion_length: int,
) -> Tensor:
    """Return the ``[K]`` weight of every loss token: the aggregation and its denominator, over the whole mini-batch.

    With ``denominator_scope=microbatch`` each microbatch is averaged separately, and then the microbatches
    are averaged.
    """
    if objective.denominator_scope == "global":
        return token_weights(
            tokens.sequence, tokens.num_sequences, objective, max_completion_length=max_completion_length
        )
    weights = torch.zeros(len(tokens), dtype=torch.float64, device=tokens.sequence.device)
    for micro in microbatches:
        own = token_weights(
            micro.sequence, len(micro.sample_ids), objective, max_completion_length=max_completion_length
        )
        weights[micro.select] = own.to(weights.dtype) / len(microbatches)
    return weights


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

    Raises:
        NotFinite: if the loss or the gradient is not finite; parameters and optimizer state are then unchanged.
    """

    problems: list[RegressError] = []  # reported when all ranks have finished their passes

    def loss(micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, Share]:
        part = tokens.select(micro.select, micro.sequence, len(micro.sample_ids))
        old = out.log_probs.detach() if part.old_log_probs is None else part.old_log_probs
        part = replace(part, old_log_probs=old)
        assert part.weights is not None
        assert part.advantages is not None
        taps.forward(micro, out)
        token_gradients.catch(micro, out)
        if _missed(policy, out, part):
            return _no_loss(out)
        try:
            terms = (loss_function or token_loss)(
                out.log_probs,
                old,
                part.advantages,
                part.sequence,
                part.num_sequences,
                objective,
                ref_log_probs_K=part.ref_log_probs,
                sampler_log_probs_K=part.sampler_log_probs,
                entropy_K=out.entropy,
                sum_over_context_parallel=policy.sum_over_context_parallel,
            )
        except InputError as error:
            index = next(index for index, known in enumerate(microbatches) if known is micro)
            kind = RegressError if _finite(out, part) else NotFinite
            problems.append(kind(f"{_named(index, micro)} has no loss, so no update was made: {error}"))
            return _no_loss(out)
        weights = part.weights.to(terms.loss_K.dtype)
        share = (weights * terms.loss_K).sum()
        metrics = token_metrics(terms)
        taps.loss(micro, part, out, terms, share, metrics, tokens, objective, policy.backward_scale)
        return share, Share(share.detach(), metrics, _terms(terms, weights, objective))

    policy.zero_grad()
    with token_gradients.recorded(policy.backward_scale):
        shares = policy.forward_backward(microbatches, loss)
    taps.gradients(policy, target_params)
    grad_norm = policy.clip_grad_norm(max_grad_norm)
    taps.grad_norm(grad_norm)
    if failure() is not None:
        problems.append(DumpError(str(failure())))
    own_part = replace(_own_part(microbatches, shares, problems), grad_norm=grad_norm.item())
    try:
        outcome = _combined(world or SingleProcess(), own_part, grad_norm)
    except NotFinite:  # on all ranks alike
        if not skip_nonfinite:
            raise
        policy.zero_grad()
        outcome = StepOutcome(math.nan, grad_norm.item(), {}, skipped=True)
    else:
        optim.update(optimizer)
    taps.after_update(policy, optimizer, target_params)
    return outcome


@dataclass(frozen=True)
class _Part:
    """One rank's part of an update; ``problem`` is the reason it must not be made."""

    loss: float
    metrics: dict[str, Metric]
    terms: dict[str, float]
    problem: RegressError | None
    grad_norm: float = 0.0


def _missed(policy: Policy, out: TokenLogProbs, part: LossTokens) -> bool:
    """Return True if a rank with part of the same samples has no loss, for which this one would wait."""
    own = torch.tensor(float(not _finite(out, part)), device=out.log_probs.device)
    return bool(policy.sum_over_context_parallel(own.clone()) > own)


def _finite(out: TokenLogProbs, part: LossTokens) -> bool:
    """Return True if everything that a loss is computed from is finite."""
    read = (out.log_probs, out.entropy, part.old_log_probs, part.ref_log_probs, part.sampler_log_probs)
    return all(bool(values.detach().isfinite().all()) for values in read if values is not None)


def _no_loss(out: TokenLogProbs) -> tuple[Tensor, Share]:
    """Return a zero loss, so that the backward pass meets those of the other ranks."""
    share = out.log_probs.sum() * 0.0
    return share, Share(share.detach(), {})


def _own_part(
    microbatches: Sequence[Microbatch], shares: Sequence[Share], problems: Sequence[RegressError]
) -> _Part:
    loss = math.fsum(share.loss.item() for share in shares) if _all_finite(shares) else math.nan
    metrics: dict[str, Metric] = functools.reduce(add_metrics, (share.metrics for share in shares), {})
    problem = problems[0] if problems else _nonfinite(microbatches, shares)
    return _Part(loss, metrics, _sums([share.terms for share in shares]), problem)


def _combined(world: World, own: _Part, grad_norm: Tensor) -> StepOutcome:
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
            raise NotFinite(
                f"the gradient norm is {part.grad_norm}, so the update was not made; "
                "look for the parameter with debug.dump_options.gradient=true"
            )
    mesh = world.plan.mesh
    distinct = [part for rank, part in enumerate(parts) if mesh.coordinates(rank)["tp"] == 0]
    metrics = functools.reduce(add_metrics, (part.metrics for part in distinct))
    terms = _sums([part.terms for part in distinct])
    return StepOutcome(math.fsum(part.loss for part in distinct), grad_norm.item(), metrics, terms=terms)


def _terms(loss: TokenLoss, weights: Tensor, objective: Objective) -> dict[str, float]:
    """Return the share of each term in a microbatch's loss, coefficients included."""
    terms = {
        "policy": (1.0, loss.policy_K),
        "kl": (objective.kl_coef, loss.kl_K),
        "entropy": (-objective.entropy_coef, loss.entropy_K),
    }
    return {
        name: coefficient * float((weights * values.detach()).sum())
        for name, (coefficient, values) in terms.items()
        if values is not None and coefficient != 0.0
    }


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in names}


def _all_finite(shares: Sequence[Share]) -> bool:
    return all(bool(share.loss.isfinite()) for share in shares)


def _nonfinite(microbatches: Sequence[Microbatch], shares: Sequence[Share]) -> RegressError | None:
    """Return the error for the first loss that is not finite; a rank without the last pipeline stage has no
    shares.
    """
    for index, (micro, share) in enumerate(zip(microbatches, shares, strict=False)):
        if not share.loss.isfinite():
            return NotFinite(
                f"{_named(index, micro)} has the loss {share.loss.item()}, so no update was made; "
                "look at its terms with debug.dump_options.is_loss_debug=true"
            )
    return None


def _named(index: int, micro: Microbatch) -> str:
    samples = ", ".join(f"{group}/{run}" for group, run in micro.sample_ids)
    return f"microbatch {index} (samples {samples})"
