"""Weights: there, readable, finite, and no pickle. Whole models, sharded ones and adapters."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader
from typing import Any

import ml_dtypes
import numpy as np

from regress.doctor.check_context import CheckContext, mapping
from regress.doctor.doctor_finding import Issue, Severity, clean, issue, shown
from regress.doctor.file_restore import restored
from regress.doctor.safe_tree import HEADER_LIMIT, Missing, Unreadable, Unsafe, parsed

WHOLE, ADAPTER, INDEX = "model.safetensors", "adapter_model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = ("pytorch_model.bin", "adapter_model.bin", "pytorch_model.bin.index.json")
CHUNK = 16 * 2**20

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
BITS = {"BOOL": 8, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {f"{kind}{bits}": bits for kind in "IU" for bits in (8, 16, 32, 64)}
BITS |= {name: dtype.itemsize * 8 for name, dtype in DTYPES.items()}
BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def check_weights(context: CheckContext) -> Iterator[Issue]:
    """Check that the weights of the checkpoint can be loaded; those that a service keeps are not looked at."""
    if in_service(context):
        context.unchecked.append(
            "the weights lie in the training service, which verifies them when they are loaded"
        )
        return
    names = list(_weight_files(context))
    adapter = is_adapter(context)
    index = context.target.file(INDEX)
    if not adapter and context.tree.exists(index):
        names, damage = _shards(context, index)
        if damage is not None:
            context.claimed.add(index)
            yield issue("corrupted_model_weights", _sentence(index, damage), path=index)
    elif not names:
        yield _without_weights(context, adapter)
    for name in names:
        yield from _check_file(context, context.target.file(name))


def in_service(context: CheckContext) -> bool:
    """Return True for a checkpoint of a run whose model lies in a service."""
    return bool(context.part("remote").get("path")) and not context.has(WHOLE)


def is_adapter(context: CheckContext) -> bool:
    """Return True for an adapter (LoRA): its base model lies elsewhere, and config.json need not be there."""
    names = (ADAPTER, ADAPTER_CONFIG, "adapter_model.bin")
    return any(context.has(name) for name in names) and not context.has(WHOLE)


def _weight_files(context: CheckContext) -> Iterator[str]:
    for name in (WHOLE, ADAPTER):
        if context.tree.exists(context.target.file(name)):
            yield name


def _shards(context: CheckContext, index: str) -> tuple[list[str], str | None]:
    """Return the files that an index names, or what is wrong with it."""
    try:
        named = mapping(context.tree.object(index).get("weight_map")).values()
    except Unreadable as error:
        return [], str(error)
    if not named or not all(isinstance(name, str) and name.endswith(".safetensors") for name in named):
        return [], "names no files of weights"
    return sorted(set(named)), None


def _without_weights(context: CheckContext, adapter: bool) -> Issue:
    pickles = [name for name in PICKLES if context.tree.exists(context.target.file(name))]
    folder = context.target.checkpoint
    if pickles:
        name = context.target.file(pickles[0])
        context.claimed |= {context.target.file(name) for name in (WHOLE, ADAPTER)}
        found = issue(
            "pickled_weights",
            f"{name} is a pickle, which can hold code, and a resume reads weights from safetensors only; convert it "
            "where you trust it (model.save_pretrained writes model.safetensors), or take an earlier checkpoint",
            path=name,
        )
        return (
            replace(found, severity=Severity.LOW) if context.foreign else found
        )  # nobody resumes from it here
    files = ADAPTER if adapter else WHOLE
    path = context.target.file(files)
    context.claimed.add(path)
    return issue(
        "missing_model_weights",
        f"{folder} holds no {files}, but a checkpoint has its weights in it; copy it again or take an earlier "
        "checkpoint",
        path=path,
        fix=restored(context, path),
    )


def _check_file(context: CheckContext, path: str) -> Iterator[Issue]:
    try:
        with context.tree.opened(path) as file:
            size = context.tree.size(path)
            table, start = _header(file, size)
            lost = _not_finite(file, table, start) if context.deep else None
    except Missing:
        context.claimed.add(path)
        yield issue(
            "missing_model_weights",
            f"{path} is missing, but the index of the weights names it; copy the checkpoint again or take an earlier "
            "one",
            path=path,
            fix=restored(context, path),
        )
    except Unsafe as error:
        context.claimed.add(path)
        yield issue(
            "unsafe_path",
            f"{clean(path)} {error}, so it is not read; put the file itself there",
            path=path,
            fix=restored(context, path),
        )
    except Unreadable as error:
        context.claimed.add(path)
        yield issue(
            "corrupted_model_weights", _sentence(path, str(error)), path=path, fix=restored(context, path)
        )
    else:
        if lost is not None:
            yield issue(
                "nonfinite_weights",
                f"{path} holds weights that are not finite, first in {shown(lost)}, so training has diverged before it "
                "was saved; take an earlier checkpoint, and lower optimizer.learning_rate",
                path=path,
                evidence={"tensor": lost},
            )


def _sentence(path: str, damage: str) -> str:
    return f"{path} {damage}; copy the checkpoint again or take an earlier one"


def _header(file: BufferedReader, size: int) -> tuple[dict[str, tuple[str, int, int]], int]:
    """Return type and place of each tensor, and where their bytes begin; raises `Unreadable`."""
    if size < 8:
        raise Unreadable(f"has {size} bytes, fewer than the head of a safetensors file")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(size - 8, HEADER_LIMIT):
        raise Unreadable(f"announces a header of {length} bytes and has {size} bytes in all")
    header = parsed(file.read(length))
    if not isinstance(header, dict):
        raise Unreadable("has a header that is not a JSON object")
    header.pop("__metadata__", None)
    table = {name: _place(name, row) for name, row in header.items()}
    end = 0
    for name, (_, start, stop) in sorted(table.items(), key=lambda item: item[1][1:]):
        if start != end:
            raise Unreadable(f"has a gap or an overlap before the tensor {shown(name)}")
        end = stop
    if end != size - 8 - length:
        raise Unreadable(f"holds {size - 8 - length} bytes of tensors, but its header describes {end}")
    if not table:
        raise Unreadable("holds no tensors")
    return table, 8 + length


def _place(name: str, row: Any) -> tuple[str, int, int]:
    match row:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]} if (
            dtype in BITS and 0 <= start <= stop
        ):
            elements = 1
            for extent in shape:
                if type(extent) is not int or not 0 <= extent < 2**48 or elements >= 2**62:
                    break
                elements *= extent
            else:
                if elements * BITS[dtype] == (stop - start) * 8:
                    return dtype, start, stop
    raise Unreadable(f"has a header that does not describe the tensor {shown(name)}")


def _not_finite(file: BufferedReader, table: dict[str, tuple[str, int, int]], start: int) -> str | None:
    """Return the name of the first tensor that holds a NaN or an infinity."""
    for name, (dtype, first, last) in sorted(table.items(), key=lambda item: item[1][1]):
        if dtype not in DTYPES:
            continue
        file.seek(start + first)
        left = last - first
        while left:
            data = file.read(min(left, CHUNK))
            if not data:
                raise Unreadable("became shorter while it was read")
            left -= len(data)
            if not _finite(np.frombuffer(data, DTYPES[dtype])):
                return name
    return None


def _finite(values: np.ndarray[Any, np.dtype[Any]]) -> bool:
    return bool(np.isfinite(values).all())
