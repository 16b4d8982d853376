"""Pass rates of an evaluation: greedy, and pass@k from samples."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is right.

    Chen et al. 2021 (arXiv:2107.03374), equation 1: ``1 - C(n - c, k) / C(n, k)``, here with exact integers.

    Args:
        samples: n, completions sampled of the problem.
        correct: c, those that are right.
        k: at least 1 and at most n.

    Raises:
        ValueError: for other numbers.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} cannot be estimated from {correct} right ones of {samples} samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def pass_rate(right: Sequence[bool]) -> float:
    """Return the share of right completions; those that failed for any reason count as 0.

    Raises:
        ValueError: if there are none.
    """
    if not right:
        raise ValueError("there is nothing to take the pass rate of")
    return sum(right) / len(right)
