"""Log-probs and entropies at the temperature of the loss, from recorded logits."""

from __future__ import annotations

import numpy as np

from regress.compare.metrics.ulps import spacing
from regress.compare.updates.logit_recomputation import expected_values
from regress.dump.record import Record
from regress.explain.update_sources import UpdateSource
from regress.explain.update_tokens import Floats, Ints, UpdateTokens, indices_of

LOGITS = "activations"
"""Record type of the outputs of modules, the head among them."""
LOG_PROBS, ENTROPY = f"{LOGITS}/log_probs", f"{LOGITS}/entropy"
"""Values of an update that were computed from them."""
SPACINGS = 32
"""Spacings at the size of the logits up to which recorded log-probs are those of recorded logits."""


def add_log_probs(update: UpdateTokens, dump: UpdateSource) -> None:
    """Add log-probs and entropies at the temperature of the loss, where those of the forward pass are of another one.

    Outputs ``[B, T, V]`` of a module are logits where they give the recorded log-probs of all tokens at the temperature
    that these are of.
    """
    known, used = update.get("forward_data/log_probs"), update.temperature
    recorded = update.recorded_at.get("forward_data", set())
    if update.elsewhere("forward_data") is None or known is None or used is None or len(recorded) > 1:
        return
    for name, (type, where) in dump.entries.items():
        if type == LOGITS and where.step == update.place.step and where.update in (None, update.place.update):
            _add(update, dump.read(name), known, max(recorded), used)


def _add(update: UpdateTokens, record: Record, known: Floats, recorded: float, used: float) -> None:
    """Add the values of the tokens that a record holds logits of."""
    at = _states(update, record)
    ids = update.get("forward_data/input_ids", "batch_inputs/input_ids")
    tokens = np.flatnonzero((at >= 0) & (np.nan_to_num(known) != 0))
    if ids is None or not len(tokens):
        return
    own, parts = ids[tokens].astype(np.int64), record.meta.get("shards")
    shards = parts if isinstance(parts, dict) else {}
    for name, values in record.tensors.items():
        if values.ndim != 3 or name in shards or at.max() >= values.size // values.shape[-1]:
            continue
        if own.max() >= values.shape[-1]:
            continue
        rows = values.reshape(-1, values.shape[-1])[at[tokens]].astype(np.float64)
        as_recorded, size = expected_values(rows / recorded, own)
        error = np.abs(as_recorded["log_probs"] - known[tokens])
        if (error <= SPACINGS * spacing(values.dtype) * size).all():
            found = expected_values(rows / used, own)[0]
            for label, quantity in ((LOG_PROBS, "log_probs"), (ENTROPY, "entropy")):
                update.values.setdefault(label, np.full(update.frame.size, np.nan))[tokens] = found[quantity]
            return


def _states(update: UpdateTokens, record: Record) -> Ints:
    """Return the place in ``[B * T]`` of the state that predicts each token of the frame; -1 without one."""
    flat, local = indices_of(record, update.frame, update.frame.index)
    at = np.full(update.frame.size + 1, -1)
    at[flat + 1] = local
    at = at[:-1]
    at[update.position == 0] = -1
    return at
