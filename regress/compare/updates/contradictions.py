"""Values of an update that cannot stand beside each other: token ids of several records, log-probs without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from regress.compare.updates.invariant_counts import Checked
from regress.dump.numpy_arrays import Array

Ints = NDArray[np.int64]

_COARSEST = 2.0**-8
"""Most probability that all other tokens can share where a log-prob rounds to 0: unit roundoff of bfloat16."""
_VOCABULARY = 2**24
"""More entries than any vocabulary has."""
MOST_ENTROPY = _COARSEST * (1 + np.log(_VOCABULARY) - np.log(_COARSEST))
"""Upper bound on the entropy of a distribution that leaves at most ``_COARSEST`` to all tokens but one."""


def check_token_ids(
    known: Checked,
    found: Iterable[tuple[str, Ints, Array]],
    size: int,
    token: Callable[[Ints, str], Callable[[int], str]],
) -> None:
    """Compare the token ids that records name for the same tokens.

    Args:
        found: words of a record, canonical indices ``[K]`` of its tokens and their ids ``[K]``.
        size: number of tokens of the update.
        token: canonical indices and words -> words of each element.
    """
    first = np.zeros(size, np.float64)
    named = np.zeros(size, bool)
    for words, canonical, ids in found:
        wide = ids.astype(np.float64)
        twice = named[canonical]
        at = canonical[twice]
        known.elements(first[at], wide[twice], 0.0, token(at, f"the token id in {words}"))
        first[canonical[~twice]] = wide[~twice]
        named[canonical] = True


def check_certain(known: Checked, found: Iterable[tuple[str, Array, Array | None]]) -> None:
    """Find records all of whose log-probs are exactly 0, though the policy was not certain of its tokens.

    Without entropies only an update without any other log-prob is one.

    Args:
        found: words of a record, its log-probs ``[K]`` at loss tokens, and their entropies ``[K]`` where recorded.
    """
    alone: list[Array] = []
    for words, log_probs, entropies in found:
        if entropies is None:
            alone.append(log_probs)
            continue
        most = float(entropies.astype(np.float64).max(initial=0.0))
        empty = _empty([log_probs]) and most > MOST_ENTROPY
        zeros = log_probs.size if empty else 0
        known.number(
            0.0,
            zeros,
            0.0,
            f"the number of log-probs that are 0 in {words}, beside entropies up to {most:.3g},",
        )
    if alone:
        total = sum(values.size for values in alone)
        known.number(
            0.0,
            total if _empty(alone) else 0,
            0.0,
            "the number of log-probs that are 0, of an update without any other,",
        )


def _empty(values: Iterable[Array]) -> bool:
    """Return True if there are several values, and each is 0."""
    found = [*values]
    return sum(own.size for own in found) > 1 and not any(bool(np.any(own != 0)) for own in found)
