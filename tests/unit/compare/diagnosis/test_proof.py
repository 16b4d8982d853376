"""Nothing is claimed that is not proven: factors, sums, rounding, ranks, microbatches and places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.diagnosis.common_patterns import find_patterns
from regress.compare.diagnosis.failure_context import FailureContext
from regress.compare.diagnosis.failure_extent import of_samples, one_sided, rounded_to
from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import UNKNOWN, diagnose
from regress.compare.diagnosis.related_values import OwnMicrobatch, RelatedValues
from regress.compare.diagnosis.rule_gate import VALUES
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.diagnosis.term_decomposition import Term, Terms
from regress.compare.diagnosis.update_hypotheses import UpdateHypotheses
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place

TIGHT = Tolerance(1e-12, reason="a test")
BOUND = 1e-12
COUNTS = st.sampled_from([-1.0, 0.0, 0.5, 2.0, 3.0])


def made_of(seed: int, number: int, size: int = 60) -> Terms:
    rng = np.random.default_rng(seed)
    return Terms("terms", [Term(f"part {i}", rng.standard_normal(size)) for i in range(number)])


def total(terms: Terms, counts: dict[str, float] | None = None) -> Any:
    known = counts or {}
    return sum(known.get(term.name, 1.0) * term.values for term in terms.terms)


# sums of known parts


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), number=st.integers(3, 5), first=COUNTS, second=COUNTS)
def test_parts_that_count_wrongly_are_named_with_their_counts(
    seed: int, number: int, first: float, second: float
) -> None:
    terms = made_of(seed, number)
    wrong = {"part 0": first, "part 2": second}
    golden, actual = total(terms), total(terms, wrong)
    assert terms.counts(actual, golden, np.ones(60, bool), BOUND) == wrong


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.floats(1e-6, 10.0))
def test_an_error_of_another_kind_is_no_sum(seed: int, size: float) -> None:
    terms = made_of(seed, 3)
    golden = total(terms)
    noise = size * np.random.default_rng(seed + 1).standard_normal(60)
    assert terms.counts(golden + noise, golden, np.ones(60, bool), BOUND) is None


def test_a_factor_of_all_parts_is_no_sum_and_few_elements_prove_none() -> None:
    terms = made_of(0, 3)
    golden = total(terms)
    assert terms.counts(2 * golden, golden, np.ones(60, bool), BOUND) is None
    few = np.arange(60) < 7
    assert terms.counts(total(terms, {"part 1": 0.0}), golden, few, BOUND) is None


def test_parts_that_are_not_those_of_the_golden_values_prove_nothing() -> None:
    terms = made_of(0, 3)
    golden = total(terms)
    other = Terms("terms", [replace(term, values=1.1 * term.values) for term in terms.terms])
    assert other.counts(total(terms, {"part 1": 0.0}), golden, np.ones(60, bool), BOUND) is None


def test_parts_alike_are_not_told_apart() -> None:
    part = np.random.default_rng(0).standard_normal(40)
    terms = Terms("terms", [Term("one", part), Term("other", part)])
    found = terms.counts(part, 2 * part, np.ones(40, bool), BOUND)
    assert found is None or len(found) == 1


# factors


def judged(actual: Any, golden: Any, quantity: str = "gradient", name: str = "w", rank: int = 0) -> Verdict:
    around = FailureContext()
    found = judge_tensor(
        np.asarray(actual, float),
        np.asarray(golden, float),
        TIGHT,
        quantity=quantity,
        name=name,
        place=Place(0, None, rank),
    )
    over = np.asarray(actual, float) != np.asarray(golden, float)
    affected = around.affected(np.asarray(actual, float), np.asarray(golden, float), over, None, BOUND)
    return replace(found, affected=affected)


def ids(verdicts: list[Verdict], **scene: Any) -> set[str]:
    failed = [verdict for verdict in verdicts if not verdict.ok]
    return {pattern.id for pattern in find_patterns(failed, verdicts, RunContext(**scene))}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(golden=st.floats(0.1, 100.0), factor=st.sampled_from([0.5, 2.0, 3.0, 1.7]))
def test_one_number_proves_no_factor(golden: float, factor: float) -> None:
    alone = [judged(factor * golden, golden, "grad_norm", "grad_norm", rank) for rank in range(2)]
    assert not ids(alone, world_size=2) & {"scaled", "scaled:world_size", "everywhere", "factors", "sign"}


def test_several_numbers_or_a_tensor_prove_a_factor() -> None:
    several = [judged(2 * x, x, "loss", "loss", rank) for rank, x in enumerate((0.3, 0.7))]
    assert "scaled" in ids(several)
    golden = np.random.default_rng(0).standard_normal(12)
    assert {"scaled", "everywhere"} <= ids([judged(2 * golden, golden)])
    assert "scaled" not in ids([judged(2 * golden + 1e-2 * golden[::-1], golden)])


def test_a_factor_of_one_tensor_is_none_of_all() -> None:
    golden = np.random.default_rng(0).standard_normal(12)
    found = ids([judged(2 * golden, golden), judged(golden, golden, name="v")])
    assert "scaled" in found
    assert "everywhere" not in found


# rounding


def test_rounding_has_no_common_sign() -> None:
    golden = np.random.default_rng(0).uniform(1, 2, 64)
    nearest = golden.astype(np.float16).astype(np.float64)
    below = (np.floor(golden * 1024) / 1024).astype(np.float64)
    everywhere = np.ones(64, bool)
    assert rounded_to(nearest, golden, everywhere) == "float16"
    assert one_sided(below - golden)
    assert rounded_to(below, golden, everywhere) is None


def test_values_of_a_narrow_dtype_far_from_the_golden_ones_are_not_rounded() -> None:
    golden = np.random.default_rng(0).uniform(1, 2, 64)
    far = (golden + np.random.default_rng(1).standard_normal(64)).astype(np.float16).astype(np.float64)
    assert rounded_to(far, golden, np.ones(64, bool)) is None


# ranks


@settings(max_examples=40, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), ranks=st.integers(2, 4))
def test_parts_on_ranks_that_add_up_are_found_and_others_are_not(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    parts = rng.standard_normal((ranks, 2, 20))
    golden = parts.sum(axis=0)
    verdicts = [judged(parts[r, i], golden[i], name=f"w{i}", rank=r) for i in range(2) for r in range(ranks)]
    assert "parts" in ids(verdicts, world_size=ranks)
    other = [replace(v, alpha=(v.alpha or 0.0) + 1e-3) if v.place.rank == 0 else v for v in verdicts]
    assert "parts" not in ids(other, world_size=ranks)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), replicas=st.integers(2, 3))
def test_parts_of_shards_add_up_shard_by_shard(seed: int, replicas: int) -> None:
    parts = np.random.default_rng(seed).standard_normal((replicas, 2, 2, 20))  # [dp, ep, tensor, element]
    golden = parts.sum(axis=0)
    scale = float(np.abs(golden).max())
    verdicts = [
        replace(judged(parts[dp, ep, i], golden[ep, i], name=f"w{i}", rank=2 * dp + ep), scale=scale)
        for i in range(2)
        for dp in range(replicas)
        for ep in range(2)
    ]
    mesh = {"pp": 1, "dp": replicas, "cp": 1, "tp": 1, "ep": 2}
    assert "parts" in ids(verdicts, world_size=2 * replicas, mesh=mesh)
    other = [replace(v, alpha=(v.alpha or 0.0) + 1e-3) if v.place.rank == 0 else v for v in verdicts]
    assert "parts" not in ids(other, world_size=2 * replicas, mesh=mesh)


def test_one_wrong_element_of_one_rank_is_no_rank_with_other_weights() -> None:
    golden = np.random.default_rng(0).standard_normal((6, 8))
    wrong = golden.copy()
    wrong[2, 3] += 1.0
    name = "model.embed_tokens"
    verdicts = [
        judged(golden, golden, "activations", name, 0),
        judged(wrong, golden, "activations", name, 1),
        Verdict(Status.OK, "batch_inputs", "input_ids", Place(0, None, 1), count=9),
    ]
    scene = RunContext(world_size=2, mesh={"dp": 2})
    found = find_divergence(verdicts, scene)
    assert found is not None
    assert "weights-of-a-rank" not in {told.rule for told in diagnose(found, scene)}


def test_nothing_is_said_of_ranks_where_there_is_one() -> None:
    golden = np.random.default_rng(0).standard_normal((6, 8))
    verdicts = [judged(2 * golden, golden, "weights", "weights")]
    for world, rule in ((1, "weights-denominator"), (2, "weights-world-size")):
        scene = RunContext(world_size=world)
        found = find_divergence(
            [*verdicts, Verdict(Status.OK, "batch_inputs", "input_ids", Place(0, None, 0), count=1)], scene
        )
        assert found is not None
        assert diagnose(found, scene)[0].rule == rule


def test_a_place_is_no_proof_unless_its_inputs_were_judged() -> None:
    drift = judged(np.arange(9.0) ** 2, np.arange(9.0), "kl", "kl")
    known = [
        Verdict(Status.OK, name, name, Place(0, None, 0), count=9) for name in ("log_probs", "ref_log_probs")
    ]
    for inputs, rule in ((known, "kl"), (known[:1], UNKNOWN)):
        found = find_divergence([drift, *inputs])
        assert found is not None
        assert diagnose(found)[0].rule == rule


# updates

SETTINGS = {
    "learning_rate": 0.02,
    "eps": 1e-8,
    "weight_decay": 0.03,
    "betas": [0.9, 0.99],
    "max_grad_norm": 9.0,
}


def update(seed: int, shape: tuple[int, ...] = (6, 4)) -> tuple[dict[str, Any], RelatedValues]:
    """Golden values of an update of one weight, and its three microbatches' own gradients."""
    rng = np.random.default_rng(seed)
    own = rng.standard_normal((6, *shape))
    gradient, before = own.sum(axis=0), rng.standard_normal(shape)
    first, second = 0.1 * gradient, 0.01 * gradient**2
    step = 0.02 * (first / (1 - 0.9)) / (np.sqrt(second / (1 - 0.99)) + 1e-8)
    truth = {
        "gradient": {"w": gradient},
        "grad_norm": {"grad_norm": np.array(5.0)},
        "optimizer": {"w/exp_avg": first, "w/exp_avg_sq": second, "w/step": np.array(1.0)},
        "param": {"w": before * (1 - 0.02 * 0.03) - step},
    }
    micros = {
        f"microbatch {m} of rank 0": OwnMicrobatch(m, (0, 1), np.arange(2 * m, 2 * m + 2)) for m in range(3)
    }
    earlier = {"gradient": {"w": rng.standard_normal(shape)}, "grad_norm": {"grad_norm": np.array(3.0)}}
    return truth, RelatedValues(gradients=lambda _: own, microbatches=micros, before=earlier)


