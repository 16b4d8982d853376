"""Folders and tensors that NexRL writes in its three modes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Mode(StrEnum):
    """Writer of a dump: the trainer itself, its client of a remote trainer, or that trainer."""

    SELF_HOSTED = "self-hosted"
    REMOTE_API = "remote API"
    WEAVER = "weaver"


MODES: Mapping[Mode, frozenset[str]] = {
    Mode.SELF_HOSTED: frozenset({"trajectory", "old_log_probs"}),
    Mode.REMOTE_API: frozenset({"prepared_trajectories", "datums", "training_metrics"}),
    Mode.WEAVER: frozenset({"is_loss_debug", "batch_inputs"}),
}
"""Folders that only this mode writes into; without any of them a dump is taken as self-hosted."""

FOLDERS = frozenset(
    {
        *("trajectory", "prepared_trajectories", "datums", "old_log_probs", "forward_data", "loss"),
        *("is_loss_debug", "param", "gradient"),
    }
)
"""Folders whose files can be compared."""

RAW = frozenset({"training_metrics", "batch_inputs"})
"""Folders of files without a comparable counterpart: metrics of a step, and inputs, which tell the tokens of rows."""

DERIVED: Mapping[str, Mapping[str, str]] = {
    "prepared_trajectories": {"trajectory": ""},
    "datums": {"batch_inputs": "", "is_loss_debug": "#is_loss_debug"},
    "forward_data": {"forward_data": "", "is_loss_debug": "#is_loss_debug"},
}
"""Type of a file -> the record types of its content, and the suffix of its name for each."""

_FORWARD = frozenset({"log_probs", "entropy", "response_mask", "input_ids"})
_LOSS = frozenset({"loss", "pg_loss", "entropy_loss"})
_ROLLOUTS = frozenset({"tokens", "loss_mask", "reward", "is_val", "log_probs"})

WRITES: Mapping[Mode, Mapping[str, frozenset[str]]] = {
    Mode.SELF_HOSTED: {
        "trajectory": _ROLLOUTS,
        "old_log_probs": frozenset({"old_log_probs"}),
        "forward_data": _FORWARD,
        "loss": _LOSS,
    },
    Mode.REMOTE_API: {
        "trajectory": _ROLLOUTS,
        "batch_inputs": frozenset({"input_ids", "response_mask"}),
        "is_loss_debug": frozenset({"old_log_probs", "advantages", "effective_valid"}),
    },
    Mode.WEAVER: {
        "forward_data": _FORWARD - {"input_ids"},
        "loss": _LOSS,
        "is_loss_debug": frozenset(
            {
                *("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss"),
                *("effective_valid", "loss"),
            }
        ),
    },
}
"""Record types and tensors that a mode can write; parameters are written on request."""
