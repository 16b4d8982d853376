"""Faults at known stages and layers: the first divergence, what it affects and its cause are named.

The stage is to be right for every fault, the tensor too, and so is the pattern of what is affected, where it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regress.compare.diagnosis.first_divergence import Divergence, find_divergence
from regress.compare.diagnosis.probable_cause import Diagnosis, diagnose
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.fault_injection import Inject, injected
from regress.replay.replay_context import run_context_of
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS
from tests.faults import (
    advantages,
    inputs,
    layers,
    loss,
    model,
    normalization,
    optimizer,
    rounding,
    temperature,
    update,
)
from tests.faults.ranks import data, pipeline, state, sums, tensor
from tests.faults.registry import installed
from tests.faults.trials.trial import scheduled, variant_named

GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class Case:
    """A fault and what is to be said of it.

    Attributes:
        first: quantity and tensor.
        patterns: ids of patterns that must be found.
        rule: that must be among the diagnoses; empty if no more than the place can be known.
        steps: replayed steps; None for all, where the first one does not show it.
    """

    inject: Inject
    variant: str
    case: str
    first: str
    patterns: Collection[str] = ()
    rule: str = ""
    steps: int | None = 1

    @property
    def name(self) -> str:
        return f"{self.inject.__name__}-{self.case}-{self.variant}"


BEHIND = ("class:packed_behind",)
CASES = (
    Case(layers.attention_scale_of_layer_1, "mbs4", "dense", "activations model.layers.1", (), "module"),
    Case(layers.backward_of_layer_0, "mbs4", "dense", "gradient model.layers.0.mlp.down_proj.weight", (), ""),
    Case(
        temperature.temperature_ignored,
        "mbs4",
        "dr_grpo",
        "log_probs log_probs",
        ("tempered",),
        "temperature",
    ),
    Case(
        inputs.columns_as_positions,
        "packed-dynamic",
        "gpt2",
        "batch_inputs position_ids",
        (*BEHIND, "columns"),
        "position-columns",
    ),
    Case(
        optimizer.no_weight_decay,
        "mbs4",
        "dense",
        "param model.embed_tokens.weight",
        ("formula",),
        "weight-decay",
    ),
    Case(
        update.divided_twice,
        "mbs4",
        "dense",
        "gradient lm_head.weight",
        ("scaled:micros",),
        "gradient-divided-by-microbatches",
    ),
    Case(layers.norm_epsilon_of_layer_0, "mbs4", "dense", "activations model.layers.0", (), "module"),
    Case(layers.norm_epsilon_of_layer_1, "mbs4", "dense", "activations model.layers.1", (), "module"),
    Case(layers.final_norm_epsilon, "mbs4", "dense", "activations model.norm"),
    Case(
        layers.embeddings_doubled, "mbs4", "dense", "activations model.embed_tokens", ("scaled:power_of_two",)
    ),
    Case(layers.logits_scaled, "mbs4", "dense", "activations lm_head", ("scaled",), "output-projection"),
    Case(layers.last_rows_of_a_batch_dropped_from_layer_1, "mbs4", "dense", "activations model.layers.1"),
    Case(
        layers.gradient_of_one_weight,
        "mbs4",
        "dense",
        "gradient model.layers.1.mlp.up_proj.weight",
        ("scaled:power_of_two",),
        "gradient-of-one-tensor",  # the factor of one tensor is not a loss scale
    ),
    Case(layers.gradients_of_norms, "mbs4", "dense", "gradient model.norm.weight", ("names:norms",), ""),
    Case(
        inputs.positions_ignored,
        "packed-dynamic",
        "gpt2",
        "activations transformer.wpe",
        BEHIND,
        "positions-not-passed",
    ),
    Case(inputs.causal_only, "packed-mbs3", "dense", "activations model.layers.0", BEHIND, "packed-leak"),
    Case(
        inputs.positions_ignored,
        "left",
        "gpt2",
        "activations transformer.wpe",
        ("class:behind_padding",),
        "positions-not-passed",
    ),
    Case(inputs.one_segment, "varlen", "dense", "activations model.layers.0", BEHIND, "packed-leak"),
    Case(
        inputs.state_handed_on,
        "packed",
        "hybrid",
        "activations model.layers.0",
        BEHIND,
        "state-across-samples",
    ),
    Case(inputs.causal_only, "packed", "hybrid", "activations model.layers.1", BEHIND, "packed-leak"),
    Case(
        inputs.tool_tokens_in_the_loss,
        "mbs4",
        "tools",
        "batch_inputs response_mask",
        ("class:tool",),
        "tool-tokens",
    ),
    Case(
        advantages.population_deviation,
        "mbs4",
        "dense",
        "advantages advantages",
        ("class:varied", "scaled:ddof"),
        "deviation-ddof",
    ),
    Case(advantages.groups_interleaved, "mbs4", "dense", "advantages advantages", (), "advantage-groups"),
    Case(normalization.mean_of_means, "mbs4", "dapo", "weights weights", ("factors",), "mean-of-means"),
    Case(
        inputs.order_not_restored,
        "reversed",
        "dense",
        "ref_log_probs ref_log_probs",
        ("permuted",),
        "order-not-restored",
    ),
    Case(model.router_not_normalized, "mbs4", "moe", "activations model.layers.0", ("all_tokens",), "router"),
    Case(
        rounding.rotary_in_bfloat16,
        "mbs4",
        "dense",
        "activations model.layers.0",
        ("positions_from",),
        "rotary",
    ),
    Case(model.logits_one_late, "mbs4", "dense", "activations lm_head", ("shifted",), "logits-shifted"),
    Case(
        model.targets_one_early,
        "mbs4",
        "dense",
        "log_probs log_probs",
        ("class:after_other", "formula"),
        "targets-off-by-one",
    ),
    Case(model.old_is_current, "mbs4", "dapo", "old_log_probs old_log_probs", ("equals",), "old-is-current"),
    Case(
        model.reference_is_the_policy,
        "mbs4",
        "dense",
        "ref_log_probs ref_log_probs",
        ("equals",),
        "reference-is-the-policy",
    ),
    Case(
        model.no_sampler_correction,
        "mbs4",
        "cispo",
        "sampler_weights sampler_weights",
        ("formula",),
        "sampler-correction-off",
    ),
    Case(loss.another_estimator, "mbs4", "dense", "kl kl", ("formula",), "kl-estimator"),
    Case(loss.ratio_of_sums, "mbs4", "gspo", "ratio prob_ratio", ("formula",), "ratio-level"),
    Case(loss.clip_sides_swapped, "mbs4", "dapo", "policy_loss policy_loss", ("formula",), "clip-sides"),
    Case(
        loss.minimum_before_the_advantage,
        "mbs4",
        "dense",
        "policy_loss policy_loss",
        ("class:clipped_negative",),
        "minimum-before-advantage",
    ),
    Case(
        loss.entropy_bonus_reversed,
        "mbs4",
        "dr_grpo",
        "token_loss elementwise_loss",
        ("formula",),
        "term-left-out",
    ),
    Case(update.last_microbatch_left_out, "mbs4", "dense", "coverage batch_inputs", (), "batch-left-out"),
    Case(update.only_the_last_survives, "mbs4", "dense", "gradient lm_head.weight", (), "accumulation"),
    Case(
        update.clipping_left_out,
        "mbs4",
        "dense",
        "optimizer model.embed_tokens.weight/exp_avg",
        ("formula",),
        "clip-of-gradients-left-out",
        steps=None,
    ),
    Case(
        optimizer.epsilon_inside_the_correction,
        "mbs4",
        "dense",
        "param model.embed_tokens.weight",
        ("formula",),
        "optimizer-eps",
    ),
    Case(
        optimizer.counter_one_ahead,
        "mbs4",
        "dense",
        "optimizer model.embed_tokens.weight/step",
        ("names:step counters",),
        "step-counter",
    ),
    Case(
        optimizer.learning_rate_off,
        "mbs4",
        "dense",
        "param model.embed_tokens.weight",
        ("fitted",),
        "learning-rate",
    ),
)
"""The first six are run by default."""

Found = tuple[Divergence, list[Diagnosis]]


@pytest.fixture
def found(tmp_path: Path) -> Callable[[Case], Found]:
    """The divergence of a replay with a fault, and its diagnoses."""

    def run(case: Case) -> Found:
        chosen = Replay(GoldenStore(GOLDEN).case(case.case), VARIANTS[case.variant], Precision.FLOAT64)
        with injected(case.inject) as prepare:
            folder = tmp_path / case.name
            steps = None if scheduled(chosen) else case.steps
            dump = replay(chosen.case, chosen.variant, chosen.precision, folder, steps=steps, prepare=prepare)
        plan = [update for update in chosen.plan if steps is None or update.step < steps]
        found = judge_replay(chosen.case, dump, plan, chosen.precision)
        verdicts = [verdict for verdict in found if steps is None or (verdict.place.step or 0) < steps]
        scene = run_context_of(chosen, dump.manifest.provenance.config)
        divergence = find_divergence(verdicts, scene)
        assert divergence is not None, "not caught"
        return divergence, diagnose(divergence, scene)

    return run


def _some(cases: Collection[Case]) -> list[Any]:
    rest = pytest.mark.extended
    return [case if i < 3 else pytest.param(case, marks=rest) for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", _some(CASES), ids=lambda case: case.name)
def test_the_first_divergence_is_named_with_what_it_affects_and_its_cause(
    case: Case, found: Callable[[Case], Found]
) -> None:
    divergence, diagnoses = found(case)
    first = divergence.first
    told = {pattern.id for pattern in divergence.patterns}
    print(f"{case.name}: {divergence}\n{diagnoses[0]}")
    assert f"{first.quantity} {first.name}" == case.first
    assert {*case.patterns} <= told
    assert case.rule in ("", *(diagnosis.rule for diagnosis in diagnoses))
    assert Divergence.from_json(divergence.to_json()) == divergence


def test_at_least_25_faults_have_a_known_place() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 25


RANKS = (
    (
        data.other_weights_on_a_rank,
        "dense",
        "dp2",
        "activations model.embed_tokens",
        "rank",
        "weights-of-a-rank",
    ),
    (sums.averaged_over_ranks, "dense", "tp2-sp", "gradient", "", ""),
    (
        tensor.norms_of_columns_not_summed,
        "dense",
        "tp2-sp",
        "gradient model.norm.weight",
        "names:norms of hidden states",
        "",
    ),
    (state.update_lost_on_a_rank, "dense", "fsdp2", "", "rank", "state-of-a-rank"),
    (
        pipeline.last_microbatch_survives_on_a_stage,
        "dense",
        "pp2-1f1b-packed-mbs3",
        "gradient",
        "mesh:pp",
        "",
    ),
    (state.decay_on_one_rank_only, "dense", "dp2", "param", "rank", ""),
)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("inject", "case", "variant", "first", "pattern", "rule"),
    RANKS,
    ids=lambda part: getattr(part, "__name__", None),
)
def test_ranks_are_named(
    inject: Inject, case: str, variant: str, first: str, pattern: str, rule: str, tmp_path: Path
) -> None:
    chosen = Replay(GoldenStore(GOLDEN).case(case), variant_named(variant), Precision.FLOAT64)
    dump = replay(
        chosen.case,
        chosen.variant,
        chosen.precision,
        tmp_path / "r",
        steps=1,
        around=partial(installed, inject.__name__),
    )
    plan = [one for one in chosen.plan if one.step == 0]
    judged = judge_replay(chosen.case, dump, plan, chosen.precision)
    verdicts = [verdict for verdict in judged if verdict.place.step == 0]
    scene = run_context_of(chosen, dump.manifest.provenance.config)
    divergence = find_divergence(verdicts, scene)
    assert divergence is not None
    told = diagnose(divergence, scene)
    print(f"{divergence}\n{told[0]}")
    assert f"{divergence.first.quantity} {divergence.first.name}".startswith(first)
    assert not pattern or divergence.pattern(pattern) is not None
    assert rule in ("", *(diagnosis.rule for diagnosis in told))
