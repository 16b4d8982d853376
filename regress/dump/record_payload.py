"""Records as nested plain dicts under the keys of NexRL's dump tables, for the formats `pt` and `jsonl`.

Source of the keys: NexRL `nexrl/utils/data_dumper.py`, v1.4.0. Beside them stands one key of our own,
`regress`, for what those tables have no place for (coordinates, metadata, exact element types, checksum).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from regress.dump.file_damage import Damage
from regress.dump.nexrl_trajectories import trajectory_lists, trajectory_tensors
from regress.dump.numpy_arrays import DTYPES, Array, canonical_nans, dtype_name, is_float
from regress.dump.record import Record, from_head, replace_tensors, tensor_table

Payload: TypeAlias = dict[str, Any]
AsArray: TypeAlias = Callable[[Any], Array]

_NESTED = {"param": "params", "gradient": "gradients", "activations": "tensors", "optimizer": "tensors"}
_SCALARS = {"loss": ("loss", "pg_loss", "entropy_loss")}  # plain floats in NexRL's table


def normalized(record: Record) -> Record:
    """Return `record` with default NaN patterns where its payload holds plain floats, which cannot keep others."""
    names = ("log_probs",) if record.type == "trajectory" else _SCALARS.get(record.type, ())
    return replace_tensors(record, {n: canonical_nans(a) for n, a in record.tensors.items() if n in names})


def to_payload(record: Record) -> Payload:
    """Return plain values and numpy arrays under NexRL's keys, plus `regress`; `record` is `normalized`."""
    payload: Payload = {"step": record.step}
    if record.rank is not None:
        payload["rank"] = record.rank
    if record.micro is not None:
        payload["micro_idx"] = record.micro
    if record.type == "trajectory":
        payload |= trajectory_lists(record)
    elif record.type in _NESTED:
        payload[_NESTED[record.type]] = dict(record.tensors)
        if record.type in ("param", "gradient") and len(record.tensors) == 1:
            payload |= _single(record)
    else:
        payload |= {name: _leaf(record.type, name, array) for name, array in record.tensors.items()}
        payload |= _companions(record)
    payload["regress"] = {**record.head(), "sha256": record.checksum()}
    return payload


def from_payload(payload: Mapping[str, Any], as_array: AsArray) -> Record:
    """Return the record that `to_payload` encoded, verified against its checksum; `as_array` reads one tensor.

    Raises `Damage` saying what does not fit.
    """
    head = payload["regress"]
    table = tensor_table(head)
    type = head.get("type")
    if type == "trajectory":
        tensors = trajectory_tensors(payload, {name: DTYPES[dtype] for name, dtype, _ in table})
    else:
        leaves = payload.get(_NESTED[type]) if type in _NESTED else payload
        if not isinstance(leaves, Mapping):
            raise Damage(f"it lacks the tensors of a {type} record")
        tensors = {name: _array(leaves, name, DTYPES[dtype], as_array) for name, dtype, _ in table}
    record = from_head(head, tensors)
    if table != [(name, dtype_name(array.dtype), array.shape) for name, array in tensors.items()]:
        raise Damage("its tensors have other names, shapes or element types than were recorded")
    if record.checksum() != head.get("sha256"):
        raise Damage("its content does not match its checksum")
    return record


def _array(leaves: Mapping[str, Any], name: str, dtype: np.dtype[Any], as_array: AsArray) -> Array:
    if name not in leaves:
        raise Damage(f"it lacks the tensor {name!r}")
    leaf = leaves[name]
    return np.asarray(leaf, dtype=dtype) if isinstance(leaf, float) else as_array(leaf)


def _leaf(type: str, name: str, array: Array) -> Any:
    is_scalar = name in _SCALARS.get(type, ()) and array.shape == () and is_float(array.dtype)
    return float(array) if is_scalar else array


def _single(record: Record) -> Payload:
    """Return NexRL's keys for the one parameter it dumps; the statistics are computed in float64."""
    ((name, array),) = record.tensors.items()
    count = max(array.size, 1)
    with np.errstate(all="ignore"):  # a broken parameter has broken statistics, and no warnings
        values = array.astype(np.float64)
        mean = float(values.sum()) / count
        norm = float(np.sqrt((values**2).sum()))
        std = float(np.sqrt(((values - mean) ** 2).sum() / max(count - 1, 1)))
    return {
        "param_name": name,
        record.type: array,
        "shape": list(array.shape),
        "dtype": f"torch.{dtype_name(array.dtype)}",
        "norm": norm,
        "mean": mean,
        "std": std,
    }


def _companions(record: Record) -> Payload:
    """Return the shapes and metadata that NexRL keeps beside the tensors."""
    found: Payload = {}
    if record.type == "old_log_probs" and "old_log_probs" in record.tensors:
        found["shape"] = list(record.tensors["old_log_probs"].shape)
    if record.type == "forward_data":
        for name in ("log_probs", "entropy"):
            if name in record.tensors:
                found[f"{name}_shape"] = list(record.tensors[name].shape)
    for key in ("batch_info", "metrics", "extra_info"):
        if key in record.meta:
            found[key] = record.meta[key]
    return found
