"""Tensors of a checkpoint beside the weights, as files of safetensors: optimizer, reference and unfinished step.

A checkpoint of schema 1 holds them as a dump of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regress.dump.arrays import to_numpy, to_torch
from regress.dump.jsontext import dumps, loads
from regress.dump.reader import DumpReader
from regress.dump.record import Record
from regress.engine.checkpoint.names import DUMP, OPTIMIZER, REFERENCE, UNFINISHED
from regress.engine.checkpoint.state import CheckpointState
from regress.errors import CheckpointError, reason

_PLAIN = {"format": "pt"}  # as transformers and others write it
_RECORDS = "records"
"""Entry of a file's metadata: type of each record -> its metadata, as JSON."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as a file of safetensors, those that share memory each by itself."""
    whole = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    save_file(whole, path, {**_PLAIN, **(metadata or {})})


def is_plain(path: Path) -> bool:
    """Return True for a file of safetensors that is no record of a dump, such as a checkpoint's optimizer."""
    try:
        with safe_open(path, framework="pt") as file:
            return bool(file.metadata() == _PLAIN)
    except (OSError, SafetensorError):
        return False


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file of safetensors; raises `CheckpointError` if it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}, file.metadata() or {}
    except (OSError, SafetensorError, MemoryError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason(error)}); copy the checkpoint again, or resume from another one"
        ) from error


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write the records of an unfinished step, one of each type, as one file: tensors ``<type>/<name>``."""
    found = {record.type: record for record in records}
    tensors = {
        f"{type}/{name}": to_torch(a) for type, one in found.items() for name, a in one.tensors.items()
    }
    write_tensors(path, tensors, {_RECORDS: dumps({type: one.meta for type, one in found.items()})})


def optimizer_of(state: CheckpointState) -> dict[str, Tensor]:
    """Return the tensors ``<parameter>/<state>`` of a checkpoint's optimizer.

    Raises:
        CheckpointError: if it holds none, or they cannot be read.
    """
    return _tensors_of(state, OPTIMIZER, "optimizer", "state of the optimizer")


def reference_of(state: CheckpointState) -> dict[str, Tensor]:
    """Return the weights of a checkpoint's reference model; raises `CheckpointError` as `optimizer_of` does."""
    return _tensors_of(state, REFERENCE, "param", "reference model")


def unfinished_of(state: CheckpointState) -> dict[str, Record]:
    """Return the records of a checkpoint's unfinished step by their types.

    Raises:
        CheckpointError: if it holds none, or they cannot be read.
        DumpError: if it is of schema 1, and a record is damaged.
    """
    path = Path(str(state.path)) / UNFINISHED
    if not path.exists():
        dump = _dumped(state)
        if dump is None:
            raise _missing(state, "unfinished step")
        return {record.type: record for record in dump.records(step=state.step)}
    tensors, metadata = read_tensors(path)
    try:
        return {
            type: Record(
                type,
                state.step,
                {
                    name.removeprefix(f"{type}/"): to_numpy(value, name)
                    for name, value in tensors.items()
                    if name.startswith(f"{type}/")
                },
                meta,
            )
            for type, meta in loads(metadata[_RECORDS]).items()
        }
    except (KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no unfinished step ({reason(error)}); resume from another checkpoint"
        ) from None


def _tensors_of(state: CheckpointState, name: str, type: str, what: str) -> dict[str, Tensor]:
    path = Path(str(state.path)) / name
    if path.exists():
        return read_tensors(path)[0]
    dump = _dumped(state)
    found = [] if dump is None else [*dump.records(type, state.step)]
    if len(found) != 1:
        raise _missing(state, what)
    return {name: to_torch(array.copy()) for name, array in found[0].tensors.items()}


def _dumped(state: CheckpointState) -> DumpReader | None:
    folder = Path(str(state.path)) / DUMP
    return DumpReader(folder) if folder.is_dir() else None


def _missing(state: CheckpointState, what: str) -> CheckpointError:
    return CheckpointError(f"{state.path} holds no {what}; resume from another checkpoint")
