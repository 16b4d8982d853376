"""Bare files of tensors: weights as Hugging Face and torch save them, in one file or in many.

All tensors of a file, or of the files of a folder, are one record of parameters, by name. Which files of a folder
belong together is told by the index of its shards; a folder without one has `model.safetensors`, `pytorch_model.bin`,
or just files of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from regress.dump.coordinates import Coordinates
from regress.dump.dump_location import Location, children, read_bytes
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.source_readers import Reader, Source
from regress.dump.weight_files import is_tensor_file, tensors_in
from regress.errors import DumpError
from regress.untrusted_files import parse_json

TYPE = "param"
NAME = "tensors"

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
BESIDE = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "scaler.pt")
"""Files that trainers leave beside the weights."""


class TensorFiles(Source):
    """The tensors of a file, or of the files of a folder.

    Raises:
        DumpError: if there is none, a file is damaged, or an index and its files contradict each other.
    """

    system = "files"
    entries: Mapping[str, tuple[str, Coordinates]] = {NAME: (TYPE, Coordinates(0))}

    def __init__(self, path: Location) -> None:
        self.folder = path
        self._tensors = _of_folder(path) if path.is_dir() else tensors_in(path)

    def read(self, name: str) -> Record:
        """Read the one record; its tensors lie in the mapped files."""
        return Record(TYPE, 0, dict(self._tensors))

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True for parameters only."""
        return record_type == TYPE


def _matches(path: Location) -> bool:
    """Return True for a file, or a folder with files of tensors or an index of them."""
    if path.is_file():
        return True
    return any(below.name in INDEXES or is_tensor_file(below) for below in children(path))


READER = Reader("files", _matches, TensorFiles)


def _of_folder(folder: Location) -> dict[str, Array]:
    here = {below.name: below for below in children(folder)}
    index = next((here[name] for name in INDEXES if name in here), None)
    if index is not None:
        return _joined(folder, _shards(folder, index))
    for name in WEIGHTS:
        if name in here:
            return tensors_in(here[name])
    files = [below for below in here.values() if below.name not in BESIDE and is_tensor_file(below)]
    if not files:
        raise DumpError(
            f"{folder} holds no weights: give a checkpoint with one of {', '.join((*INDEXES, *WEIGHTS))}, or a file"
        )
    return _joined(folder, ((file, tensors_in(file)) for file in files))


def _joined(folder: Location, files: Iterable[tuple[Location, dict[str, Array]]]) -> dict[str, Array]:
    """Return the tensors of several files, of which each may be in one only."""
    found: dict[str, Array] = {}
    owner: dict[str, Location] = {}
    for path, entries in files:
        for name, array in entries.items():
            if name in owner:
                raise DumpError(f"""{folder} holds the tensor {name} twice, in {owner[name].name} and in {path.name}:
                give one file, or keep the files of one checkpoint in the folder""")
            found[name], owner[name] = array, path
    return found


def _shards(folder: Location, index: Location) -> Iterator[tuple[Location, dict[str, Array]]]:
    """Yield the shards that an index names, with their tensors."""
    shards = _index(index)
    for shard in dict.fromkeys(shards.values()):
        path = folder / shard
        if not _is_there(path):
            raise DumpError(f"{index} names the shard {shard}, which is missing: copy the checkpoint again")
        tensors = tensors_in(path)
        lost = [name for name, where in shards.items() if where == shard and name not in tensors]
        if lost:
            raise DumpError(f"""{path} lacks {len(lost)} of the tensors that {index.name} promises ({lost[0]}): copy the
            checkpoint again, or save its index anew""")
        unknown = next((name for name in tensors if name not in shards), None)
        if unknown is not None:
            raise DumpError(
                f"{path} holds the tensor {unknown}, which {index.name} does not name: save the index anew"
            )
        yield path, tensors


def _is_there(path: Location) -> bool:
    try:
        return path.is_file()
    except OSError:  # no file can have such a name
        return False


def _index(path: Location) -> dict[str, str]:
    try:
        tree = parse_json(read_bytes(path))
        shards: Any = tree["weight_map"]
        known = {str(name): str(shard) for name, shard in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DumpError(f"{path} is not an index of shards ({error}): copy the checkpoint again") from None
    if not known:
        raise DumpError(f"{path} names no tensor, so there is nothing to compare: copy the checkpoint again")
    if odd := next((shard for shard in known.values() if not shard.isprintable()), None):
        raise DumpError(
            f"{path} names the shard {odd[:80]!r}, which cannot be printed: copy the checkpoint again"
        )
    outside = next(
        (shard for shard in known.values() if "/" in shard or "\\" in shard or ".." in shard), None
    )
    if outside is not None:
        raise DumpError(
            f"{path} names the shard {outside!r} outside of its folder: keep shards beside their index"
        )
    return known
