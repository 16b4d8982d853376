"""Bugs of real training systems, injected into the running engine: each must fail first where it broke first.

Nothing recorded is edited: the engine computes something else, and the golden cases have to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regress.engine import build, optim, policy, trainer
from regress.engine.attention import VarlenSegments
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.grpo import advantages, losses
from regress.grpo.objective import Objective
from regress.layout import TokenLayout

Patch = pytest.MonkeyPatch
Inject = Callable[[Patch], None]


# what the model reads


def columns_as_positions(patch: Patch) -> None:
    """Position ids that count through the row, samples and padding alike, in the batch that is recorded."""
    project = TokenBatch._project

    def wrong(self: TokenBatch, layout: TokenLayout, *args: Any) -> Microbatch:
        micro = project(self, layout, *args)
        columns = torch.arange(layout.shape[1]).expand(layout.shape)
        return replace(micro, position_ids=torch.where(torch.from_numpy(layout.attention_mask), columns, 0))

    patch.setattr(TokenBatch, "_project", wrong)


def positions_ignored(patch: Patch) -> None:
    """The same, but the batch is right and the model is given none."""
    run = LocalPolicy._run

    def wrong(self: LocalPolicy, micro: Microbatch) -> Tensor:
        columns = torch.arange(micro.layout.shape[1]).expand(micro.layout.shape)
        return run(self, replace(micro, position_ids=columns))

    patch.setattr(LocalPolicy, "_run", wrong)


def causal_only(patch: Patch) -> None:
    """No attention mask but the causal one."""

    def wrong(layout: TokenLayout, implementation: str, *_: Any) -> Tensor:
        assert implementation == "sdpa"
        rows, columns = layout.shape
        return torch.ones(rows, 1, columns, columns, dtype=torch.bool).tril()

    patch.setattr(policy, "block_causal_mask", wrong)


def one_segment(patch: Patch) -> None:
    """``cu_seqlens`` dropped: a packed row is one sequence."""
    of = VarlenSegments.of

    def wrong(layout: TokenLayout, local_index: Tensor) -> VarlenSegments:
        right = of(layout, local_index)
        return VarlenSegments(right.index, (sum(right.lengths),))

    patch.setattr(VarlenSegments, "of", wrong)


def tool_tokens_in_the_loss(patch: Patch) -> None:
    """Everything after the prompt is trained on."""
    patch.setattr(
        Trainer,
        "_loss_masks",
        lambda _, samples: [[0] * t.prompt_length + [1] * (len(t.tokens) - t.prompt_length) for t in samples],
    )


# rewards to advantages, weights


def population_deviation(patch: Patch) -> None:
    """Division by N in place of N - 1."""
    statistics = advantages.group_statistics
    patch.setattr(advantages, "group_statistics", lambda rewards, groups, ddof: statistics(rewards, groups, 0))


def groups_interleaved(patch: Patch) -> None:
    """Samples lie group after group, and are grouped as if they lay prompt after prompt, again and again."""
    right = trainer.token_advantages

    def wrong(rewards: Tensor, groups: Tensor, *args: Any) -> Tensor:
        return right(rewards, torch.arange(len(groups)) % len(groups.unique()), *args)

    patch.setattr(trainer, "token_advantages", wrong)


def denominator_of_the_microbatch(patch: Patch) -> None:
    """A mean over each microbatch, and then the mean of those means."""
    right = trainer.weigh

    def wrong(tokens: LossTokens, micros: Sequence[Microbatch], objective: Objective, **rest: Any) -> Tensor:
        return right(tokens, micros, replace(objective, denominator_scope="microbatch"), **rest)

    patch.setattr(trainer, "weigh", wrong)


def order_not_restored(patch: Patch) -> None:
    """Values of reordered microbatches are laid end to end instead of back in their places."""
    patch.setattr(trainer, "_collect", lambda micros, parts, count: torch.cat(list(parts)))


# the model


def router_not_normalized(run: Run) -> None:
    """Weights of the chosen experts that do not add up to 1."""
    routers = [m for m in run.trainer.policy.model.modules() if getattr(m, "norm_topk_prob", False)]
    assert routers
    for router in routers:
        router.norm_topk_prob = False


def norm_epsilon(run: Run) -> None:
    """1e-5 for 1e-6 in every RMSNorm."""
    norms = [m for m in run.trainer.policy.model.modules() if hasattr(m, "variance_epsilon")]
    assert {norm.variance_epsilon for norm in norms} == {1e-6}
    for norm in norms:
        norm.variance_epsilon = 1e-5


def rotary_in_bfloat16(run: Run) -> None:
    """Rotary frequencies rounded to half precision."""
    buffers = [b for name, b in run.trainer.policy.model.named_buffers() if name.endswith("inv_freq")]
    assert buffers
    for buffer in buffers:
        buffer.copy_(buffer.bfloat16())


def reference_is_the_policy(patch: Patch) -> None:
    patch.setattr(build, "build_reference", lambda *_: None)


# log-probs


def logits_one_late(patch: Patch) -> None:
    """The logits at a token instead of those that predict it."""
    right = policy.logits_at
    patch.setattr(policy, "logits_at", lambda model, index: right(model, index + 1))


def targets_one_early(patch: Patch) -> None:
    """The token before the one that was predicted."""
    patch.setattr(
        Microbatch, "targets", property(lambda micro: micro.input_ids.reshape(-1)[micro.local - 1])
    )


def temperature_ignored(patch: Patch) -> None:
    """Samples are drawn from tempered logits, and scored by plain ones."""
    right = policy.token_log_probs
    patch.setattr(policy, "token_log_probs", lambda *args, temperature, **rest: right(*args, **rest))


def old_is_current(patch: Patch) -> None:
    """Old log-probs recomputed after the first update: every ratio is 1."""
    right = trainer.train_step

    def wrong(model: LocalPolicy, optimizer: Any, tokens: LossTokens, *args: Any, **rest: Any) -> Any:
        return right(model, optimizer, replace(tokens, old_log_probs=None), *args, **rest)

    patch.setattr(trainer, "train_step", wrong)


# the loss


def clip_sides_swapped(patch: Patch) -> None:
    patch.setattr(Objective, "clip_range", property(lambda o: (1.0 - o.clip_high, 1.0 + o.clip_low)))


def minimum_before_the_advantage(patch: Patch) -> None:
    """min(r, clip(r)) A is pessimistic for positive advantages only."""

    def wrong(log_probs: Tensor, ratio: Tensor, adv: Tensor, objective: Objective) -> Tensor:
        return -torch.minimum(ratio, ratio.clamp(*objective.clip_range)) * adv

    patch.setattr(losses, "_policy_loss", wrong)


def another_estimator(patch: Patch) -> None:
    """k1, whose expected gradient is zero, for k3."""
    right = losses.kl_estimate
    patch.setattr(losses, "kl_estimate", lambda p, q, objective: right(p, q, replace(objective, kl_estimator="k1")))


def ratio_of_sums(patch: Patch) -> None:
    """The ratio of a sequence as a product over its tokens, not their geometric mean."""
    right = losses.importance_ratio

    def wrong(*args: Any) -> Tensor:
        *rest, objective = args
        return right(*rest, replace(objective, importance_level="sequence_product"))

    patch.setattr(losses, "importance_ratio", wrong)


def entropy_bonus_reversed(patch: Patch) -> None:
    right = losses.token_loss
    from regress.engine import step

    patch.setattr(
        step,
        "token_loss",
        lambda *args, **rest: right(*args[:5], replace(args[5], entropy_coef=-args[5].entropy_coef), **rest),
    )


# gradients


def last_microbatch_left_out(patch: Patch) -> None:
    right = trainer.train_step

    def wrong(model: Any, optimizer: Any, tokens: Any, micros: Sequence[Microbatch], *args: Any, **rest: Any) -> Any:
        return right(model, optimizer, tokens, micros[:-1], *args, **rest)

    patch.setattr(trainer, "train_step", wrong)


def backward(patch: Patch, after: Callable[[LocalPolicy, int, int], None]) -> None:
    """Something happens to the gradients after each microbatch's backward pass."""
    right = LocalPolicy.forward_backward

    def wrong(self: LocalPolicy, micros: Sequence[Microbatch], loss: Any) -> list[Any]:
        results = []

        def then(micro: Microbatch, out: Any) -> Any:
            if results_so_far := len(results):
                after(self, results_so_far - 1, len(micros))
            results.append(None)
            return loss(micro, out)

        found = right(self, micros, then)
        after(self, len(micros) - 1, len(micros))
        return found

    patch.setattr(LocalPolicy, "forward_backward", wrong)