def patterns_of(quantity: str, name: str, actual: Any, seed: int = 0, **scene: Any) -> dict[str, str]:
    truth, beside = update(seed)
    known = UpdateHypotheses(truth, SETTINGS, beside)
    around = FailureContext(
        guesses=lambda _: known.of(quantity, name), sums=lambda: known.sums(quantity, name)
    )
    golden = truth[quantity][name]
    verdict = judged(actual, golden, quantity, name)
    over = np.abs(actual - golden) > BOUND
    verdict = replace(verdict, affected=around.affected(actual, golden, over, None, BOUND))
    return {p.id: p.words for p in find_patterns([verdict], [verdict], RunContext(**scene))}


def shares(seed: int, *counts: float) -> Any:
    _, beside = update(seed)
    assert beside.gradients is not None
    own = beside.gradients("w")
    assert own is not None
    return sum(c * own[2 * m : 2 * m + 2].sum(axis=0) for m, c in enumerate(counts))


@pytest.mark.parametrize(
    ("counts", "id"),
    [
        ((0.0, 0.0, 1.0), "microbatches:last"),
        ((4.0, 2.0, 1.0), "microbatches:powers"),
        ((0.25, 0.5, 0.5), "microbatches"),
        ((1.0, 0.0, 1.0), "microbatches"),
    ],
)
def test_how_often_a_microbatch_counts(counts: tuple[float, ...], id: str) -> None:
    found = patterns_of("gradient", "w", shares(0, *counts), world_size=2, mesh={"tp": 2})
    assert id in found
    assert ("microbatches:powers" in found) == (id == "microbatches:powers")


