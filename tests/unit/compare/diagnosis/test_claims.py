"""A claim is no wider than its proof: ranks, weights, exchanges, groups, targets and equal values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.diagnosis.common_patterns import find_patterns
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.diagnosis.failure_extent import rounded_to
from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.group_patterns import of_groups, of_tokens
from regress.compare.diagnosis.hypotheses import Hypothesis
from regress.compare.diagnosis.logit_temperature import log_sum_exp
from regress.compare.diagnosis.probable_cause import diagnose
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.diagnosis.token_attributes import TokenAttributes
from regress.compare.diagnosis.update_hypotheses import UpdateHypotheses
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place

TIGHT = Tolerance(1e-12, reason="a test")
RNG = np.random.default_rng(0)
GOLDEN = RNG.standard_normal((6, 8))
DP = RunContext(world_size=2, micros=1, mesh={"dp": 2})


def judged(
    actual: Any,
    golden: Any = GOLDEN,
    quantity: str = "gradient",
    name: str = "model.layers.0.mlp.up_proj.weight",
    around: FailureContext | None = None,
    **place: Any,
) -> Verdict:
    where = Place(**{"step": 0, "rank": 0, **place})
    actual, golden = np.asarray(actual, float), np.asarray(golden, float)
    found = judge_tensor(actual, golden, TIGHT, quantity=quantity, name=name, place=where)
    context = around or FailureContext()
    return replace(found, affected=context.affected(actual, golden, actual != golden, None, 1e-12))


def held(quantity: str, name: str = "", **place: Any) -> Verdict:
    return judged(GOLDEN, GOLDEN, quantity, name or quantity, **place)


def rules(*verdicts: Verdict, scene: RunContext = DP) -> list[str]:
    found = find_divergence(verdicts, scene)
    assert found is not None
    return [one.rule for one in diagnose(found, scene)]


# ranks


def test_what_is_wrong_on_one_rank_and_right_on_another_is_a_fault_of_the_rank() -> None:
    zero = judged(0 * GOLDEN, rank=1)
    assert rules(held("gradient", zero.name), zero)[0] == "not-reduced"
    both = [judged(0 * GOLDEN, rank=rank) for rank in range(2)]
    assert rules(*both)[0] == "gradient-zero"


def test_a_tensor_of_another_stage_is_no_copy() -> None:
    zero = judged(0 * GOLDEN, rank=1)
    other = held("gradient", "model.layers.1.mlp.up_proj.weight")
    scene = RunContext(world_size=2, mesh={"pp": 2})
    assert rules(other, zero, scene=scene)[0] == "gradient-zero"


@pytest.mark.parametrize(
    ("scene", "told"),
    [
        (RunContext(), True),
        (RunContext(trusted=False), False),
        (RunContext(config={"algorithm": {"kl_coef": 0.1}}), False),
        (RunContext(config={"algorithm": {"kl_coef": 0.1}, "reference": {"path": "base"}}), True),
    ],
    ids=["golden case", "one of two dumps", "starts at the policy", "of other weights"],
)
def test_a_reference_that_is_the_policy_is_wrong_only_where_there_is_another(
    scene: RunContext, told: bool
) -> None:
    """At its first step the policy is the reference of many a trainer, and of two dumps that one may be right."""
    policy = RNG.standard_normal(GOLDEN.shape)
    around = FailureContext(guesses=lambda _: [Hypothesis("equals", policy, {"what": "log_probs"})])
    found = rules(judged(policy, GOLDEN, "ref_log_probs", "ref_log_probs", around), scene=scene)
    assert ("reference-is-the-policy" in found) is told


def test_each_rank_with_the_microbatches_of_its_group_alone() -> None:
    parts = RNG.standard_normal((4, 6, 8))
    golden = parts.sum(axis=0)
    names = [f"microbatch 0 of rank {rank}" for rank in range(4)]
    numbers = {
        "of": {name: [rank, 0] for rank, name in enumerate(names)},
        "holders": {name: [rank] for rank, name in enumerate(names)},
    }

    def on(rank: int, missing: set[int]) -> Verdict:
        wrong = judged(golden - sum(parts[m] for m in missing), golden, rank=rank)
        counts = {names[m]: 0.0 for m in missing}
        assert wrong.affected is not None
        return replace(
            wrong, affected=replace(wrong.affected, held={"microbatches": {**numbers, "counts": counts}})
        )

    halves = [on(rank, {2, 3} if rank < 2 else {0, 1}) for rank in range(4)]
    scene = RunContext(world_size=4, micros=1, mesh={"dp": 2, "fsdp": 2})
    assert rules(*halves, scene=scene)[0] == "reduction"
    overlapping = [on(rank, {(rank + 1) % 4}) for rank in range(4)]
    assert "reduction" not in rules(*overlapping, scene=scene)


def test_parts_of_a_tensor_that_are_added_as_if_they_were_copies() -> None:
    known = UpdateHypotheses({"gradient": {"w": GOLDEN}}, {})
    context = FailureContext(guesses=lambda _: known.of("gradient", "w"))
    added = np.concatenate([GOLDEN[:3] + GOLDEN[3:]] * 2)
    experts = "model.layers.1.mlp.experts.down_proj"
    wrong = judged(added, name=experts, around=context)
    rest = [held("gradient", f"model.layers.{layer}.mlp.gate.weight") for layer in range(2)]
    assert rules(wrong, *rest)[:2] == ["experts-reduced", "parts-added"]
    noise = judged(added + 0.1 * RNG.standard_normal(added.shape), name=experts, around=context)
    assert not {"experts-reduced", "parts-added"} & {*rules(noise, *rest)}


def test_parts_that_add_up_to_nothing_are_no_sum() -> None:
    golden = GOLDEN - GOLDEN.mean(axis=0)
    known = UpdateHypotheses({"gradient": {"w": golden}}, {})
    titles = [str(guess.numbers["what"]) for guess in known.of("gradient", "w")]
    assert [title for title in titles if "parts" in title] == [
        f"the {number} parts of the tensor added up" for number in (2, 3)
    ]
    pairs = np.concatenate([GOLDEN[:3], -GOLDEN[:3]])
    known = UpdateHypotheses({"gradient": {"w": pairs}}, {})
    assert not any("the 2 parts" in str(guess.numbers["what"]) for guess in known.of("gradient", "w"))


@pytest.mark.parametrize(
    ("mesh", "first"),
    [
        ({"tp": 2}, "tensor-exchange"),
        ({"cp": 2}, "context-exchange"),
        ({"tp": 2, "pp": 2}, "module"),
        ({"ep": 2, "cp": 2}, "module"),
        ({"dp": 2}, "module"),
    ],
)
def test_an_exchange_is_claimed_only_where_there_is_one_kind_of_it(mesh: dict[str, int], first: str) -> None:
    wrong = judged(GOLDEN + 1, quantity="activations", name="model.layers.0", micro=0)
    scene = RunContext(world_size=4, mesh=mesh)
    told = rules(wrong, held("batch_inputs", micro=0), scene=scene)
    assert told[0] == first


# weights behind an update


def test_stale_weights_are_claimed_only_behind_parameters_that_hold() -> None:
    wrong = judged(GOLDEN + 1, quantity="activations", name="model.embed_tokens", step=1, micro=0)
    inputs = held("batch_inputs", step=1, micro=0)
    after = held("param", "w", step=0)
    assert rules(wrong, inputs, after)[0] == "stale-weights"
    assert rules(wrong, inputs)[0] == "weights-after-an-update"
    assert rules(wrong, inputs, held("gradient", "w", step=0))[0] == "weights-after-an-update"
    later = [replace(v, place=replace(v.place, step=4)) for v in (wrong, inputs)]
    assert rules(*later, after)[0] == "weights-after-an-update"
    first = [replace(v, place=replace(v.place, step=0)) for v in (wrong, inputs)]
    assert not {"stale-weights", "weights-after-an-update"} & {*rules(*first)}


# equal values


@settings(max_examples=40, derandomize=True, deadline=None)
@given(size=st.floats(0.1, 10.0), count=st.integers(8, 40))
def test_equal_values_that_were_rounded_are_no_factor(size: float, count: int) -> None:
    signs = np.where(np.arange(count) % 3 == 0, -1.0, 1.0)
    golden = size * signs
    wrong = golden.astype(np.float32).astype(np.float16).astype(np.float64)
    if (np.abs(wrong - golden) < 1e-9).any():
        return
    verdict = judged(wrong, golden, "advantages", "advantages", micro=0)
    found = {pattern.id for pattern in find_patterns([verdict], [verdict], RunContext())}
    assert "rounded" in found
    assert not {"scaled", "sign", "everywhere"} & found


def test_repeated_values_are_counted_once() -> None:
    one = np.random.default_rng(3).uniform(1, 2, 30)
    up = np.where(one.astype(np.float16) > one)[0][0]
    golden = np.concatenate([one, np.full(500, one[up])])
    wrong = golden.astype(np.float16).astype(np.float64)
    assert rounded_to(wrong, golden, np.ones(golden.size, bool)) == "float16"


# groups


GROUPS = np.repeat(np.arange(3), 8)
ADVANTAGES = np.random.default_rng(1).standard_normal(24)


@pytest.mark.parametrize(
    ("wrong", "scale", "offset"),
    [
        (ADVANTAGES * np.array([2.0, 0.5, 3.0])[GROUPS], True, False),
        (ADVANTAGES + np.array([0.2, -0.5, 0.1])[GROUPS], False, True),
    ],
)
def test_a_number_of_each_group_multiplies_or_is_added(wrong: Any, scale: bool, offset: bool) -> None:
    found = of_groups(wrong, ADVANTAGES, GROUPS)["groups"]
    assert (found["scale"], found["offset"], found["proofs"]) == (scale, offset, 3)
    bent = wrong.copy()
    bent[5] += 0.3
    assert of_groups(bent, ADVANTAGES, GROUPS) == {}


@pytest.mark.parametrize("turned", [-ADVANTAGES, np.where(GROUPS == 1, -1.0, 1.0) * ADVANTAGES])
def test_no_deviation_is_negative(turned: Any) -> None:
    assert not of_groups(turned, ADVANTAGES, GROUPS).get("groups", {}).get("scale")


def test_a_factor_leaves_zero_as_it_is() -> None:
    golden = np.where(GROUPS == 2, 0.0, ADVANTAGES)
    assert of_groups(2 * golden, golden, GROUPS)["groups"]["scale"]
    assert of_groups(2 * golden + (GROUPS == 2), golden, GROUPS) == {}


def test_groups_of_equal_values_prove_neither() -> None:
    golden = np.repeat([0.5, -0.5, 1.0], 8)
    assert of_groups(2 * golden, golden, GROUPS)["groups"]["proofs"] == 0


def test_values_that_differ_within_a_sample_that_has_one() -> None:
    golden = np.repeat([0.5, -0.5, 1.0], 8)
    assert of_tokens(np.roll(golden, 1), golden, GROUPS) == {"within": {}}
    assert of_tokens(2 * golden, golden, GROUPS) == {}
    assert of_tokens(np.roll(ADVANTAGES, 1), ADVANTAGES, GROUPS) == {"by token": {}}


@pytest.mark.parametrize(
    ("golden", "rule"), [(np.repeat([0.5, -0.5, 1.0], 8), "advantage-groups"), (ADVANTAGES, "advantages")]
)
def test_advantages_of_tokens_are_no_statistics_of_groups(golden: Any, rule: str) -> None:
    """Where golden ones differ within samples, a return or a penalty made them."""
    order = np.arange(24)
    names = tuple(f"group/{number}" for number in range(3))
    traits = TokenAttributes(GROUPS, order, order % 8, np.full(24, 8), {}, names)
    context = FailureContext(lambda: traits, leading=(24,), grouped=True)
    wrong = golden + np.repeat([0.9, -0.1, 0.3], 8) * (1 + golden)
    assert rules(judged(wrong, golden, "advantages", "advantages", context, micro=0))[0] == rule


# targets


def of_targets(steps: int = 0, noise: float = 0.0, t: float = 0.7) -> Verdict:
    rng = np.random.default_rng(2)
    logits, targets = rng.standard_normal((12, 20)), rng.integers(0, 20, 12)
    known = logits / t - log_sum_exp(logits / t)[:, None]
    golden = known[np.arange(12), targets]
    wrong = known[np.arange(12), (targets + steps) % 20] + noise * rng.standard_normal(12)
    context = FailureContext(leading=(12,), logits=lambda: (logits, targets))
    return judged(wrong, golden, "log_probs", "log_probs", context, micro=0)


@pytest.mark.parametrize(("steps", "noise", "rule"), [(3, 0.0, "targets"), (3, 1e-3, "log-softmax")])
def test_log_probs_of_other_targets_are_proven_by_the_logits(steps: int, noise: float, rule: str) -> None:
    wrong = of_targets(steps, noise)
    told = rules(wrong, held("activations", "lm_head", micro=0), held("batch_inputs", micro=0))
    assert told[0] == rule


def test_entropies_alone_say_nothing_of_log_probs() -> None:
    wrong = judged(GOLDEN + 1, quantity="entropy", name="entropy", micro=0)
    told = rules(
        wrong, held("activations", "lm_head", micro=0), scene=RunContext(world_size=2, mesh={"tp": 2})
    )
    assert told == ["entropy-of-changed-logits"]


# signs and scales of what enters an update


def test_a_detached_loss_is_detached_everywhere() -> None:
    flat = GOLDEN.reshape(-1)
    zeros = [judged(0 * flat, flat, "token_gradient", "token_gradient", micro=m) for m in range(2)]
    inputs = [held(q, micro=m) for q in ("loss", "token_loss", "weights", "ratio") for m in range(2)]
    assert rules(*zeros, *inputs)[0] == "loss-detached"
    one = [zeros[0], judged(flat, flat, "token_gradient", "token_gradient", micro=1)]
    assert "loss-detached" not in rules(*one, *inputs)