def only_the_last_survives(patch: Patch) -> None:
    """The gradient buffer is overwritten, not added to."""

    def drop(model: LocalPolicy, index: int, count: int) -> None:
        if index < count - 1:
            model.zero_grad()

    backward(patch, drop)


def clipped_every_microbatch(patch: Patch) -> None:
    backward(patch, lambda model, *_: nn.utils.clip_grad_norm_(model.model.parameters(), 0.05) and None)


def accumulated_twice(patch: Patch) -> None:
    """The weights hold the denominator, and accumulation divides once more."""

    def halve(model: LocalPolicy, index: int, count: int) -> None:
        if index == count - 1:
            for parameter in model.model.parameters():
                parameter.grad /= count

    backward(patch, halve)


def clipping_left_out(patch: Patch) -> None:
    right = LocalPolicy.clip_grad_norm
    patch.setattr(LocalPolicy, "clip_grad_norm", lambda self, _: right(self, None))


# the optimizer


def no_weight_decay(patch: Patch) -> None:
    right = build.adamw
    patch.setattr(build, "adamw", lambda *args, **rest: right(*args, **{**rest, "weight_decay": 0.0}))


def epsilon_inside_the_correction(patch: Patch) -> None:
    """sqrt(v) + eps is divided by the bias correction, not sqrt(v) alone."""

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        eps, (_, beta2) = group["eps"], group["betas"]
        steps = {int(state["step"]) + 1 for state in optimizer.state.values()}
        (number,) = steps
        group["eps"] = eps / (1 - beta2**number) ** 0.5
        optimizer.step()
        group["eps"] = eps

    patch.setattr(optim, "update", wrong)


