"""Bugs of real training systems, injected into the running engine: each must fail first where it broke first.

Nothing recorded is edited: the engine computes something else, and the golden cases have to notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from regress.compare.verdicts.verdict import Status
from regress.faults.adapter import (
    adapter_in_the_reference,
    adapter_of_one_module_left_out,
    adapter_switched_off,
    base_model_trained,
    dropout_in_training,
    factors_in_bfloat16,
    factors_read_by_columns,
    gradients_of_factors_scaled_again,
    merged_and_applied,
    scaled_by_the_root_of_the_rank,
    scaling_left_out,
    second_factor_frozen,
)
from regress.faults.corpus import CORPUS
from regress.faults.inputs import (
    causal_only,
    columns_as_positions,
    groups_interleaved,
    mean_of_means,
    one_segment,
    order_not_restored,
    population_deviation,
    positions_ignored,
    tool_tokens_in_the_loss,
)
from regress.faults.loss import (
    another_estimator,
    clip_sides_swapped,
    entropy_bonus_reversed,
    minimum_before_the_advantage,
    ratio_of_sums,
)
from regress.faults.model import (
    logits_one_late,
    no_sampler_correction,
    norm_epsilon,
    old_is_current,
    reference_is_the_policy,
    rotary_in_bfloat16,
    router_not_normalized,
    targets_one_early,
    temperature_ignored,
)
from regress.faults.update import (
    clipped_every_microbatch,
    clipping_left_out,
    counter_one_ahead,
    divided_twice,
    epsilon_inside_the_correction,
    last_microbatch_left_out,
    no_weight_decay,
    only_the_last_survives,
)
from regress.replay.variants import VARIANTS, Precision

Patch = pytest.MonkeyPatch
Hit = NDArray[np.bool_]


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
FACTOR_B = "model.layers.0.self_attn.q_proj.lora_B.weight"
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
    Fault(scaling_left_out, "lora", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(scaled_by_the_root_of_the_rank, "lora", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(dropout_in_training, "lora", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(adapter_switched_off, "lora", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(
        adapter_of_one_module_left_out,
        "lora",
        "mbs4",
        "activations model.layers.1",
        hit=all_of,
        probe="log_probs",
    ),
    Fault(merged_and_applied, "lora", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(factors_read_by_columns, "lora", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(factors_in_bfloat16, "lora", "mbs4", LAYER, hit=all_of, probe="log_probs"),
    Fault(adapter_in_the_reference, "lora", "mbs4", "ref_log_probs ref_log_probs", hit=all_of),
    Fault(gradients_of_factors_scaled_again, "lora", "mbs4", f"gradient {FACTOR_B}", UPDATE),
    Fault(second_factor_frozen, "lora", "mbs4", f"optimizer {FACTOR_B}/step", UPDATE),
    Fault(base_model_trained, "lora", "mbs4", "gradient model.layers.0.self_attn.q_proj.weight", UPDATE),
)
OF_A_RUN = [fault.run for fault in CORPUS if fault.run is not None]
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


@pytest.mark.one_in(6)
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


HEALTHY = dict.fromkeys((f.case, f.variant) for f in FAULTS if not VARIANTS[f.variant].applies_to(f.case))
"""Replays of the faults' cases and variants that the matrix does not already prove right without a fault."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("case", "variant"), HEALTHY)
def test_without_a_fault_everything_passes(case: str, variant: str, judge: Callable[..., Any]) -> None:
    assert judge(case, variant).failed == []
