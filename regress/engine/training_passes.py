"""Passes of a training step: forward, loss and backward of microbatches, whose gradients add to those that are there.

Denominators come in as per-token weights, so the shares of microbatches and ranks only have to be added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regress.dump.taps import at
from regress.engine import loss_token_gradients, step_taps
from regress.engine.mini_batch import LossTokens, Microbatch
from regress.engine.policy_interface import Policy
from regress.engine.user_components import LossFunction
from regress.errors import NotFinite, RegressError
from regress.grpo.argument_checks import InputError
from regress.grpo.loss_aggregation import entropy_scale
from regress.grpo.objective import Objective
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.grpo.token_losses import TokenLoss, entropy_in_loss, token_loss
from regress.grpo.token_selection import TokenSelection
from regress.grpo.update_metrics import Metric, add_metrics, token_metrics

Watch = Callable[[Microbatch, TokenLogProbs, TokenLoss], None]
"""Function ``watch(microbatch, log_probs, loss)``, called for each microbatch whose loss was computed."""


@dataclass(frozen=True)
class Share:
    """A microbatch's share of the loss, its part of the metrics, and the shares of the loss's terms."""

    loss: Tensor
    metrics: dict[str, Metric]
    terms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One rank's part of an update; ``problem`` is the reason it must not be made."""

    loss: float = 0.0
    metrics: dict[str, Metric] = field(default_factory=dict)
    terms: dict[str, float] = field(default_factory=dict)
    problem: RegressError | None = None
    grad_norm: float = 0.0


def accumulate(
    policy: Policy,
    tokens: LossTokens,
    microbatches: Sequence[Microbatch],
    objective: Objective,
    *,
    loss_function: LossFunction | None = None,
    watch: Watch | None = None,
    beside: Callable[[Microbatch], float] | None = None,
) -> Part:
    """Run forward and backward over microbatches, by all ranks together; return this rank's part of the loss.

    What is wrong with a loss is in the part and not raised, since the other ranks have passes to make, too.

    Args:
        tokens: weights, advantages and recorded log-probs of the ``K`` loss tokens; old log-probs of ``None`` are
            those of the forward pass itself, so that every ratio is 1.
        microbatches: microbatches of this rank: the same tokens, or its part of them, under a layout.
        loss_function: loss of each token, with the signature of `token_loss`, which it is by default.
        watch: sees each microbatch with its log-probs and the parts of its loss.
        beside: returns what the layers of the model add to the loss of a microbatch, which is recorded with it.
    """
    losses = _Losses(policy, tokens, microbatches, objective, loss_function or token_loss, watch, beside)
    with loss_token_gradients.recorded(policy.backward_scale):
        shares = policy.forward_backward(microbatches, losses)
    return losses.part(shares)


def evaluate(
    policy: Policy,
    tokens: LossTokens,
    microbatches: Sequence[Microbatch],
    objective: Objective,
    *,
    loss_function: LossFunction | None = None,
    watch: Watch | None = None,
) -> Part:
    """Run the forward passes of `accumulate` and compute their losses without any gradient."""
    losses = _Losses(policy, tokens, microbatches, objective, loss_function or token_loss, watch)
    shares = []
    with torch.no_grad():
        for index, (micro, values) in enumerate(
            zip(microbatches, policy.log_probs(microbatches), strict=True)
        ):
            with at(micro=step_taps.number(index)):
                step_taps.inputs(micro)
                if policy.computes_losses:
                    shares.append(losses(micro, TokenLogProbs(values, None))[1])
    return losses.part(shares)


