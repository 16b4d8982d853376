"""pass@k: the unbiased estimate."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.engine.evaluation import pass_at_k, pass_rate


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_it_is_the_share_of_all_choices_of_k_that_hold_a_right_one(
    right: list[bool], data: st.DataObject
) -> None:
    """Counted out; 1 - (1 - c/n)**k, which many use, is another number."""
    k = data.draw(st.integers(1, len(right)))
    choices = list(combinations(right, k))
    expected = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(expected, abs=1e-15)


def test_large_numbers_stay_exact() -> None:
    assert pass_at_k(2000, 1, 1000) == 0.5
    assert pass_at_k(2000, 1001, 1000) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (0, 0, 1)])
def test_what_cannot_be_estimated(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(n, c, k)


def test_failures_count_as_0_and_nothing_has_no_rate() -> None:
    assert pass_rate([True, False, False, False]) == 0.25
    with pytest.raises(ValueError, match="nothing"):
        pass_rate([])
