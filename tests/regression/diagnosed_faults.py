"""Changes of the engine that say which diagnosis is right: what may be said of each, written before it was run.

They vary what the corpus does not: other places, other sizes, other terms. Each lasts as long as its patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import build, optim, passes, policy, taps, trainer
from regress.engine.batch import TokenBatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.faults.fault import injected
from regress.faults.gradient import before_backward, in_policy_loss, valued
from regress.faults.logits import in_logits_gradient
from regress.faults.patch import Patch
from regress.faults.update import after_each_backward
from regress.grpo import estimators, losses
from regress.grpo.fields import ObjectiveFields

Objective = Any


@dataclass(frozen=True)
class Change:
    """A change of the engine, and the rules that may be said of it first; silence is never wrong.

    Attributes:
        fault: function of a patch, or of a run that was built.
        steps: until it shows.
        rules: ids of rules, any of which is right as the first.
    """

    fault: Callable[[Any], None]
    case: str
    rules: tuple[str, ...]
    variant: str = "mbs4"
    steps: int = 1

    @property
    def name(self) -> str:
        """As in test ids."""
        return f"{self.fault.__name__}-{self.case}-{self.variant}"

    @property
    def injected(self) -> Any:
        """The context in which the engine is changed."""
        return injected(self.fault)


def in_token_loss(patch: Patch, change: Callable[..., Any]) -> None:
    """Replace the loss of each token by ``change(right, *args, **rest)``."""
    right: Any = passes.token_loss
    patch.setattr(passes, "token_loss", lambda *args, **rest: change(right, *args, **rest))


def with_objective(patch: Patch, **values: Any) -> None:
    """Compute the loss of each token under another objective."""

    def wrong(right: Any, *args: Any, **rest: Any) -> Any:
        return right(*args[:-1], replace(args[-1], **values), **rest)

    in_token_loss(patch, wrong)


# terms of the loss


def kl_left_out(patch: Patch) -> None:
    with_objective(patch, kl_coef=0.0)


def kl_counted_thrice(patch: Patch) -> None:
    in_token_loss(
        patch, lambda right, *a, **r: right(*a[:-1], replace(a[-1], kl_coef=3 * a[-1].kl_coef), **r)
    )


def entropy_left_out(patch: Patch) -> None:
    with_objective(patch, entropy_coef=0.0)


def entropy_with_the_kl_coefficient(patch: Patch) -> None:
    """The coefficient of the KL weighs the entropy, and the KL has none."""
    right: Any = losses.__dict__["_total"]

    def wrong(policy_K: Tensor, kl_K: Any, entropy_K: Any, objective: Objective) -> Tensor:
        if kl_K is None or entropy_K is None:
            found: Tensor = right(policy_K, kl_K, entropy_K, objective)
            return found
        return policy_K + objective.entropy_coef * kl_K - objective.kl_coef * entropy_K

    patch.setattr(losses, "_total", wrong)


def policy_loss_halved_in_the_sum(patch: Patch) -> None:
    right: Any = losses.__dict__["_total"]
    patch.setattr(losses, "_total", lambda p, *rest: right(0.5 * p, *rest))


def kl_reversed(patch: Patch) -> None:
    right: Any = losses.kl_estimate
    patch.setattr(losses, "kl_estimate", lambda p, q, o: right(q, p, o))


def kl_squared(patch: Patch) -> None:
    right: Any = losses.kl_estimate
    patch.setattr(losses, "kl_estimate", lambda p, q, o: right(p, q, replace(o, kl_estimator="k2")))


def kl_clamped(patch: Patch) -> None:
    right: Any = losses.kl_estimate
    patch.setattr(losses, "kl_estimate", lambda *args: right(*args).clamp(max=0.05))


def kl_times_the_ratio(patch: Patch) -> None:
    with_objective(patch, kl_bias_correction=True)


def reference_in_float16(patch: Patch) -> None:
    right: Any = losses.kl_estimate
    patch.setattr(losses, "kl_estimate", lambda p, q, o: right(p, q.half().to(q.dtype), o))


# ratio and clip


def ratio_clamped(patch: Patch) -> None:
    with_objective(patch, log_ratio_min=-0.1, log_ratio_max=0.1)


def ratio_of_the_reference(patch: Patch) -> None:
    def wrong(right: Any, log_probs: Tensor, old: Tensor, *args: Any, **rest: Any) -> Any:
        return right(log_probs, rest["ref_log_probs_K"], *args, **rest)

    in_token_loss(patch, wrong)


def ratio_of_one_token_doubled(patch: Patch) -> None:
    right: Any = losses.importance_ratio

    def wrong(*args: Any) -> Tensor:
        ratio: Tensor = right(*args)
        factor = torch.ones_like(ratio)
        factor[len(ratio) // 2] = 2.0
        return ratio * factor

    patch.setattr(losses, "importance_ratio", wrong)


def upper_bound_tighter(patch: Patch) -> None:
    right: Any = ObjectiveFields.clip_range.fget  # type: ignore[attr-defined]  # a property, read from its class
    patch.setattr(ObjectiveFields, "clip_range", property(lambda o: (right(o)[0], 1 + (right(o)[1] - 1) / 2)))


def lower_bound_off(patch: Patch) -> None:
    right: Any = ObjectiveFields.clip_range.fget  # type: ignore[attr-defined]  # a property, read from its class
    patch.setattr(ObjectiveFields, "clip_range", property(lambda o: (0.0, right(o)[1])))


def negative_advantages_halved(patch: Patch) -> None:
    def wrong(right: Any, lp: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        found: Tensor = right(lp, ratio, torch.where(adv < 0, adv / 2, adv), objective)
        return found

    in_policy_loss(patch, wrong)


def advantage_magnitude(patch: Patch) -> None:
    def wrong(right: Any, lp: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        found: Tensor = right(lp, ratio, adv.abs(), objective)
        return found

    in_policy_loss(patch, wrong)


def ratio_added_noise(patch: Patch) -> None:
    """Nothing explains this: silence, or the place alone."""

    def wrong(right: Any, lp: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        noise = torch.sin(1e3 * lp.detach()) * 0.01
        found: Tensor = right(lp, ratio, adv, objective) + noise
        return found

    in_policy_loss(patch, wrong)


# log-probs and entropies


def in_log_probs(patch: Patch, change: Callable[..., Any]) -> None:
    right: Any = policy.token_log_probs
    patch.setattr(policy, "token_log_probs", lambda *args, **rest: change(right, *args, **rest))


def logits_in_float16(patch: Patch) -> None:
    in_log_probs(patch, lambda right, z, *a, **r: right(z.half().to(z.dtype), *a, **r))


def temperature_twice(patch: Patch) -> None:
    in_log_probs(patch, lambda right, *a, temperature, **r: right(*a, temperature=temperature**2, **r))


def logits_capped(patch: Patch) -> None:
    in_log_probs(patch, lambda right, z, *a, **r: right(2.0 * torch.tanh(z / 2.0), *a, **r))


def log_probs_floored(patch: Patch) -> None:
    def wrong(right: Any, *args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return replace(found, log_probs=found.log_probs.clamp(min=-1.0))

    in_log_probs(patch, wrong)


def labels_smoothed(patch: Patch) -> None:
    def wrong(right: Any, z: Tensor, targets: Tensor, *, temperature: float = 1.0, **rest: Any) -> Any:
        found = right(z, targets, temperature=temperature, **rest)
        mean = torch.log_softmax(z / temperature, -1).mean(-1)
        return replace(found, log_probs=0.9 * found.log_probs + 0.1 * mean)

    in_log_probs(patch, wrong)


def entropy_in_bits(patch: Patch) -> None:
    def wrong(right: Any, *args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return found if found.entropy is None else replace(found, entropy=found.entropy / 0.6931471805599453)

    in_log_probs(patch, wrong)


# the way back


def entropy_gradient_not_centred(patch: Patch) -> None:
    def wrong(right: Any, z: Tensor, targets: Tensor, stats: Any, g: Tensor, h: Any, t: float, c: int) -> Any:
        out = right(z, targets, stats, g, None, t, c)
        if h is None:
            return out
        log_p = torch.log_softmax(z / t, -1)
        return out - (h[..., None] / t) * log_p.exp() * log_p

    in_logits_gradient(patch, wrong)


def target_gradient_doubled(patch: Patch) -> None:
    def wrong(right: Any, z: Tensor, targets: Tensor, stats: Any, g: Tensor, h: Any, t: float, c: int) -> Any:
        out = right(z, targets, stats, g, h, t, c)
        rows = torch.arange(targets.numel())
        out.view(targets.numel(), -1)[rows, targets.reshape(-1)] += g.reshape(-1) / t
        return out

    in_logits_gradient(patch, wrong)


def kl_gradient_halved(patch: Patch) -> None:
    right: Any = losses.kl_estimate

    def wrong(*args: Any) -> Tensor:
        value = right(*args)
        return valued(value, 0.5 * value)

    patch.setattr(losses, "kl_estimate", wrong)


def policy_gradient_doubled(patch: Patch) -> None:
    def wrong(right: Any, *args: Any) -> Tensor:
        value = right(*args)
        return valued(value, 2.0 * value)

    in_policy_loss(patch, wrong)


def last_microbatch_halved(patch: Patch) -> None:
    before_backward(patch, lambda share, number: share * (0.5 if number == 2 else 1.0))


# advantages and weights


def baseline_of_the_batch(patch: Patch) -> None:
    right: Any = estimators.group_statistics

    def wrong(rewards: Tensor, groups: Tensor, ddof: int) -> Any:
        found = right(rewards, groups, ddof)
        return replace(found, mean=torch.full_like(found.mean, float(rewards.mean())))

    patch.setattr(estimators, "group_statistics", wrong)


def advantages_shuffled(patch: Patch) -> None:
    right: Any = trainer.token_advantages

    def wrong(rewards: Tensor, *args: Any) -> Any:
        return right(rewards.flip(0), *args)

    patch.setattr(trainer, "token_advantages", wrong)


def advantages_capped(patch: Patch) -> None:
    right: Any = trainer.token_advantages
    patch.setattr(trainer, "token_advantages", lambda *args: right(*args).clamp(-0.5, 0.5))


def rewards_in_bfloat16(patch: Patch) -> None:
    right: Any = trainer.token_advantages
    patch.setattr(
        trainer, "token_advantages", lambda rewards, *args: right(rewards.bfloat16().to(rewards.dtype), *args)
    )


def token_mean_for_sample_mean(patch: Patch) -> None:
    right: Any = trainer.weigh
    patch.setattr(
        trainer, "weigh", lambda t, p, o, **r: right(t, p, replace(o, aggregation="token-mean"), **r)
    )


def weights_of_a_sum(patch: Patch) -> None:
    right: Any = trainer.weigh
    patch.setattr(trainer, "weigh", lambda *args, **rest: torch.ones_like(right(*args, **rest)))


def first_token_unmasked(patch: Patch) -> None:
    """The loss mask begins one token too late."""

    def wrong(_: Trainer, samples: Sequence[Any]) -> list[list[int]]:
        return [[0, *t.loss_mask[:-1]] for t in samples]

    patch.setattr(Trainer, "loss_masks", wrong)


# the model


def attention_of_layer_0_sharper(run: Run) -> None:
    run.trainer.policy.model.model.layers[0].self_attn.scaling *= 1.5


def residual_of_layer_1_halved(run: Run) -> None:
    def wrong(module: Any, args: Any, out: Tensor) -> Tensor:
        return args[0] + 0.5 * (out - args[0])

    run.trainer.policy.model.model.layers[1].register_forward_hook(wrong, prepend=True)


def one_weight_changed(run: Run) -> None:
    with torch.no_grad():
        run.trainer.policy.model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.5


def mlp_gradient_detached(run: Run) -> None:
    """Nothing goes back through the MLP of layer 0."""
    run.trainer.policy.model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, out: out.detach(), prepend=True
    )


def one_gradient_with_noise(run: Run) -> None:
    weight = run.trainer.policy.model.model.layers[0].mlp.gate_proj.weight
    weight.register_hook(lambda gradient: gradient + 1e-3 * torch.sin(1e3 * gradient))


# accumulation and the optimizer


def gradients_not_dropped(patch: Patch) -> None:
    patch.setattr(LocalPolicy, "zero_grad", lambda self: None)


def first_microbatch_dropped(patch: Patch) -> None:
    done: list[int] = []

    def drop(self: LocalPolicy, last: bool) -> None:
        if not done:
            self.model.zero_grad(set_to_none=True)
        done.append(1)
        if last:
            done.clear()

    after_each_backward(patch, drop)


def mean_so_far(patch: Patch) -> None:
    """The buffer is halved after each microbatch: an average in place of a sum."""

    def halve(self: LocalPolicy, last: bool) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2

    after_each_backward(patch, halve)


def decay_in_the_gradient(patch: Patch) -> None:
    """Weight decay is added to the clipped gradient (Adam in place of AdamW)."""
    right: Any = build.adamw

    def wrong(*args: Any, weight_decay: float = 0.0, **rest: Any) -> Any:
        found = right(*args, weight_decay=0.0, **rest)

        def coupled(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.add_(parameter.detach(), alpha=weight_decay)

        found.register_step_pre_hook(coupled)
        return found

    patch.setattr(build, "adamw", wrong)


def decay_before_the_clip(patch: Patch) -> None:
    """L2 regularization: the gradient that is recorded holds the parameters."""
    right: Any = taps.gradients

    def wrong(self: LocalPolicy, *args: Any) -> Any:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=0.01)
        return right(self, *args)

    patch.setattr(taps, "gradients", wrong)


def norm_of_squares(patch: Patch) -> None:
    right: Any = LocalPolicy._total_norm
    patch.setattr(LocalPolicy, "_total_norm", lambda self, norms: right(self, norms) ** 2)


def second_beta_off(patch: Patch) -> None:
    right: Any = build.adamw
    patch.setattr(build, "adamw", lambda *a, **r: right(*a, **{**r, "betas": (0.9, 0.95)}))


def first_beta_off(patch: Patch) -> None:
    right: Any = build.adamw
    patch.setattr(build, "adamw", lambda *a, **r: right(*a, **{**r, "betas": (0.8, 0.999)}))


def moments_dropped(patch: Patch) -> None:
    right: Any = optim.update

    def wrong(optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
        right(optimizer)

    patch.setattr(optim, "update", wrong)


def update_made_twice(patch: Patch) -> None:
    right: Any = optim.update

    def wrong(optimizer: Any) -> None:
        right(optimizer)
        right(optimizer)

    patch.setattr(optim, "update", wrong)


def rate_doubled(patch: Patch) -> None:
    right: Any = build.adamw
    patch.setattr(build, "adamw", lambda named, rate, **rest: right(named, 2 * rate, **rest))


def parameters_in_float32(patch: Patch) -> None:
    right: Any = optim.update

    def wrong(optimizer: Any) -> None:
        right(optimizer)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.float())

    patch.setattr(optim, "update", wrong)


def samples_rotated(patch: Patch) -> None:
    """Old log-probs are those of the next sample of the batch."""
    right: Any = TokenBatch.sampler_log_probs

    def wrong(self: TokenBatch, dtype: torch.dtype) -> Any:
        found = right(self, dtype)
        return None if found is None else found.roll(3)

    patch.setattr(TokenBatch, "sampler_log_probs", wrong)


CHANGES = (
    Change(kl_left_out, "dense", ("term-not-computed", "term-left-out")),
    Change(kl_counted_thrice, "dense", ("coefficient",)),
    Change(entropy_left_out, "dr_grpo", ("term-left-out",)),
    Change(entropy_with_the_kl_coefficient, "dense", ("coefficients-exchanged",)),
    Change(policy_loss_halved_in_the_sum, "dense", ("token-loss",)),
    Change(kl_reversed, "dense", ("kl-direction",)),
    Change(kl_squared, "gpt2", ("kl-estimator",)),
    Change(kl_clamped, "dense", ("kl",)),
    Change(kl_times_the_ratio, "dense", ("kl",)),
    Change(reference_in_float16, "dense", ("ratio-dtype", "kl")),
    Change(ratio_clamped, "dense", ("ratio",)),
    Change(ratio_of_the_reference, "dense", ("old-log-probs", "ratio")),
    Change(ratio_of_one_token_doubled, "dense", ("ratio",)),
    Change(upper_bound_tighter, "dense", ("clip-bound", "clip-range")),
    Change(lower_bound_off, "dense", ("clip-range", "clip-bound")),
    Change(negative_advantages_halved, "dense", ("one-sign", "policy-loss")),
    Change(advantage_magnitude, "dr_grpo", ("one-sign", "policy-loss")),
    Change(ratio_added_noise, "dense", ("policy-loss",)),
    Change(logits_in_float16, "dense", ("softmax-dtype", "log-softmax")),
    Change(temperature_twice, "dr_grpo", ("temperature",)),
    Change(logits_capped, "dense", ("log-softmax",)),
    Change(log_probs_floored, "dense", ("log-softmax",)),
    Change(labels_smoothed, "dense", ("log-softmax",)),
    Change(entropy_in_bits, "dr_grpo", ("logarithm",)),
    Change(entropy_gradient_not_centred, "dr_grpo", ("entropy-backward",)),
    Change(target_gradient_doubled, "dense", ("log-softmax-backward",)),
    Change(kl_gradient_halved, "dense", ("kl-gradient",)),
    Change(policy_gradient_doubled, "dense", ("policy-gradient-scale",)),
    Change(last_microbatch_halved, "dense", ("token-gradient-denominators", "token-gradient-power-of-two")),
    Change(baseline_of_the_batch, "dense", ("advantage-groups", "advantage-offset")),
    Change(advantages_shuffled, "dense", ("order-not-restored", "advantage-groups")),
    Change(advantages_capped, "dense", ("advantage-groups",)),
    Change(rewards_in_bfloat16, "dense", ("advantage-dtype", "advantage-epsilon")),
    Change(token_mean_for_sample_mean, "dense", ("weights-denominator", "mean-of-means")),
    Change(weights_of_a_sum, "dense", ("weights-denominator",)),
    Change(first_token_unmasked, "dense", ("mask-shifted", "loss-mask", "last-token-masked")),
    Change(attention_of_layer_0_sharper, "dense", ("module",)),
    Change(residual_of_layer_1_halved, "dense", ("module",)),
    Change(one_weight_changed, "dense", ("module",)),
    Change(mlp_gradient_detached, "dense", ("gradient-zero", "gradient-missing", "backward-of-a-module")),
    Change(one_gradient_with_noise, "dense", ("gradient-of-one-tensor",)),
    Change(gradients_not_dropped, "dense", ("gradient-of-the-last-update",), steps=2),
    Change(first_microbatch_dropped, "dense", ("accumulation",)),
    Change(mean_so_far, "dense", ("accumulation",)),
    Change(decay_in_the_gradient, "dense", ("weight-decay-in-the-gradient",)),
    Change(decay_before_the_clip, "dense", ("decay-in-the-gradient",)),
    Change(norm_of_squares, "dense", ("norm",)),
    Change(second_beta_off, "dense", ("betas",)),
    Change(first_beta_off, "dense", ("betas",)),
    Change(moments_dropped, "dense", ("moments-dropped", "state-of-a-rank-unclipped")),
    Change(update_made_twice, "dense", ("step-counter", "update-made-twice")),
    Change(rate_doubled, "dense", ("learning-rate", "update-made-twice")),
    Change(parameters_in_float32, "dense", ("param-dtype",)),
    Change(samples_rotated, "dense", ("order-not-restored", "old-log-probs")),
)
"""All changes, with the rules that may be said first."""
