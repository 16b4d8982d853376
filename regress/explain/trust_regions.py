"""Quantities of a token that trust regions bound, each compared on the side that its advantage moves it to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from regress.explain.policy_log_probs import Policies
from regress.explain.update_tokens import Floats

RATIO = "the ratio"
FLOOR = 1e-8
"""Added to probabilities that are divided, as DPPO does."""


@dataclass(frozen=True)
class Region:
    """A quantity that grows with the log-prob of a token under the policy.

    Attributes:
        name: in words, as it stands before "is clipped".
        values: its value at each token of the frame.
    """

    name: str
    values: Floats


def regions(known: Policies) -> list[Region]:
    """Return the ratio and the distances of DPPO (arXiv 2602.04879); none where either policy is unknown."""
    log_ratio = known.log_ratio()
    if log_ratio is None or known.own is None or known.old is None:
        return []
    return [Region(RATIO, np.exp(log_ratio)), *_of_probabilities(known.own, known.old)]


def _of_probabilities(own: Floats, old: Floats) -> Iterator[Region]:
    p, p_old = np.exp(own), np.exp(old)
    yield Region("p - p_old", p - p_old)
    with np.errstate(invalid="ignore", divide="ignore"):
        rest = np.log((1 - p_old + FLOOR) / (1 - p + FLOOR))
        distance = p_old * (old - own) + (1 - p_old) * rest
    yield Region(
        "the KL between the token and all others, with the sign of p - p_old", np.sign(p - p_old) * distance
    )
