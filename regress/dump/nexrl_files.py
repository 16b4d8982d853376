"""Files that NexRL wrote itself, recognized by their keys, as records. They carry no checksum.

Source of the tables: NexRL `nexrl/utils/data_dumper.py`, v1.4.0. A payload with any other key is refused, so
that a damaged file of our own is never taken for one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regress.dump.coordinates import Coordinates
from regress.dump.file_damage import Damage
from regress.dump.nexrl_trajectories import foreign_trajectories
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record

_LOCAL = {"step", "rank", "micro_idx"}
_STATISTICS = {"step", "rank", "param_name", "shape", "dtype", "norm", "mean", "std"}
_TABLES = {
    "trajectory": {"step", "num_trajectories", "trajectories"},
    "old_log_probs": {"step", "old_log_probs", "shape", "batch_info"},
    "forward_data": _LOCAL
    | {
        "log_probs",
        "entropy",
        "response_mask",
        "input_ids",
        "log_probs_shape",
        "entropy_shape",
        "extra_info",
    },
    "loss": _LOCAL | {"loss", "pg_loss", "entropy_loss", "metrics", "extra_info"},
    "param": _STATISTICS | {"param"},
    "gradient": _STATISTICS | {"gradient"},
}
_MARKS = {"trajectory": "trajectories", "forward_data": "log_probs"}  # else the type's own name
_TENSORS = {"old_log_probs", "log_probs", "entropy", "response_mask", "input_ids"}
_SCALARS = {"loss", "pg_loss", "entropy_loss"}


def read_foreign(payload: Any, as_array: Callable[[Any], Array] = np.asarray) -> Record:
    """Return the record of a payload without a `regress` block; raises `Damage` unless NexRL writes such payloads."""
    if not isinstance(payload, dict) or (type := _type_of(payload)) is None:
        raise Damage("it ends without its checksum, or is not a record")
    step = payload["step"] if isinstance(payload.get("step"), int) else 0
    if type == "trajectory":
        return foreign_trajectories(payload, step)
    place = Coordinates(step, rank=payload.get("rank"), micro=payload.get("micro_idx"))
    if type in ("param", "gradient"):
        tensors = {str(payload["param_name"]): as_array(payload[type])}
    else:
        tensors = {name: as_array(payload[name]) for name in _TENSORS & payload.keys()}
        tensors |= {name: np.asarray(payload[name], np.float64) for name in _SCALARS & payload.keys()}
    meta = {key: payload[key] for key in payload if key not in _TENSORS | _SCALARS | _LOCAL | {type}}
    return Record.of(type, place, dict(sorted(tensors.items())), meta)


def _type_of(payload: Mapping[str, Any]) -> str | None:
    for type, keys in _TABLES.items():
        if _MARKS.get(type, type) in payload and payload.keys() <= keys:
            return type
    return None
