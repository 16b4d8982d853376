"""Samples of two dumps are paired by id, by tokens, by place; nothing is lost, and a choice is said to be one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from regress.compare.dumps.sample_matching import EXHAUSTIVE, Sample, match_samples
from regress.layout import SampleKey

contents = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8)


def named(content: list[tuple[int, ...]], prefix: str = "g") -> list[Sample]:
    return [Sample((prefix, index), tokens) for index, tokens in enumerate(content)]


def told(values: Mapping[tuple[str, SampleKey], float]) -> Any:
    """Values of samples, one number each."""

    def of(side: str, key: SampleKey) -> dict[str, NDArray[np.float64]]:
        return {"log_probs": np.array([values[side, key]])}

    return of


@settings(deadline=None)
@given(contents, contents, st.booleans())
def test_every_sample_is_paired_once_or_reported(
    golden: list[tuple[int, ...]], actual: list[tuple[int, ...]], same_names: bool
) -> None:
    ours, theirs = named(golden), named(actual, "g" if same_names else "a")
    found = match_samples(ours, theirs)
    assert len(set(found.golden_of.values())) == len(found.golden_of)
    assert {*found.golden_of.values(), *found.golden_only} == {sample.key for sample in ours}
    assert {*found.golden_of, *found.actual_only} == {sample.key for sample in theirs}
    tokens = (
        {sample.key: sample.content for sample in ours},
        {sample.key: sample.content for sample in theirs},
    )
    only = found.golden_only, found.actual_only
    left = [sorted(t[key] for key in keys) for t, keys in zip(tokens, only, strict=True)]
    assert not {*left[0]} & {*left[1]}  # whatever could have been paired was
    if not same_names:
        assert all(tokens[0][to] == tokens[1][key] for key, to in found.golden_of.items())


@pytest.mark.parametrize("side", ["golden", "actual"])
def test_copies_that_nobody_trains_on_fill_a_batch_up(side: str) -> None:
    fewer, more = named([(1,), (2,)]), named([(1,), (2,), (1,)], "a")
    sides = (more, fewer) if side == "golden" else (fewer, more)

    def of(which: str, key: SampleKey) -> dict[str, NDArray[np.float64]]:
        trained = which != side or key != copy
        return {"token_gradient": np.array([float(trained)])}

    copy = more[2].key
    found = match_samples(*sides, of)
    assert (found.repeated, found.golden_only, found.actual_only) == ((copy,), (), ())

    copy = ("nobody", 0)  # now all of them are trained on, so that one is too many
    found = match_samples(*sides, of)
    assert not found.repeated
    assert len(found.golden_only if side == "golden" else found.actual_only) == 1


@settings(deadline=None)
@given(contents, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(content: list[tuple[int, ...]], random: Any) -> None:
    samples = named(content)
    mixed = random.sample(samples, len(samples))
    found = match_samples(samples, mixed)
    assert found.golden_of == {sample.key: sample.key for sample in samples}


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=EXHAUSTIVE), st.randoms(use_true_random=False))
def test_identical_rollouts_are_paired_at_the_least_distance(values: list[float], random: Any) -> None:
    count = len(values)
    moved = random.sample(values, count)
    ours, theirs = named([(1, 2)] * count), named([(1, 2)] * count, "a")
    known = {("golden", s.key): v for s, v in zip(ours, values, strict=True)}
    known |= {("actual", s.key): v for s, v in zip(theirs, moved, strict=True)}
    found = match_samples(ours, theirs, told(known))
    cost = sum(abs(known["actual", key] - known["golden", to]) for key, to in found.golden_of.items())
    least = min(sum(abs(a - b) for a, b in zip(order, values, strict=True)) for order in permutations(moved))
    assert cost == pytest.approx(least)
    assert bool(found.ambiguous) == (len(set(values)) > 1)


def test_an_id_with_other_tokens_is_the_last_resort() -> None:
    golden, actual = named([(1, 2), (3, 4)]), named([(3, 4), (5, 6)])
    found = match_samples(golden, actual)
    assert found.golden_of == {("g", 0): ("g", 1)}
    assert (found.golden_only, found.actual_only) == ((("g", 0),), (("g", 1),))
    assert match_samples(named([(1, 2)]), named([(1, 3)])).golden_of == {("g", 0): ("g", 0)}


def test_copies_go_with_what_they_repeat() -> None:
    golden = [Sample(("g", 0), (1, 2)), Sample(("g", 1), (3, 4))]
    copy = Sample(("g (copy 1)", 0), (1, 2), copy_of=("g", 0))
    found = match_samples(golden, [*golden, copy])
    assert found.golden_of[copy.key] == ("g", 0)
    assert not found.actual_only
    back = match_samples([*golden, copy], golden)
    assert (back.alias, back.golden_only) == ({copy.key: ("g", 0)}, ())


def test_places_stand_in_for_tokens() -> None:
    golden = [Sample(("g", index), (index,), place=(0, 0, index)) for index in range(3)]
    actual = [Sample(("row", index), None, named=False, place=(0, 0, index)) for index in (2, 0)]
    found = match_samples(golden, actual)
    assert found.golden_of == {("row", 2): ("g", 2), ("row", 0): ("g", 0)}
    assert (found.by_place, found.golden_only) == (2, (("g", 1),))
