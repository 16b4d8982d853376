"""Hypotheses about log-probs and entropies, given the golden logits: other targets, other sums, other roundings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.extent import ROUNDINGS
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis
from regress.compare.diagnosis.temperature import log_sum_exp, temperature

Index = NDArray[np.int64]


def log_prob_guesses(golden: Floats | None, logits: Floats, ids: Index) -> Iterator[Hypothesis]:
    """Yield log-probs of other targets, of rounded logits, or of a normalization by other sums.

    Args:
        golden: ``[frame.size]`` log-probs; None where they are unknown.
        logits: ``[frame.size, V]`` logits that predict each token (NaN where there are none).
        ids: ``[frame.size]`` the tokens.
    """
    rows = np.flatnonzero(np.isfinite(logits[:, 0]))
    z, target = logits[rows], ids[rows]
    normal = z - log_sum_exp(z)[:, None]
    found = {
        f"log-probs {title}": _of(normal, ids[np.clip(rows + step, 0, len(ids) - 1)])
        for title, step in (("of the token before the one predicted", -1), ("of the token after it", 1))
    }
    found["logits, not normalized"] = _of(z, target)
    t = None if golden is None else _temperature(golden[rows], z, target)
    yield from _placed(found if t is None else found | _other_softmax(z, target, t), rows, len(ids))


def entropy_guesses(golden: Floats, logits: Floats, ids: Index) -> Iterator[Hypothesis]:
    """Yield entropies of other distributions, or other sums over the vocabulary; see `log_prob_guesses`."""
    rows = np.flatnonzero(np.isfinite(logits[:, 0]))
    z = logits[rows]
    t = _temperature(golden[rows], z, ids[rows], entropy=True)
    if t is None:
        return
    normal = z / t - log_sum_exp(z / t)[:, None]
    p = np.exp(normal)
    found = {
        "the entropy of the probabilities taken for logits": _entropy_of(p),
        "the entropy of the tempered logits, tempered again": _entropy_of(z / t / t),
        "the mean over the vocabulary in place of the sum": -(p * normal).mean(axis=1),
        "minus the largest log-prob": -normal.max(axis=1),
        "the sum of p times the logit, not normalized": -(p * z / t).sum(axis=1),
        "the collision entropy": -np.log((p**2).sum(axis=1)),
    }
    for name, dtype in ROUNDINGS.items():
        with np.errstate(over="ignore"):
            coarse = z.astype(dtype).astype(np.float64)
            found[f"that of the logits rounded to {name}"] = _entropy_of(coarse / t)
    yield from _placed(found, rows, len(ids))


def _temperature(golden: Floats, z: Floats, target: Index, *, entropy: bool = False) -> float | None:
    """Return the temperature at which logits give the golden values; None where they do at none."""
    if not golden.size:
        return None
    t, error = temperature(golden, z, target, entropy=entropy)
    return None if error > 1e-6 * max(float(np.abs(golden).max(initial=0.0)), 1e-300) else t


def _other_softmax(z: Floats, target: Index, t: float) -> dict[str, Floats]:
    """Return log-probs of logits that were rounded, or of a normalization by other sums, at a temperature."""
    own, index = z / t, np.arange(len(target))
    normal = own - log_sum_exp(own)[:, None]
    others = own.copy()
    others[index, target] = -np.inf
    found = {
        "log-probs relative to all other tokens": own[index, target] - log_sum_exp(others),
        "log-probs relative to the largest logit": own[index, target] - own.max(axis=1),
        "log-probs that are normalized twice at the temperature": _log_softmax(normal / t, target),
        "probabilities, not their logarithms": np.exp(normal[index, target]),
    }
    for name, dtype in ROUNDINGS.items():
        with np.errstate(over="ignore"):
            coarse = z.astype(dtype).astype(np.float64)
            found[f"that of the logits rounded to {name}"] = _log_softmax(coarse / t, target)
            tempered = own.astype(dtype).astype(np.float64)
            found[f"that of the tempered logits rounded to {name}"] = _log_softmax(tempered, target)
    half = z.shape[1] // 2
    if half:
        first = own[index, target] - log_sum_exp(own[:, :half])
        found["log-probs normalized over half of the vocabulary"] = first
    return found


def _placed(found: Mapping[str, Floats], rows: Index, size: int) -> Iterator[Hypothesis]:
    """Yield values of some tokens as hypotheses about all, which say nothing of the others."""
    for title, values in found.items():
        out = np.full(size, np.nan)
        out[rows] = values
        yield Hypothesis("formula", out, {"what": title})


def _of(z: Floats, target: Index) -> Floats:
    return np.asarray(z[np.arange(len(target)), target])


def _log_softmax(z: Floats, target: Index) -> Floats:
    return _of(z, target) - log_sum_exp(z)


def _entropy_of(z: Floats) -> Floats:
    normal = z - log_sum_exp(z)[:, None]
    return np.asarray(-(np.exp(normal) * normal).sum(axis=1))
