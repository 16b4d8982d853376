"""Log-probs and entropies given the recorded logits: recomputed in float64 from the run's own logits.

A softmax in half precision lies within the tolerance of a half-precision run; given that run's logits, which are exact
inputs, it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.local_shard import local_shard
from regress.compare.alignment.record_keys import Key
from regress.compare.alignment.shard_overlap import assembled
from regress.compare.metrics.ulps import spacing
from regress.compare.update_records import Records
from regress.compare.updates.invariant_counts import Checked, Floats
from regress.dump.numpy_arrays import Array, is_float
from regress.dump.record import Record
from regress.errors import CompareError

HEAD = "lm_head"
ELEMENTS = 1 << 22
"""Most logits of a microbatch that are looked at: of more, some rows are drawn."""

_SLACK = 32.0
"""Spacings of the results' dtype at the size of the largest logit. Measured: healthy replays reach 1.6."""

_UNLIKE = 0.05
"""Median difference beyond which the logits are not those of the log-probs, but of a module before a cap or scale."""

_SEED = 0

Index = NDArray[np.int64]


@dataclass(frozen=True)
class TokenValues:
    """Recorded values of loss tokens, ``[K]`` each.

    Attributes:
        canonical: their tokens; ``ids`` their token ids.
        values: log-probs and entropies, as far as they were recorded, by name.
    """

    canonical: Index
    ids: Index
    values: Mapping[str, Array]


def temperature_of(config: Mapping[str, Any]) -> float | None:
    """Return the temperature of the policy; None where the configuration does not tell it."""
    temperature = (config.get("rollout_worker") or {}).get("temperature")
    return float(temperature) if isinstance(temperature, int | float) and temperature > 0 else None


def logits_at(placed: Records, keys: Sequence[Key]) -> tuple[Array, Index] | None:
    """Return the logits ``[K, V]`` of a microbatch, put together from those of its ranks, and the token of each row.

    Args:
        keys: records of activations of ranks that hold the same tokens.
    """
    found: dict[Key, Record] = {}
    for key in keys:
        record = placed.get(key)
        if record is not None and HEAD in record.tensors and placed.placed(key):
            found[key] = record
    if not found or placed.loss_tokens is None:
        return None
    try:
        shards = [local_shard(key, record, HEAD) for key, record in found.items()]
        whole = shards[0].array if shards[0].layout.is_whole else assembled(shards, HEAD)
    except CompareError:
        return None  # it has a verdict of its own
    rows = placed.places(next(iter(found))).loss_rows(placed.loss_tokens)
    flat = whole.reshape(-1, whole.shape[-1]) if whole.ndim > 1 else whole
    return (flat, rows) if flat.ndim == 2 and len(flat) == len(rows) else None


def check_given_logits(
    known: Checked,
    logits: Array,
    rows: Index,
    tokens: TokenValues,
    temperature: float,
    words: Callable[[int], str],
) -> None:
    """Check recorded log-probs and entropies against those of the recorded logits.

    Args:
        logits: ``[K, V]``; ``rows`` the token of each row, ``[K]``.
        words: words for one of ``tokens``, by its number.
    """
    row = {int(token): index for index, token in enumerate(rows)}
    here = [i for i, token in enumerate(tokens.canonical.tolist()) if token in row]
    most = max(1, ELEMENTS // max(1, logits.shape[1]))
    if len(here) > most:
        here = sorted(np.random.default_rng(_SEED).choice(here, most, replace=False).tolist())
    here = [i for i in here if 0 <= tokens.ids[i] < logits.shape[1]]
    if not here:
        return
    chosen = logits[[row[int(tokens.canonical[i])] for i in here]].astype(np.float64) / temperature
    expected, size = expected_values(chosen, tokens.ids[here])
    for name, recorded in tokens.values.items():
        if not is_float(recorded.dtype):
            return
        actual = recorded[here].astype(np.float64)
        if name == "log_probs" and not _alike(expected[name], actual):
            return
        bound = _SLACK * max(spacing(recorded.dtype), spacing(np.dtype(np.float64))) * size
        known.elements(expected[name], actual, bound, partial(_words, name, words, here))


def _words(name: str, words: Callable[[int], str], here: Sequence[int], index: int) -> str:
    return f"{name} {words(here[index])}"


def expected_values(scaled: Floats, ids: Index) -> tuple[dict[str, Floats], Floats]:
    """Return log-prob and entropy of each row of tempered logits ``[K, V]``, and the size of the numbers in it.

    The entropy is log sum exp(x) - sum x exp(x) / sum exp(x), x the logits less their maximum.
    """
    with np.errstate(all="ignore"):  # logits of minus infinity, and those of damaged dumps
        x = scaled - scaled.max(axis=1, keepdims=True)
        weights = np.exp(x)
        total = weights.sum(axis=1)
        moment = np.where(weights > 0, x * weights, 0.0).sum(axis=1)
        log_sum = np.log(total)
    log_probs = x[np.arange(len(ids)), ids] - log_sum
    finite = np.where(np.isfinite(scaled), np.abs(scaled), 0.0)
    size = 1.0 + finite.max(axis=1) + np.where(np.isfinite(log_probs), np.abs(log_probs), 0.0)
    return {"log_probs": log_probs, "entropy": log_sum - moment / total}, size


def _alike(expected: Floats, actual: Floats) -> bool:
    """Return True unless most log-probs are other ones altogether."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(actual - expected) / (1.0 + np.abs(expected))
    return float(np.median(np.nan_to_num(apart, nan=0.0))) <= _UNLIKE
