"""Bugs of real training systems, injected into the running engine: each must fail first where it broke first.

Nothing recorded is edited: the engine computes something else, and the golden cases have to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from regress.compare.verdict import Status
from regress.engine import build, optim, policy, step, trainer
from regress.engine.attention import VarlenSegments
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.grpo import advantages, losses
from regress.grpo.objective import Objective
from regress.layout import RankLayout, TokenLayout
from regress.replay.variants import Precision

Patch = pytest.MonkeyPatch
Hit = NDArray[np.bool_]


# what the model reads


def columns_as_positions(patch: Patch) -> None:
    """Position ids that count through the row, samples and padding alike, in the batch that is recorded."""
    project = TokenBatch._project

    def wrong(self: TokenBatch, place: RankLayout, *args: Any) -> Microbatch:
        micro = project(self, place, *args)
        layout = place.tokens
        columns = torch.arange(layout.shape[1]).expand(layout.shape)
        return replace(micro, position_ids=torch.where(torch.from_numpy(layout.attention_mask), columns, 0))

    patch.setattr(TokenBatch, "_project", wrong)


def positions_ignored(patch: Patch) -> None:
    """The same, but the batch is right and the model is given none."""
    run = LocalPolicy._run

    def wrong(self: LocalPolicy, model: PreTrainedModel, micro: Microbatch, *rest: Any) -> Tensor:
        columns = torch.arange(micro.layout.shape[1]).expand(micro.layout.shape)
        return run(self, model, replace(micro, position_ids=columns), *rest)

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
    patch.setattr(
        advantages, "group_statistics", lambda rewards, groups, ddof: statistics(rewards, groups, 0)
    )


def groups_interleaved(patch: Patch) -> None:
    """Samples lie group after group, and are grouped as if they lay prompt after prompt, again and again."""
    right = trainer.token_advantages

    def wrong(rewards: Tensor, groups: Tensor, *args: Any) -> Tensor:
        return right(rewards, torch.arange(len(groups)) % len(groups.unique()), *args)

    patch.setattr(trainer, "token_advantages", wrong)


def mean_of_means(patch: Patch) -> None:
    """A mean over each microbatch, and then the mean of those means."""
    right = trainer.weigh

    def wrong(tokens: LossTokens, micros: Sequence[Microbatch], objective: Objective, **rest: Any) -> Tensor:
        return right(tokens, micros, replace(objective, denominator_scope="microbatch"), **rest)

    patch.setattr(trainer, "weigh", wrong)


def order_not_restored(patch: Patch) -> None:
    """Values of reordered microbatches are laid end to end instead of back in their places."""

    def wrong(self: Trainer, source: LocalPolicy, micros: Sequence[Microbatch], count: int) -> Tensor:
        return torch.cat(source.log_probs(micros))

    patch.setattr(Trainer, "_collected", wrong)


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
    patch.setattr(Microbatch, "targets", property(lambda micro: micro.input_ids.reshape(-1)[micro.local - 1]))


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


def no_sampler_correction(patch: Patch) -> None:
    """The policy that sampled counts as the one that is trained."""
    patch.setattr(losses, "sampler_weights", lambda old, *_: torch.ones_like(old))


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
    patch.setattr(
        losses, "kl_estimate", lambda p, q, objective: right(p, q, replace(objective, kl_estimator="k1"))
    )


def ratio_of_sums(patch: Patch) -> None:
    """The ratio of a sequence as a product over its tokens, not their geometric mean."""
    right = losses.importance_ratio

    def wrong(*args: Any) -> Tensor:
        *rest, objective, across = args
        return right(*rest, replace(objective, importance_level="sequence_product"), across)

    patch.setattr(losses, "importance_ratio", wrong)


def entropy_bonus_reversed(patch: Patch) -> None:
    right = losses.token_loss

    def wrong(*args: Any, **rest: Any) -> losses.TokenLoss:
        *tensors, objective = args
        return right(*tensors, replace(objective, entropy_coef=-objective.entropy_coef), **rest)

    patch.setattr(step, "token_loss", wrong)


# gradients


def last_microbatch_left_out(patch: Patch) -> None:
    right = trainer.train_step

    def wrong(
        model: Any, optimizer: Any, tokens: Any, micros: Sequence[Microbatch], *args: Any, **rest: Any
    ) -> Any:
        return right(model, optimizer, tokens, micros[:-1], *args, **rest)

    patch.setattr(trainer, "train_step", wrong)


def after_each_backward(patch: Patch, change: Callable[[LocalPolicy, bool], None]) -> None:
    """``change(policy, last)`` is called after the backward pass of each microbatch."""
    right = LocalPolicy.forward_backward

    def wrong(self: LocalPolicy, micros: Sequence[Microbatch], loss: Any) -> list[Any]:
        begun: list[Microbatch] = []

        def and_change(micro: Microbatch, out: Any) -> Any:
            if begun:
                change(self, False)
            begun.append(micro)
            return loss(micro, out)

        results = right(self, micros, and_change)
        change(self, True)
        return results

    patch.setattr(LocalPolicy, "forward_backward", wrong)


def only_the_last_survives(patch: Patch) -> None:
    """The gradient buffer is overwritten, not added to."""
    after_each_backward(patch, lambda policy, last: None if last else policy.zero_grad())


def clipped_every_microbatch(patch: Patch) -> None:
    def clip(policy: LocalPolicy, last: bool) -> None:
        nn.utils.clip_grad_norm_(policy.model.parameters(), 0.05)

    after_each_backward(patch, clip)


def divided_twice(patch: Patch) -> None:
    """The weights hold the denominator, and accumulation over three microbatches divides once more."""

    def divide(policy: LocalPolicy, last: bool) -> None:
        for parameter in policy.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3 if last else 1

    after_each_backward(patch, divide)


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
        (number,) = {int(state["step"]) + 1 for state in optimizer.state.values()}
        group["eps"] = eps / (1 - beta2**number) ** 0.5
        optimizer.step()
        group["eps"] = eps

    patch.setattr(optim, "update", wrong)


def counter_one_ahead(run: Run) -> None:
    """A synthetic first step, made to allocate the state, counts."""
    for state in run.trainer.optimizer.state.values():
        state["step"] += 1


# which tokens have to be wrong: [B, T] of a microbatch, of which those in the loss count


def all_of(micro: Any) -> Hit:
    return micro.layout.attention_mask


def behind_another(micro: Any) -> Hit:
    """Tokens of all samples of a packed row but the first."""
    hit = np.zeros(micro.layout.shape, bool)
    for segment in micro.layout.segments:
        hit[segment.row, segment.col :] |= segment.col > 0
    return hit


def behind_padding(micro: Any) -> Hit:
    return np.broadcast_to(~micro.layout.attention_mask[:, :1], micro.layout.shape)


def of_varied_groups(micro: Any) -> Hit:
    """A group of equal rewards has no advantages, whatever they are divided by."""
    return micro.advantages != 0


def after_another_token(micro: Any) -> Hit:
    ids = micro.input_ids
    return np.concatenate([np.zeros((len(ids), 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def above_or_below(low: float, high: float) -> Callable[[Any], Hit]:
    """Tokens that the clip stops at one of its bounds."""
    return lambda m: ((m.ratio > high) & (m.advantages > 0)) | ((m.ratio < low) & (m.advantages < 0))


def clipped_and_disliked(micro: Any) -> Hit:
    return ((micro.ratio < 0.8) | (micro.ratio > 1.2)) & (micro.advantages < 0)


@dataclass(frozen=True)
class Fault:
    """A bug, and how it has to show.

    Attributes:
        inject: breaks the engine, or a run that is about to start.
        case, variant: where it is looked for.
        first: quantity and tensor that fail first.
        place: where they do.
        hit, probe: at which tokens the tensor ``probe`` is beyond its tolerance, and nowhere else.
    """

    inject: Callable[[Any], None]
    case: str
    variant: str
    first: str
    place: str = "step0/rank0/micro0"
    hit: Callable[[Any], Hit] | None = None
    probe: str = ""

    @property
    def name(self) -> str:
        return f"{self.inject.__name__}-{self.case}-{self.variant}"


LAYER = "activations model.layers.0"
EMBEDDED = "model.embed_tokens.weight"
UPDATE = "step0/rank0"
FAULTS = (
    Fault(
        columns_as_positions,
        "gpt2",
        "packed-dynamic",
        "batch_inputs position_ids",
        hit=behind_another,
        probe="log_probs",
    ),
    Fault(
        positions_ignored,
        "gpt2",
        "packed-dynamic",
        "activations transformer.wpe",
        hit=behind_another,
        probe="log_probs",
    ),
    Fault(
        positions_ignored,
        "gpt2",
        "left",
        "activations transformer.wpe",
        hit=behind_padding,
        probe="log_probs",
    ),
    Fault(causal_only, "dense", "packed-mbs3", LAYER, hit=behind_another, probe="log_probs"),
    Fault(causal_only, "dense", "left-mbs3", LAYER, hit=behind_padding, probe="log_probs"),
    Fault(one_segment, "dense", "varlen", LAYER, hit=behind_another, probe="log_probs"),
    Fault(tool_tokens_in_the_loss, "tools", "mbs4", "batch_inputs response_mask"),
    Fault(population_deviation, "dense", "mbs4", "advantages advantages", hit=of_varied_groups),
    Fault(groups_interleaved, "dense", "mbs4", "advantages advantages"),
    Fault(mean_of_means, "dapo", "mbs4", "weights weights", "step0/update0/rank0/micro0", hit=all_of),
    Fault(mean_of_means, "dense", "longest-first", "weights weights", hit=all_of),
    Fault(router_not_normalized, "moe", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(norm_epsilon, "dense", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(rotary_in_bfloat16, "dense", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(logits_one_late, "dense", "mbs4", "activations lm_head", hit=all_of, probe="log_probs"),
    Fault(targets_one_early, "dense", "mbs4", "log_probs log_probs", hit=after_another_token),
    Fault(temperature_ignored, "dr_grpo", "mbs4", "log_probs log_probs", hit=all_of),
    Fault(
        old_is_current,
        "dapo",
        "mbs4",
        "old_log_probs old_log_probs",
        "step0/update1/rank0/micro0",
        hit=all_of,
    ),
    Fault(order_not_restored, "dense", "reversed", "ref_log_probs ref_log_probs"),
    Fault(reference_is_the_policy, "dense", "mbs4", "ref_log_probs ref_log_probs", hit=all_of),
    Fault(another_estimator, "dense", "mbs4", "kl kl", hit=all_of),
    Fault(ratio_of_sums, "gspo", "mbs4", "ratio prob_ratio", hit=all_of),
    Fault(
        no_sampler_correction,
        "cispo",
        "mbs4",
        "sampler_weights sampler_weights",
        "step0/update0/rank0/micro0",
    ),
    Fault(
        clip_sides_swapped,
        "dapo",
        "mbs4",
        "policy_loss policy_loss",
        "step0/update1/rank0/micro0",
        hit=above_or_below(0.8, 1.2),
    ),
    Fault(
        clip_sides_swapped,
        "gspo",
        "mbs4",
        "policy_loss policy_loss",
        "step0/rank0/micro1",
        hit=above_or_below(0.9, 1.1),
    ),
    Fault(minimum_before_the_advantage, "dense", "mbs4", "policy_loss policy_loss", hit=clipped_and_disliked),
    Fault(entropy_bonus_reversed, "dr_grpo", "mbs4", "token_loss elementwise_loss", hit=all_of),
    Fault(last_microbatch_left_out, "dense", "mbs4", "coverage batch_inputs", "step0"),
    Fault(only_the_last_survives, "dense", "mbs4", f"gradient {EMBEDDED}", UPDATE),
    Fault(divided_twice, "dense", "mbs4", f"gradient {EMBEDDED}", UPDATE),
    Fault(clipped_every_microbatch, "dense", "mbs4", f"gradient {EMBEDDED}", UPDATE),
    Fault(clipping_left_out, "dense", "mbs4", f"optimizer {EMBEDDED}/exp_avg", "step2/rank0"),
    Fault(no_weight_decay, "dense", "mbs4", f"param {EMBEDDED}", UPDATE),
    Fault(epsilon_inside_the_correction, "dense", "mbs4", f"param {EMBEDDED}", UPDATE),
    Fault(counter_one_ahead, "dense", "mbs4", f"optimizer {EMBEDDED}/step", UPDATE),
)
OF_A_RUN = (router_not_normalized, norm_epsilon, rotary_in_bfloat16, counter_one_ahead)
"""Faults of a run that was built; the others are faults of the code that builds and drives it."""

NO_FAULT_THERE = (
    (positions_ignored, "dense", "packed-dynamic"),  # rotary: only distances within a sample count
    (positions_ignored, "dense", "left"),
    (causal_only, "dense", "base"),  # nothing lies before a right padded sample
    (mean_of_means, "dense", "mbs4"),  # a mean over samples, of which every microbatch has four
    (clip_sides_swapped, "dense", "mbs4"),  # both sides are 0.2
    (temperature_ignored, "dense", "mbs4"),  # it is 1
)
"""Why the faults above are looked for in those cases and variants."""


def broken(fault: Callable[[Any], None], judge: Any, patch: Patch, *replay: str, **options: Any) -> Any:
    """The verdicts on the replay of a case under a variant, with the fault."""
    if fault in OF_A_RUN:
        return judge(*replay, prepare=fault, **options)
    fault(patch)
    return judge(*replay, **options)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fails_first_where_it_is(
    fault: Fault, judge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = broken(fault.inject, judge, monkeypatch, fault.case, fault.variant)
    assert found.failed, "not caught"
    first = found.first
    assert (f"{first.quantity} {first.name}", str(first.place)) == (fault.first, fault.place)
    if fault.hit is not None:
        hits = [int((fault.hit(micro) & (micro.response_mask != 0)).sum()) for micro in found.micros]
        assert sum(hits) > 0
        expected = {index: count for index, count in enumerate(hits) if count}
        assert found.over(fault.probe or first.name) == expected


def test_tool_tokens_in_the_loss_are_counted(judge: Callable[..., Any], monkeypatch: Patch) -> None:
    tool_tokens_in_the_loss(monkeypatch)
    found = judge("tools", "mbs4")
    samples = {t.key: t for t in found.replay.case.trajectories()[0]}
    expected = {}
    for index, micro in enumerate(found.micros):
        keys = [micro.update.frame.samples[segment.sample] for segment in micro.layout.segments]
        masks = [samples[key].loss_mask[samples[key].prompt_length :] for key in keys]
        expected[index] = sum(mask.count(0) for mask in masks)
    assert found.over("response_mask") == {index: count for index, count in expected.items() if count}


def test_a_microbatch_left_out_is_named_with_its_tokens(
    judge: Callable[..., Any], monkeypatch: Patch
) -> None:
    last_microbatch_left_out(monkeypatch)
    found = judge("dense", "mbs4")
    last = found.micros[-1]
    start = last.update.frame.samples[last.layout.segments[0].sample]
    assert f"sample {start[0]}/{start[1]}, position 0" in found.first.detail
    assert "was produced by no microbatch" in found.first.detail
    assert found.first.over == last.layout.num_tokens
    missing = {str(v.place) for v in found.failed if v.status is Status.MISSING and v.place.step == 0}
    assert missing == {"step0/rank0/micro2"}


@pytest.mark.parametrize(
    "fault", [epsilon_inside_the_correction, norm_epsilon, no_weight_decay, rotary_in_bfloat16]
)
def test_the_smallest_faults_show_in_float32(
    fault: Callable[[Any], None], judge: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured tolerances leave room for rounding, and not for these."""
    found = broken(fault, judge, monkeypatch, "dense", "mbs4", precision=Precision.FLOAT32)
    assert max((verdict.multiple for verdict in found.failed), default=0) > 3


@pytest.mark.parametrize(
    ("inject", "case", "variant"), NO_FAULT_THERE, ids=lambda part: getattr(part, "__name__", part)
)
def test_where_it_changes_nothing_it_is_no_fault(
    inject: Callable[[Any], None], case: str, variant: str, judge: Callable[..., Any], monkeypatch: Patch
) -> None:
    assert broken(inject, judge, monkeypatch, case, variant).failed == []


@pytest.mark.parametrize(("case", "variant"), dict.fromkeys((f.case, f.variant) for f in FAULTS))
def test_without_a_fault_everything_passes(case: str, variant: str, judge: Callable[..., Any]) -> None:
    assert judge(case, variant).failed == []