def counter_one_ahead(run: Run) -> None:
    """A synthetic first step, made to allocate the state, counts."""
    for state in run.trainer.optimizer.state.values():
        state["step"] += 1


@dataclass(frozen=True)
class Fault:
    inject: Inject | Callable[[Run], None]
    case: str
    variant: str
    first: str

FAULTS = [
    Fault(columns_as_positions, "gpt2", "packed-dynamic", "batch_inputs"),
    Fault(positions_ignored, "gpt2", "packed-dynamic", "activations"),
    Fault(positions_ignored, "gpt2", "left", "activations"),
    Fault(causal_only, "dense", "packed", "activations"),
    Fault(causal_only, "dense", "left", "activations"),
    Fault(one_segment, "dense", "varlen", "activations"),
    Fault(tool_tokens_in_the_loss, "tools", "base", "batch_inputs"),
    Fault(population_deviation, "dense", "mbs4", "advantages"),
    Fault(groups_interleaved, "dense", "mbs4", "advantages"),
    Fault(denominator_of_the_microbatch, "dapo", "mbs4", "weights"),
    Fault(denominator_of_the_microbatch, "dense", "longest-first", "weights"),
    Fault(order_not_restored, "dense", "reversed", "ref_log_probs"),
    Fault(router_not_normalized, "moe", "mbs4", "activations"),
    Fault(norm_epsilon, "dense", "mbs4", "activations"),
    Fault(rotary_in_bfloat16, "dense", "mbs4", "activations"),
    Fault(reference_is_the_policy, "dense", "mbs4", "ref_log_probs"),
    Fault(logits_one_late, "dense", "mbs4", "activations"),
    Fault(targets_one_early, "dense", "mbs4", "log_probs"),
    Fault(temperature_ignored, "dr_grpo", "mbs4", "log_probs"),
    Fault(old_is_current, "dapo", "mbs4", "old_log_probs"),
    Fault(clip_sides_swapped, "dapo", "mbs4", "policy_loss"),
    Fault(clip_sides_swapped, "gspo", "mbs4", "policy_loss"),
    Fault(minimum_before_the_advantage, "dense", "mbs4", "policy_loss"),
    Fault(another_estimator, "dense", "mbs4", "kl"),
    Fault(ratio_of_sums, "gspo", "mbs4", "ratio"),
    Fault(entropy_bonus_reversed, "dr_grpo", "mbs4", "token_loss"),
    Fault(last_microbatch_left_out, "dense", "mbs4", "coverage"),
    Fault(only_the_last_survives, "dense", "mbs4", "gradient"),
    Fault(clipped_every_microbatch, "dense", "mbs4", "gradient"),
    Fault(accumulated_twice, "dense", "mbs4", "gradient"),
    Fault(clipping_left_out, "dense", "mbs4", "param"),
    Fault(no_weight_decay, "dense", "mbs4", "param"),
    Fault(epsilon_inside_the_correction, "dense", "mbs4", "param"),
    Fault(counter_one_ahead, "dense", "mbs4", "param"),
]
PREPARED = (router_not_normalized, norm_epsilon, rotary_in_bfloat16, counter_one_ahead)

@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.inject.__name__}-{f.case}-{f.variant}")
def test_fault(fault, judge, monkeypatch):
    from regress.replay.variants import Precision
    import os
    p = Precision(os.environ.get("PREC", "float64"))
    if fault.inject in PREPARED:
        found = judge(fault.case, fault.variant, prepare=fault.inject, precision=p)
    else:
        fault.inject(monkeypatch)
        found = judge(fault.case, fault.variant, precision=p)
    if not found.failed:
        print("NOT CAUGHT"); assert 0
    f = found.first
    print("FIRST", f.quantity, f.name, f.place, f.status, f"{f.multiple:.3g}", f"{f.relative:.3g}", f"{f.over}/{f.count}", f.worst and f.worst.where, f.detail[:80])
    print("ALIKE", [(str(v.place), v.name, f"{v.over}/{v.count}", f"{v.multiple:.2g}") for v in found.alike()][:8], "MAX", max((v.multiple for v in found.failed)))
    print("LOSSTOKENS", [found.loss_tokens(m) for m in range(len(found.replay.plan[0].layouts))])
    assert f.quantity == fault.first