class _Losses:
    """Losses of the microbatches of one pass, and what keeps some of them from having one."""

    def __init__(
        self,
        policy: Policy,
        tokens: LossTokens,
        microbatches: Sequence[Microbatch],
        objective: Objective,
        function: LossFunction,
        watch: Watch | None,
        beside: Callable[[Microbatch], float] | None = None,
    ) -> None:
        self._policy, self._tokens, self._microbatches = policy, tokens, microbatches
        self._objective, self._function, self._watch, self._beside = objective, function, watch, beside
        self._problems: list[RegressError] = []  # reported when all ranks have finished their passes

    def __call__(self, micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, Share]:
        """Return a microbatch's share of the loss."""
        part = self._tokens.select(micro.select, micro.sequence, len(micro.sample_ids))
        old = out.log_probs.detach() if part.old_log_probs is None else part.old_log_probs
        part = replace(part, old_log_probs=old)
        assert part.weights is not None
        step_taps.forward(micro, out)
        loss_token_gradients.catch(micro, out)
        if _missed(self._policy, out, part):
            return _no_loss(out)
        try:
            terms = self._terms(part, old, out)
        except InputError as error:
            index = next(index for index, known in enumerate(self._microbatches) if known is micro)
            kind = RegressError if _finite(out, part) else NotFinite
            self._problems.append(kind(f"{_named(index, micro)} has no loss, so no update was made: {error}"))
            return _no_loss(out)
        weights = part.weights.to(terms.loss_K.dtype)
        share = _sum(micro, weights * terms.loss_K)
        metrics = token_metrics(terms if part.counted is None else terms.select(part.counted))
        scale = self._policy.backward_scale
        router = None if self._beside is None else self._beside(micro)
        step_taps.loss(micro, part, out, terms, share, metrics, self._tokens, self._objective, scale, router)
        if self._watch is not None:
            self._watch(micro, out, terms)
        return share, Share(share.detach(), metrics, _terms(micro, terms, weights, self._objective))

    def _terms(self, part: LossTokens, old: Tensor, out: TokenLogProbs) -> TokenLoss:
        assert part.advantages is not None
        assert part.weights is not None
        named: dict[str, Any] = {}  # what a loss of one's own need not know
        if part.kept is not None or part.penalized is not None:
            named["marks"] = TokenSelection(part.kept, part.penalized)
        if part.entropy_weights is not None:
            named["entropy_scale_K"] = entropy_scale(part.weights, part.entropy_weights)
        if part.correction is not None:
            named["correction_K"] = part.correction.to(old.dtype)
        return self._function(
            out.log_probs,
            old,
            part.advantages,
            part.sequence,
            part.num_sequences,
            self._objective,
            ref_log_probs_K=part.ref_log_probs,
            sampler_log_probs_K=part.sampler_log_probs,
            entropy_K=out.entropy,
            sum_over_context_parallel=self._policy.sum_over_context_parallel,
            **named,
        )

    def part(self, shares: Sequence[Share]) -> Part:
        """Return this rank's part of the loss from the shares of its microbatches."""
        finite = all(bool(share.loss.isfinite()) for share in shares)
        loss = math.fsum(share.loss.item() for share in shares) if finite else math.nan
        metrics: dict[str, Metric] = functools.reduce(add_metrics, (share.metrics for share in shares), {})
        problem = self._problems[0] if self._problems else _nonfinite(self._microbatches, shares)
        return Part(loss, metrics, sums([share.terms for share in shares]), problem)


def sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of numbers by name."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in names}


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


def _sum(micro: Microbatch, values: Tensor) -> Tensor:
    """Return the sum of ``[K]`` values over the loss tokens that count; others would change its rounding."""
    counted = micro.effective.bool()
    return (values if bool(counted.all()) else values[counted]).sum()


def _terms(micro: Microbatch, loss: TokenLoss, weights: Tensor, objective: Objective) -> dict[str, float]:
    """Return the share of each term in a microbatch's loss, coefficients included."""
    terms = {
        "policy": (1.0, loss.policy_K),
        "kl": (objective.kl_coef, loss.kl_K),
        "entropy": (-objective.entropy_coef, entropy_in_loss(loss)),
    }
    return {
        name: coefficient * float(_sum(micro, weights * values.detach()))
        for name, (coefficient, values) in terms.items()
        if values is not None and coefficient != 0.0
    }


def _nonfinite(microbatches: Sequence[Microbatch], shares: Sequence[Share]) -> RegressError | None:
    """Return the error for the first loss that is not finite; a rank without the last pipeline stage has no
    shares.
    """
    for index, (micro, share) in enumerate(zip(microbatches, shares, strict=False)):
        if not share.loss.isfinite():
            return NotFinite(f"""{_named(index, micro)} has the loss {share.loss.item()}, so no update was made; look at
            its terms with debug.dump_options.is_loss_debug=true""")
    return None


def _named(index: int, micro: Microbatch) -> str:
    samples = ", ".join(f"{group}/{run}" for group, run in micro.sample_ids)
    return f"microbatch {index} (samples {samples})"
