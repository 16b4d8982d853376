"""Ways to break a dump: each changes, drops or moves records of its first update, and leaves all others as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from regress import DumpReader, Record, Recorder

Breakage = Callable[[Record], "Record | None"]


def write_broken(dump: Path, folder: Path, breakage: Breakage) -> None:
    """Write the records of a dump to a new folder, each as ``breakage`` returns it; None leaves it out."""
    reader = DumpReader(dump)
    records = [record for record in map(breakage, reader.records()) if record is not None]
    recorder = Recorder(
        folder,
        options={record.type: True for record in records},
        format=reader.manifest.format,
        provenance=reader.manifest.provenance,
        fsync=False,
    )
    for record in records:
        recorder.put(record)
    recorder.close()


def _of_first_update(type: str, change: Breakage) -> Breakage:
    def broken(record: Record) -> Record | None:
        first = record.step == 0 and not record.update and not record.rank and not record.micro
        return change(record) if record.type == type and first else record

    return broken


def _without(type: str) -> Breakage:
    return _of_first_update(type, lambda record: None)


def _without_tensors(type: str, part: str) -> Breakage:
    def change(record: Record) -> Record:
        kept = {name: array for name, array in record.tensors.items() if part not in name}
        return replace(record, tensors=kept)

    return _of_first_update(type, change)


def _edited(type: str, part: str, edit: Callable[[Any], None]) -> Breakage:
    def change(record: Record) -> Record:
        name = next((name for name in record.tensors if part in name), None)
        if name is None:
            return record
        array = record.tensors[name].copy()
        edit(array.reshape(-1))
        return replace(record, tensors={**record.tensors, name: array})

    return _of_first_update(type, change)


def _scaled(flat: Any) -> None:
    flat *= 1.01


def _set(value: float, at: Any = slice(None)) -> Callable[[Any], None]:
    def edit(flat: Any) -> None:
        flat[at] = value

    return edit


def _renamed_samples(record: Record) -> Record:
    strangers = [["stranger", number] for number, _ in enumerate(record.meta["samples"])]
    return replace(record, meta={**record.meta, "samples": strangers})


def _without_layout(record: Record) -> Record:
    return replace(record, meta={key: value for key, value in record.meta.items() if key != "layout"})


def _wrong_shard(record: Record) -> Record:
    shards = {name: {"shape": [1], "ranges": [[[0, 9]]]} for name in list(record.tensors)[:1]}
    return replace(record, meta={**record.meta, "shards": shards})


def _in_float32(record: Record) -> Record:
    floats = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in record.tensors.items()}
    return replace(record, tensors=floats)


_TYPES = (
    "batch_inputs",
    "activations",
    "forward_data",
    "is_loss_debug",
    "loss",
    "token_gradient",
    "gradient",
    "param",
    "optimizer",
    "metrics",
)
_LEFT_OUT = {
    "forward_data": "log_probs",
    "is_loss_debug": "advantages",
    "gradient": "q_proj",
    "param": "norm",
    "activations": "lm_head",
    "batch_inputs": "response_mask",
    "optimizer": "exp_avg_sq",
}
_SCALED = {
    "forward_data": "log_probs",
    "is_loss_debug": "advantages",
    "gradient": "q_proj",
    "param": "norm",
    "activations": "lm_head",
    "loss": "loss",
    "token_gradient": "token_gradient",
    "optimizer": "exp_avg",
    "metrics": "loss",
}
_NOT_A_NUMBER = {"forward_data": "entropy", "gradient": "v_proj", "activations": "layers.0"}

BREAKAGES: dict[str, Breakage] = {
    "healthy": lambda record: record,
    **{f"without-{record_type}": _without(record_type) for record_type in _TYPES},
    **{
        f"without-{record_type}-{part}": _without_tensors(record_type, part)
        for record_type, part in _LEFT_OUT.items()
    },
    **{
        f"scaled-{record_type}-{part}": _edited(record_type, part, _scaled)
        for record_type, part in _SCALED.items()
    },
    **{
        f"nan-{record_type}-{part}": _edited(record_type, part, _set(np.nan, 1))
        for record_type, part in _NOT_A_NUMBER.items()
    },
    "zero-gradient": _edited("gradient", "q_proj", _set(0)),
    "mask-of-ones": _edited("batch_inputs", "response_mask", _set(1)),
    "mask-of-zeros": _edited("forward_data", "response_mask", _set(0)),
    "other-token": _edited("batch_inputs", "input_ids", _set(3, 2)),
    "other-samples": _of_first_update("forward_data", _renamed_samples),
    "without-layout": _of_first_update("forward_data", _without_layout),
    "wrong-shard": _of_first_update("param", _wrong_shard),
    "other-grad-norm": _of_first_update(
        "gradient", lambda record: replace(record, meta={**record.meta, "grad_norm": 77.0})
    ),
    "extra-tensor": _of_first_update(
        "is_loss_debug", lambda record: replace(record, tensors={**record.tensors, "surprise": np.ones(3)})
    ),
    "moved-microbatch": _of_first_update("forward_data", lambda record: replace(record, micro=7)),
    "float32": _of_first_update("forward_data", _in_float32),
}
