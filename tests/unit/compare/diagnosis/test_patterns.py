"""Patterns are found where they were planted, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.alignment.aligned_tensor import Aligned, TokenRows, judge_aligned
from regress.compare.alignment.canonical_projection import Projection
from regress.compare.alignment.local_shard import Shard, whole_layout
from regress.compare.alignment.shard_overlap import shard_blocks
from regress.compare.alignment.token_overlap import token_part
from regress.compare.alignment.token_places import Places, selected_rows
from regress.compare.diagnosis.common_patterns import Pattern, find_patterns
from regress.compare.diagnosis.failure_extent import by_chance
from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import diagnose
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.quantities import Kind, QuantitySource, quantity_named
from regress.compare.verdicts.affected_elements import Affected, Count
from regress.compare.verdicts.tensor_case import Case
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array
from regress.layout import Segment, TokenFrame, TokenLayout

TIGHT = Tolerance(1e-9, reason="a test")
LENGTHS = (20, 70, 33, 90, 41, 64, 28, 77, 36, 81, 25, 52, 22, 72, 35, 92, 43, 66, 30, 79, 38, 83, 27, 54)
CONFIG = {"algorithm": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.1, "entropy_coef": 0.01}}


def make_truth(frame: TokenFrame, seed: int = 0) -> dict[str, dict[str, Array]]:
    rng = np.random.default_rng(seed)
    size, count = frame.size, len(frame.samples)
    sample = np.repeat(np.arange(count), frame.lengths)
    position = np.arange(size) - frame.offsets[sample]
    mask = position >= 6
    mask[(position > 10) & (position < 14)] = False  # a tool speaks
    signs = np.where(
        np.arange(count) % 3 == 0, 0.0, rng.choice([-1.0, 1.0], count) * rng.uniform(0.5, 2, count)
    )
    tokens = {name: np.where(mask, -rng.exponential(1, size), 0.0) for name in ("log_probs", "old_log_probs")}
    ratio = np.where(mask, np.exp(rng.normal(0, 0.4, size)), 0.0)
    return {
        "batch_inputs": {"input_ids": rng.integers(0, 50, size), "response_mask": mask.astype(np.int64)},
        "advantages": {"advantages": np.where(mask, signs[sample], 0.0)},
        "ratio": {"prob_ratio": ratio},
        "activations": {"model.layers.0": rng.standard_normal((size, 8))},
        **{name: {name: values} for name, values in tokens.items()},
    }


FRAME = TokenFrame(tuple((f"{i // 3:03d}", i % 3) for i in range(len(LENGTHS))), LENGTHS)
TRUTH = make_truth(FRAME)
SAMPLE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
POSITION = np.arange(FRAME.size) - FRAME.offsets[SAMPLE]
MASK = TRUTH["batch_inputs"]["response_mask"].astype(bool)
ADVANTAGES = TRUTH["advantages"]["advantages"]
RATIO = TRUTH["ratio"]["prob_ratio"]


def padded(rows: Sequence[int], left: bool = False) -> TokenLayout:
    width = max(LENGTHS[i] for i in rows)
    cols = [width - LENGTHS[i] if left else 0 for i in rows]
    segments = [Segment(i, 0, LENGTHS[i], row, cols[row]) for row, i in enumerate(rows)]
    return TokenLayout((len(rows), width), tuple(segments))


def packed(rows: Sequence[int]) -> TokenLayout:
    starts = np.cumsum([0, *(LENGTHS[i] for i in rows)])
    segments = [Segment(i, 0, LENGTHS[i], 0, int(start)) for i, start in zip(rows, starts, strict=False)]
    return TokenLayout((1, int(starts[-1])), tuple(segments))


PADDED = [padded(range(start, start + 8)) for start in (0, 8, 16)]
LEFT = [padded(range(start, start + 8), left=True) for start in (0, 8, 16)]
PACKED = [packed(range(start, start + 8)) for start in (0, 8, 16)]


def judged(
    change: Callable[[Array, TokenLayout], Array],
    layouts: Sequence[TokenLayout] = tuple(PADDED),
    quantity: str = "log_probs",
    name: str = "log_probs",
) -> list[Verdict]:
    """Verdicts on a quantity whose local golden values were changed, microbatch by microbatch."""
    golden = Projection(TRUTH, FRAME, config=CONFIG)
    found = []
    for micro, layout in enumerate(layouts):
        places = Places.of(layout, layout, FRAME.offsets)
        context = partial(golden.context, layout=layout, rows=layout)
        source = QuantitySource("", name, quantity, name)
        values, (canonical, at) = TRUTH[quantity][name], layout.indices(FRAME.offsets)
        whole = np.zeros((places.tokens.size, *values.shape[1:]), values.dtype)
        whole[at] = values[canonical]
        array = change(whole.reshape(*layout.shape, *values.shape[1:]), layout)
        local = whole_layout(array.shape)
        part = token_part(array, local, places.tokens, 2)
        loss = MASK if quantity_named(quantity).kind is Kind.TOKEN else None
        rows = TokenRows(part, [golden.part(source)], selected_rows(source, part.rows, loss))
        words = golden.locator.rows(places.tokens, array.shape[2:], layout.shape[1])
        aligned = Aligned.of_tokens(rows, words, partial(context, source, local))
        case = Case(quantity, name, Place(0, None, 0, micro), TIGHT, aligned.words, array.shape)
        found.append(judge_aligned(case, aligned, golden.scale(source)))
    return found


def patterns(verdicts: Sequence[Verdict], **scene: Any) -> dict[str, Pattern]:
    failed = [verdict for verdict in verdicts if not verdict.ok]
    return {pattern.id: pattern for pattern in find_patterns(failed, verdicts, RunContext(**scene))}


def at(hit: Array, by: float = 0.25) -> Callable[[Array, TokenLayout], Array]:
    """Add noise to the tokens of a canonical mask."""
    rng = np.random.default_rng(1)
    noise = rng.uniform(by, 2 * by, FRAME.size) * rng.choice([-1, 1], FRAME.size)

    def change(values: Array, layout: TokenLayout) -> Array:
        return values + layout.scatter(np.where(hit, noise, 0.0), FRAME.offsets)

    return change


def local(hit: Callable[[TokenLayout], Array]) -> Callable[[Array, TokenLayout], Array]:
    """Add noise to local places."""

    def change(values: Array, layout: TokenLayout) -> Array:
        noise = np.random.default_rng(2).uniform(0.2, 0.5, layout.shape)
        return values + np.where(hit(layout), noise, 0.0)

    return change


def behind(layout: TokenLayout) -> Array:
    hit = np.zeros(layout.shape, bool)
    for segment in layout.segments:
        hit[segment.row, segment.col :] |= segment.col > 0
    return hit


def firsts(layout: TokenLayout) -> Array:
    """The first loss token behind each border: nothing is compared before it."""
    hit = np.zeros(layout.shape, bool)
    for segment in layout.segments:
        hit[segment.row, segment.col + 6] = True
    return hit


CLIPPED = (RATIO < 0.8) | (RATIO > 1.2)
TOKENS = {
    "positions_from": at(POSITION >= 16),
    "positions_below": at(POSITION < 9),
    "class:negative": at(ADVANTAGES < 0),
    "class:positive": at(ADVANTAGES > 0),
    "class:zero_variance": at((ADVANTAGES == 0) & MASK),
    "class:varied": at(ADVANTAGES != 0),
    "class:clipped": at(CLIPPED),
    "class:clipped_negative": at(CLIPPED & (ADVANTAGES < 0)),
    "class:stopped": at(((RATIO > 1.2) & (ADVANTAGES > 0)) | ((RATIO < 0.8) & (ADVANTAGES < 0))),
    "class:first_trained": local(firsts),
    "class:last_trained": at(np.array(LENGTHS)[SAMPLE] - 1 == POSITION),
    "long_samples": at(np.array(LENGTHS)[SAMPLE] > 50),
    "short_samples": at(np.array(LENGTHS)[SAMPLE] < 40),
    "sample": at(SAMPLE == 3),
}
VALUES = {
    "sign": lambda values, _: -values,
    "zero": lambda values, _: 0 * values,
    "offset": lambda values, _: values + 0.125,
    "scaled:power_of_two": lambda values, _: 2 * values,
    "scaled:world_size": lambda values, _: 3 * values,
    "scaled:micros": lambda values, _: values / 5,
    "scaled:logarithm": lambda values, _: values / np.log(2),
    "scaled:ddof": lambda values, _: values * np.sqrt(4 / 3),
    "equals": lambda values, layout: layout.scatter(TRUTH["old_log_probs"]["old_log_probs"], FRAME.offsets),
}


@pytest.mark.parametrize("id", TOKENS)
def test_a_planted_class_of_tokens_is_found(id: str) -> None:
    found = patterns(judged(TOKENS[id]))
    assert id in found, [*found]
    assert found[id].words.startswith("only ")


@pytest.mark.parametrize(
    ("id", "hit", "layouts"),
    [
        ("class:packed_behind", behind, PACKED),
        ("class:behind_padding", lambda layout: layout.attention_mask & ~layout.attention_mask[:, :1], LEFT),
    ],
)
def test_a_planted_class_of_places_is_found(id: str, hit: Any, layouts: list[TokenLayout]) -> None:
    assert id in patterns(judged(local(hit), layouts))


def test_boundaries_and_padding_at_all_tokens() -> None:
    def border(values: Array, layout: TokenLayout) -> Array:
        for segment in layout.segments:
            if segment.col:
                values[segment.row, segment.col] += 1
        return values

    source = {"quantity": "activations", "name": "model.layers.0"}
    found = patterns(judged(border, PACKED, **source))
    assert found["class:after_boundary"].words.startswith("only the first token after a boundary")

    def edge(values: Array, layout: TokenLayout) -> Array:
        for segment in layout.segments:
            if segment.col:
                values[segment.row, segment.col] += 1
        return values

    assert "class:beside_padding" in patterns(judged(edge, LEFT, **source))


@pytest.mark.parametrize("id", VALUES)
def test_planted_values_are_found(id: str) -> None:
    found = patterns(judged(VALUES[id]), world_size=3, micros=5, group_sizes=(4,))
    assert id in found, [*found]


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_by_one_is_found(by: int) -> None:
    values = TRUTH["log_probs"]["log_probs"]
    moved = np.roll(values, -by)
    found = patterns(judged(lambda _, layout: layout.scatter(np.where(MASK, moved, 0.0), FRAME.offsets)))
    assert found["shifted"].numbers == {"by": by}


def test_half_precision_is_found() -> None:
    import ml_dtypes

    found = patterns(judged(lambda values, _: values.astype(ml_dtypes.bfloat16).astype(np.float64)))
    assert found["rounded"].words == "rounded to bfloat16"


def test_an_order_that_is_not_undone_is_found() -> None:
    order = np.flatnonzero(MASK)
    values = TRUTH["log_probs"]["log_probs"].copy()
    values[order] = values[np.random.default_rng(0).permutation(order)]
    assert "permuted" in patterns(judged(lambda _, layout: layout.scatter(values, FRAME.offsets)))


def test_one_microbatch_is_named() -> None:
    count = iter(range(3))
    found = patterns(judged(lambda values, _: values + (0.5 if next(count) == 2 else 0.0)))
    assert found["micro"].words == "only microbatch 2"
    assert "last_micro" in found
    assert "first_micro" not in found


def test_ranks_are_named_with_their_coordinate() -> None:
    def verdict(rank: int, bad: bool) -> Verdict:
        array = np.array([1.0, 2.0])
        place = Place(0, None, rank)
        return judge_tensor(array + bad, array, TIGHT, quantity="gradient", name="w", place=place)

    verdicts = [verdict(rank, rank in (1, 3)) for rank in range(4)]
    found = patterns(verdicts, mesh={"dp": 2, "tp": 2})
    assert found["rank"].words == "only ranks 1, 3"
    assert found["mesh:tp"].numbers == {"dimension": "tp", "which": [1]}
    assert "mesh:dp" not in found


@pytest.mark.parametrize(
    ("hit", "id"),
    [
        (r"norm.weight", "names:norms"),
        (r"bias", "names:biases"),
        (r"layers.1.", "layer"),
        (r"embed", "names:embeddings"),
        (r"experts.2.", "expert"),
    ],
)
def test_kinds_of_parameters_are_named(hit: str, id: str) -> None:
    names = [
        f"model.layers.{i}.{part}"
        for i in range(3)
        for part in ("mlp.w.weight", "norm.weight", "attn.q.bias")
    ]
    names += ["model.embed_tokens.weight", *(f"model.layers.2.mlp.experts.{e}.w" for e in range(4))]
    one = np.array([1.0, 2.0])
    verdicts = [
        judge_tensor(one + (hit in name), one, TIGHT, quantity="gradient", name=name, place=Place(0, None, 0))
        for name in names
    ]
    assert id in patterns(verdicts)


def test_one_shard_of_a_matrix_is_named() -> None:
    golden = np.random.default_rng(0).standard_normal((8, 12))
    actual = golden.copy()
    actual[:, 3:6] *= 1.5
    source = QuantitySource("gradient", "w", "gradient", "w")
    whole = Projection({"gradient": {"w": golden}}, FRAME)
    layout = whole_layout(actual.shape)
    pairs = partial(shard_blocks, Shard(actual, layout), [Shard(golden, layout)])
    aligned = Aligned(actual, golden, pairs, None, partial(whole.context_of_whole, source, layout))
    verdict = judge_aligned(Case("gradient", "w", Place(0, None, 0), TIGHT, None, actual.shape), aligned)
    found = patterns([verdict])
    assert found["shard"].numbers == {"dimension": 1, "start": 3, "stop": 6, "size": 12, "parts": 4}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000), share=st.floats(0.02, 0.6), layouts=st.sampled_from([PADDED, LEFT, PACKED])
)
def test_noise_at_random_tokens_has_no_pattern(seed: int, share: float, layouts: list[TokenLayout]) -> None:
    rng = np.random.default_rng(seed)
    hit = rng.random(FRAME.size) < share
    noise = np.where(hit, rng.normal(0, 1, FRAME.size), 0.0)
    verdicts = judged(lambda values, layout: values + layout.scatter(noise, FRAME.offsets), layouts)
    found = patterns(verdicts, world_size=2, micros=3, group_sizes=(3,))
    assert {*found} <= {"micro", "last_micro", "first_micro"}


@settings(max_examples=40, derandomize=True, deadline=None)
@given(kept=st.integers(0, 10_000))
def test_one_counter_example_is_enough(kept: int) -> None:
    """A class all of whose tokens are wrong, and one token outside of it."""
    hit = ADVANTAGES < 0
    outside = np.flatnonzero(MASK & ~hit)
    hit = hit | (np.arange(FRAME.size) == outside[kept % len(outside)])
    assert "class:negative" not in patterns(judged(at(hit)))


def test_counts_of_microbatches_add_up() -> None:
    one, other = Count(1, 2, 1, 1), Count(3, 4, 2, 3)
    assert one.and_(other) == Count(4, 6, 3, 4)
    assert by_chance(3, 6, 2) == pytest.approx(3 / 15)
    assert by_chance(1, 6, 2) == 0


def test_what_is_affected_survives_json() -> None:
    verdicts = [v for change in (*TOKENS.values(), *VALUES.values()) for v in judged(change) if not v.ok]
    assert verdicts
    for verdict in verdicts:
        assert isinstance(verdict.affected, Affected)
        assert Verdict.from_json(_plain(verdict.to_json())) == verdict


def _plain(tree: Mapping[str, Any]) -> Any:
    import json

    return json.loads(json.dumps(tree))


@pytest.mark.parametrize(
    ("first", "beside", "rules"),
    [
        ("model.layers.0", "model.layers.0.linear_attn.in_proj_qkv.weight", {"state-across-samples"}),
        ("model.layers.0", "model.layers.0.mamba.A_log", {"state-across-samples"}),
        ("model.layers.0", "model.layers.0.self_attn.q_proj.weight", {"packed-leak"}),
        ("model.layers.0", "model.layers.1.linear_attn.conv1d.weight", {"packed-leak"}),
        ("log_probs", "model.layers.0.self_attn.q_proj.weight", {"packed-leak"}),
    ],
)
def test_a_state_that_crosses_samples_is_told_from_attention_that_does(
    first: str, beside: str, rules: set[str]
) -> None:
    def wrong(values: Array, layout: TokenLayout) -> Array:
        hit = behind(layout).reshape(*layout.shape, *(1 for _ in values.shape[2:]))
        return values + hit * np.random.default_rng(2).uniform(0.2, 0.5, values.shape)

    quantity = "activations" if "." in first else first
    one = np.ones(3)
    other = judge_tensor(one, one, TIGHT, quantity="gradient", name=beside, place=Place(0, None, 0, None))
    found = find_divergence([*judged(wrong, PACKED, quantity, first), other], RunContext())
    assert found is not None
    told = {one.rule for one in diagnose(found, RunContext())}
    assert told & {"state-across-samples", "packed-leak"} == rules