def test_the_gradient_of_the_last_update_that_was_not_dropped() -> None:
    truth, beside = update(0)
    left = truth["gradient"]["w"] + beside.before["gradient"]["w"]
    assert "that of the last update" in patterns_of("gradient", "w", left)["formula"]


def test_the_gradient_of_the_last_update_that_was_clipped_by_an_unknown_norm() -> None:
    truth, beside = update(0)
    left = truth["gradient"]["w"] + 0.039 * beside.before["gradient"]["w"]
    known = UpdateHypotheses(truth, {}, beside)
    around = FailureContext(guesses=lambda _: known.of("gradient", "w"))
    over = np.abs(left - truth["gradient"]["w"]) > BOUND
    affected = around.affected(left, truth["gradient"]["w"], over, None, BOUND)
    verdict = replace(judged(left, truth["gradient"]["w"], "gradient", "w"), affected=affected)
    words = {p.id: p.words for p in find_patterns([verdict], [verdict], RunContext())}["fitted"]
    assert "that of the last update, times 0.039" in words


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_weight_decay_that_enters_the_moments(kind: str) -> None:
    truth, beside = update(0)
    before = UpdateHypotheses(truth, SETTINGS, beside)._before("w")
    entered = truth["gradient"]["w"] + 0.03 * before
    wrong = 0.1 * entered if kind == "exp_avg" else 0.01 * entered**2
    found = patterns_of("optimizer", f"w/{kind}", wrong)
    assert "coupled=True" in found["formula"]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    what=st.sampled_from(
        [("gradient", "w"), ("optimizer", "w/exp_avg"), ("optimizer", "w/exp_avg_sq"), ("param", "w")]
    ),
    size=st.floats(1e-6, 1.0),
    share=st.floats(0.1, 1.0),
)
def test_an_unrelated_error_explains_nothing(
    seed: int, what: tuple[str, str], size: float, share: float
) -> None:
    truth, _ = update(seed)
    golden = truth[what[0]][what[1]]
    rng = np.random.default_rng(seed + 1)
    noise = np.where(rng.random(golden.shape) < share, size * rng.standard_normal(golden.shape), 0.0)
    if not noise.any():
        return
    assert not {*patterns_of(*what, golden + noise, seed)} & VALUES


# samples


def test_each_sample_times_a_number_of_its_own() -> None:
    samples = np.repeat(np.arange(4), 5)
    golden = np.random.default_rng(0).uniform(1, 2, 20)
    factors = np.array([1.0, 2.0, 0.5, 3.0])[samples]
    assert of_samples(factors * golden, golden, None, samples) == {"per_sample": {}}
    assert of_samples(2 * golden, golden, None, samples) == {}
    off = factors * golden
    off[7] += 0.1
    assert of_samples(off, golden, None, samples) == {}
