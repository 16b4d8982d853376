"""Faults at known stages and layers: the first divergence, what it affects and its cause are named.

The stage is to be right for every fault, the tensor too, and so is the pattern of what is affected, where it has one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from regress.compare.diagnosis.causes import Diagnosis, diagnose
from regress.compare.diagnosis.divergence import Divergence, find_divergence
from regress.engine.build import Run
from regress.faults import inputs, loss, model, update
from regress.faults.patch import Fault as Injected
from regress.golden.store import GoldenStore
from regress.replay.judge import judge_replay
from regress.replay.matrix import Replay
from regress.replay.run import replay
from regress.replay.run_context import run_context_of
from regress.replay.variants import VARIANTS, Precision

sys.path.insert(0, str(Path(__file__).parent))
import layout_faults as bugs  # by the name under which the ranks import it
from test_layout_faults import variant_named

GOLDEN = Path(__file__).parents[2] / "golden"


# faults of one layer


def attention_scale_of_layer_1(run: Run) -> None:
    run.trainer.policy.model.model.layers[1].self_attn.scaling *= 1.01


def norm_epsilon_of_layer_0(run: Run) -> None:
    run.trainer.policy.model.model.layers[0].post_attention_layernorm.variance_epsilon = 1e-5


def norm_epsilon_of_layer_1(run: Run) -> None:
    run.trainer.policy.model.model.layers[1].input_layernorm.variance_epsilon = 1e-5


def final_norm_epsilon(run: Run) -> None:
    run.trainer.policy.model.model.norm.variance_epsilon = 1e-5


def embeddings_doubled(run: Run) -> None:
    run.trainer.policy.model.model.embed_tokens.register_forward_hook(
        lambda module, args, out: out * 2, prepend=True
    )


def logits_scaled(run: Run) -> None:
    run.trainer.policy.model.lm_head.register_forward_hook(lambda module, args, out: out * 1.5, prepend=True)


def last_rows_of_a_batch_dropped_from_layer_1(run: Run) -> None:
    """The output of a layer at the last position of each row is that of the position before."""

    def wrong(module: Any, args: Any, out: Tensor) -> Tensor:
        changed = out.clone()
        changed[:, -1] = out[:, -2]
        return changed

    run.trainer.policy.model.model.layers[1].register_forward_hook(wrong, prepend=True)


def gradient_of_one_weight(run: Run) -> None:
    weight = run.trainer.policy.model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient: 2 * gradient)


def backward_of_layer_0(run: Run) -> None:
    """The gradient that enters layer 0 from above is halved: its own parameters and the embeddings see it."""

    def halved(module: Any, args: Any, out: Tensor) -> None:
        out.register_hook(lambda gradient: gradient / 2)

    run.trainer.policy.model.model.layers[0].register_forward_hook(halved)


def gradients_of_norms(run: Run) -> None:
    for name, parameter in run.trainer.policy.named_parameters():
        if "norm" in name:
            parameter.register_hook(lambda gradient: 2 * gradient)


@dataclass(frozen=True)
class Case:
    """A fault and what is to be said of it.

    Attributes:
        first: quantity and tensor.
        patterns: ids of patterns that must be found.
        rule: that must be among the diagnoses; empty if no more than the place can be known.
    """

    fault: Injected
    case: str
    first: str
    patterns: Collection[str] = ()
    rule: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault.inject.__name__}-{self.case}-{self.fault.variant}"


def code(inject: Any, variant: str = "mbs4") -> Injected:
    return Injected(inject, variant=variant)


def of_run(inject: Any, variant: str = "mbs4") -> Injected:
    return Injected(run=inject, variant=variant)


BEHIND = ("class:packed_behind",)
CASES = (
    Case(of_run(attention_scale_of_layer_1), "dense", "activations model.layers.1", (), "module"),
    Case(of_run(backward_of_layer_0), "dense", "gradient model.layers.0.mlp.down_proj.weight", (), ""),
    Case(code(model.temperature_ignored), "dr_grpo", "log_probs log_probs", ("tempered",), "temperature"),
    Case(
        code(inputs.columns_as_positions, "packed-dynamic"),
        "gpt2",
        "batch_inputs position_ids",
        (*BEHIND, "columns"),
        "position-columns",
    ),
    Case(
        code(update.no_weight_decay), "dense", "param model.embed_tokens.weight", ("formula",), "weight-decay"
    ),
    Case(
        code(update.divided_twice),
        "dense",
        "gradient lm_head.weight",
        ("scaled:micros",),
        "gradient-divided-by-microbatches",
    ),
    Case(of_run(norm_epsilon_of_layer_0), "dense", "activations model.layers.0", (), "module"),
    Case(of_run(norm_epsilon_of_layer_1), "dense", "activations model.layers.1", (), "module"),
    Case(of_run(final_norm_epsilon), "dense", "activations model.norm"),
    Case(of_run(embeddings_doubled), "dense", "activations model.embed_tokens", ("scaled:power_of_two",)),
    Case(of_run(logits_scaled), "dense", "activations lm_head", ("scaled",), "output-projection"),
    Case(of_run(last_rows_of_a_batch_dropped_from_layer_1), "dense", "activations model.layers.1"),
    Case(
        of_run(gradient_of_one_weight),
        "dense",
        "gradient model.layers.1.mlp.up_proj.weight",
        ("scaled:power_of_two",),
        "gradient-of-one-tensor",  # the factor of one tensor is no loss scale
    ),
    Case(of_run(gradients_of_norms), "dense", "gradient model.norm.weight", ("names:norms",), ""),
    Case(
        code(inputs.positions_ignored, "packed-dynamic"),
        "gpt2",
        "activations transformer.wpe",
        BEHIND,
        "positions-not-passed",
    ),
    Case(
        code(inputs.causal_only, "packed-mbs3"), "dense", "activations model.layers.0", BEHIND, "packed-leak"
    ),
    Case(
        code(inputs.positions_ignored, "left"),
        "gpt2",
        "activations transformer.wpe",
        ("class:behind_padding",),
        "positions-not-passed",
    ),
    Case(code(inputs.one_segment, "varlen"), "dense", "activations model.layers.0", BEHIND, "packed-leak"),
    Case(
        code(inputs.tool_tokens_in_the_loss),
        "tools",
        "batch_inputs response_mask",
        ("class:tool",),
        "tool-tokens",
    ),
    Case(
        code(inputs.population_deviation),
        "dense",
        "advantages advantages",
        ("class:varied", "scaled:ddof"),
        "deviation-ddof",
    ),
    Case(code(inputs.groups_interleaved), "dense", "advantages advantages", (), "advantage-groups"),
    Case(code(inputs.mean_of_means), "dapo", "weights weights", ("factors",), "mean-of-means"),
    Case(
        code(inputs.order_not_restored, "reversed"),
        "dense",
        "ref_log_probs ref_log_probs",
        ("permuted",),
        "order-not-restored",
    ),
    Case(of_run(model.router_not_normalized), "moe", "activations model.layers.0", ("all_tokens",), "router"),
    Case(
        of_run(model.rotary_in_bfloat16), "dense", "activations model.layers.0", ("positions_from",), "rotary"
    ),
    Case(code(model.logits_one_late), "dense", "activations lm_head", ("shifted",), "logits-shifted"),
    Case(
        code(model.targets_one_early),
        "dense",
        "log_probs log_probs",
        ("class:after_other", "formula"),
        "targets-off-by-one",
    ),
    Case(code(model.old_is_current), "dapo", "old_log_probs old_log_probs", ("equals",), "old-is-current"),
    Case(
        code(model.reference_is_the_policy),
        "dense",
        "ref_log_probs ref_log_probs",
        ("equals",),
        "reference-is-the-policy",
    ),
    Case(
        code(model.no_sampler_correction),
        "cispo",
        "sampler_weights sampler_weights",
        ("formula",),
        "sampler-correction-off",
    ),
    Case(code(loss.another_estimator), "dense", "kl kl", ("formula",), "kl-estimator"),
    Case(code(loss.ratio_of_sums), "gspo", "ratio prob_ratio", ("formula",), "ratio-level"),
    Case(code(loss.clip_sides_swapped), "dapo", "policy_loss policy_loss", ("formula",), "clip-sides"),
    Case(
        code(loss.minimum_before_the_advantage),
        "dense",
        "policy_loss policy_loss",
        ("class:clipped_negative",),
        "minimum-before-advantage",
    ),
    Case(
        code(loss.entropy_bonus_reversed),
        "dr_grpo",
        "token_loss elementwise_loss",
        ("formula",),
        "term-left-out",
    ),
    Case(code(update.last_microbatch_left_out), "dense", "coverage batch_inputs", (), "batch-left-out"),
    Case(code(update.only_the_last_survives), "dense", "gradient lm_head.weight", (), "accumulation"),
    Case(
        code(update.clipping_left_out),
        "dense",
        "optimizer model.embed_tokens.weight/exp_avg",
        ("formula",),
        "clip-of-gradients-left-out",
    ),
    Case(
        code(update.epsilon_inside_the_correction),
        "dense",
        "param model.embed_tokens.weight",
        ("formula",),
        "optimizer-eps",
    ),
    Case(
        of_run(update.counter_one_ahead),
        "dense",
        "optimizer model.embed_tokens.weight/step",
        ("names:step counters",),
        "step-counter",
    ),
    Case(
        code(update.learning_rate_off),
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
        chosen = Replay(GoldenStore(GOLDEN).case(case.case), VARIANTS[case.fault.variant], Precision.FLOAT64)
        with case.fault.injected() as prepare:
            folder = tmp_path / case.name
            dump = replay(chosen.case, chosen.variant, chosen.precision, folder, prepare=prepare)
        verdicts = judge_replay(chosen.case, dump, chosen.plan, chosen.precision)
        scene = run_context_of(chosen, dump.manifest.provenance.config)
        divergence = find_divergence(verdicts, scene)
        assert divergence is not None, "not caught"
        return divergence, diagnose(divergence, scene)

    return run


def _some(cases: Collection[Case]) -> list[Any]:
    rest = pytest.mark.extended
    return [case if i < 6 else pytest.param(case, marks=rest) for i, case in enumerate(cases)]


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
        bugs.other_weights_on_a_rank,
        "dense",
        "dp2",
        "activations model.embed_tokens",
        "rank",
        "weights-of-a-rank",
    ),
    (bugs.averaged_over_ranks, "dense", "tp2-sp", "gradient", "", ""),
    (
        bugs.norms_of_columns_not_summed,
        "dense",
        "tp2-sp",
        "gradient model.norm.weight",
        "names:norms of hidden states",
        "",
    ),
    (bugs.update_lost_on_a_rank, "dense", "fsdp2", "", "rank", "state-of-a-rank"),
    (bugs.last_microbatch_survives_on_a_stage, "dense", "pp2-1f1b-packed-mbs3", "gradient", "mesh:pp", ""),
    (bugs.decay_on_one_rank_only, "dense", "dp2", "param", "rank", ""),
)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("inject", "case", "variant", "first", "pattern", "rule"),
    RANKS,
    ids=lambda part: getattr(part, "__name__", None),
)
def test_ranks_are_named(
    inject: bugs.Fault, case: str, variant: str, first: str, pattern: str, rule: str, tmp_path: Path
) -> None:
    chosen = Replay(GoldenStore(GOLDEN).case(case), variant_named(variant), Precision.FLOAT64)
    dump = replay(
        chosen.case, chosen.variant, chosen.precision, tmp_path / "r", steps=1, launch=bugs.Broken(inject)
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
