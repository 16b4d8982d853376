"""Random draws: portable, complete, even, and apart from the global generator."""

import random
from collections import Counter
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from regress.tasks.portable_draws import below, distinct, generator
from regress.tasks.prompt_strata import Stratum, draw, shares

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=8)


@settings(deadline=None)
@given(bound=st.integers(1, 300), seed=st.integers())
def test_distinct_is_a_permutation(bound: int, seed: int) -> None:
    assert sorted(distinct(generator(seed), bound)) == list(range(bound))


@settings(deadline=None)
@given(bound=st.integers(2**80, 2**90), seed=st.integers())
def test_distinct_is_lazy_for_any_bound(bound: int, seed: int) -> None:
    drawn = list(islice(distinct(generator(seed), bound), 50))

    assert len(set(drawn)) == 50
    assert all(0 <= value < bound for value in drawn)


def test_every_order_is_equally_likely() -> None:
    orders = Counter(tuple(distinct(generator("even", seed), 3)) for seed in range(6000))

    assert len(orders) == 6
    assert all(850 < count < 1150 for count in orders.values())


def test_high_bits_are_drawn_too() -> None:
    rng = generator("wide")

    assert max(below(rng, 2**100) for _ in range(20)) > 2**96


def test_keys_are_kept_apart_and_negative_seeds_are_their_own() -> None:
    firsts = [generator(*key).random() for key in [("a", 1), ("a", -1), ("b", 1), ("a", 11)]]

    assert len(set(firsts)) == 4


def test_the_global_generator_is_left_alone() -> None:
    state = random.getstate()
    list(distinct(generator("x"), 10))

    assert random.getstate() == state


@settings(deadline=None)
@given(sizes=SIZES, count=st.integers(0, 500))
def test_shares_are_even_as_far_as_sizes_allow(sizes: list[int], count: int) -> None:
    given_out = shares(sizes, count)

    assert sum(given_out) == min(count, sum(sizes))
    assert all(share <= size for share, size in zip(given_out, sizes, strict=True))
    unexhausted = [share for share, size in zip(given_out, sizes, strict=True) if share < size]
    assert not unexhausted or max(given_out) - min(unexhausted) <= 1


@settings(deadline=None)
@given(sizes=SIZES, count=st.integers(0, 500), seed=st.integers())
def test_draws_never_repeat(sizes: list[int], count: int, seed: int) -> None:
    strata = [
        Stratum(size, lambda index, kind=kind: (f"{kind}/{index}", "x")) for kind, size in enumerate(sizes)
    ]

    prompts = [prompt for prompt, _ in draw(strata, count, generator(seed))]

    assert len(set(prompts)) == len(prompts) == min(count, sum(sizes))
