"""Choice of what is examined: a checkpoint that was named, or the newest one of an output directory.

What lies in a store is copied first, as far as the checks look at it.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.doctor.safe_tree import HEADER_LIMIT, JSON_LIMIT, Tree, Unreadable
from regress.dump.dump_location import Location, children, is_remote, local_path, size
from regress.dump.dump_manifest import MANIFEST
from regress.dump.object_store import RemotePath, open_url
from regress.engine.checkpoint import checkpoint_names as names
from regress.engine.checkpoint.checkpoint_names import CURRICULUM_STATE, STATE, parse_name
from regress.errors import DoctorError, DumpError

SMALL = 2**20
"""Bytes of files that are always copied whole."""
_OF_RUN = ("metrics.jsonl", CURRICULUM_STATE, "wandb_sync_state.json")
_HEAD = 8  # bytes that tell the length of a safetensors header


def fetch(url: str, folder: Path, *, whole: bool) -> tuple[Path, str | None, tuple[str, ...]]:
    """Copy a checkpoint, or the newest one of a run with the run's own files, into a folder.

    Args:
        whole: copy all bytes; otherwise those of large files beyond their headers are holes of the same size, which
            is enough where no content is compared.

    Returns:
        The copy of the output directory, the checkpoint's name in it, and the names of the run's other checkpoints,
        newest first.

    Raises:
        DoctorError: if there is neither.
        DumpError: if the store cannot be read.
    """
    place = open_url(url)
    if parse_name(place.name) is not None or any((place / name).is_file() for name in (STATE, MANIFEST)):
        if not place.is_dir():
            raise DoctorError(f"CHECKPOINT {place} is not a folder with anything in it; correct the URL")
        root = folder / "run"
        _copy(place, root / place.name, whole)
        return root, place.name, ()
    found = names.checkpoints(place)[::-1]
    files = [place / name for name in _OF_RUN if (place / name).is_file()]
    if not found and not files:
        raise DoctorError(f"""CHECKPOINT {place} is neither a checkpoint nor the directory of a run: it holds no
        checkpoint-<step> with {MANIFEST}, and no metrics.jsonl; correct the URL""")
    root = folder / (place.name or "run")
    for path in files:
        _write(root / path.name, path, whole=True)
    for other in found[1:]:
        for name in (MANIFEST, STATE):
            if (other / name).is_file():
                _write(root / other.name / name, other / name, whole=True)
    if found:
        _copy(found[0], root / found[0].name, whole)
    return root, found[0].name if found else None, tuple(path.name for path in found[1:])


def _copy(source: Location, target: Path, whole: bool) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, path in _files(source, ""):
        _write(target / name, path, whole)


def _files(folder: Location, prefix: str) -> Iterator[tuple[str, Location]]:
    for path in children(folder):
        if path.name in ("", ".", "..") or "\0" in path.name:
            continue
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        else:
            yield f"{prefix}{path.name}", path


def _write(target: Path, source: Location, whole: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    length = size(source)
    text = source.suffix in (".json", ".jsonl") and length <= JSON_LIMIT
    if whole or text or length <= SMALL or not isinstance(source, RemotePath):
        target.write_bytes(source.read_bytes())
        return
    with target.open("wb") as file:
        if source.suffix == ".safetensors":
            file.write(source.read_start(_HEAD + _header_length(source.read_start(_HEAD), length)))
        file.truncate(length)


def _header_length(head: bytes, length: int) -> int:
    (size,) = struct.unpack("<Q", head)
    return min(int(size), length - _HEAD, HEADER_LIMIT)


_OF_CHECKPOINT = (
    *("regress_state.json", "trainer_state.json", "config.json", "adapter_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
)
_SHOW_A_RUN = (*_OF_RUN, "final")


@dataclass(frozen=True)
class Target:
    """Place of a run and of one of its checkpoints.

    Attributes:
        root: the output directory; nothing outside of it is changed.
        checkpoint: the name of the checkpoint's folder in it, or None where there is none.
        named: the checkpoint was named, not chosen as the newest.
        others: names of the other checkpoints, newest first.
        store: the URL that `root` is a copy of, without credentials; None for a folder of this machine.
        copy: keeps the copy for as long as the target is in use.
    """

    root: Path
    checkpoint: str | None
    named: bool
    others: tuple[str, ...] = ()
    store: str | None = None
    copy: Any = field(default=None, compare=False, repr=False)

    @property
    def shown_root(self) -> str:
        """The output directory as people know it."""
        return self.store or str(self.root)

    @property
    def shown(self) -> str:
        """Return the name of the target: the checkpoint, or the output directory without one."""
        return self.shown_root if self.checkpoint is None else f"{self.shown_root}/{self.checkpoint}"

    def file(self, name: str) -> str:
        """Return the path of a file of the checkpoint, relative to `root`."""
        return f"{self.checkpoint}/{name}"


def checkpoints(root: Path) -> list[str]:
    """Return the names of the checkpoint folders of an output directory: complete ones first, newest first.

    The first is the one that a resume from ``latest`` takes. Newer is what a later segment of the run wrote; a
    complete checkpoint whose state cannot be read counts as the newest.
    """
    tree = Tree(root)
    names = [
        path.name for path in tree.root.iterdir() if parse_name(path.name) is not None and _is_folder(path)
    ]
    return sorted(names, key=lambda name: _age(tree, name), reverse=True)


def _age(tree: Tree, name: str) -> tuple[bool, float, tuple[int, int] | None]:
    try:
        segment = float(tree.object(f"{name}/{STATE}")["segment"])
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError):
        segment = float("inf")
    return tree.is_file(f"{name}/{MANIFEST}"), segment, parse_name(name)


def find_target(path: str | None, output_dir: str | None, project_root: str, *, whole: bool = True) -> Target:
    """Find what to examine.

    Args:
        whole: of what lies in a store, copy all bytes and not only those that headers and sizes need.
        path: a checkpoint or an output directory, or the URL of one, or None.
        output_dir: where the next run's configuration keeps checkpoints, or None where none was given.
        project_root: where to look last.

    Raises:
        DoctorError: if there is nothing, or more than one run to choose from.
    """
    for given in (path, output_dir):
        if given is not None and is_remote(given):
            return _of_store(given, whole)
        if given is not None:
            break
    if path is not None:
        return _named(path)
    if output_dir is not None:
        return _of_run(_folder(output_dir, "trainer.checkpoint_dir"))
    start = _folder(project_root, "--project-root")
    if checkpoints(start) or _looks_like_run(start):
        return _of_run(start)
    runs = [*_runs_in(start.glob("*")), *_runs_in(start.glob("outputs/*"))]
    if len(runs) == 1:
        return _of_run(runs[0])
    if not runs:
        raise DoctorError(f"""{start} holds no run: no checkpoint-<step>, metrics.jsonl or outputs/<name>; name the
        checkpoint or the output directory: regress doctor PATH""")
    several = ", ".join(str(run) for run in runs[:4])
    raise DoctorError(f"""{start} holds {len(runs)} runs ({several}{", ..." if len(runs) > 4 else ""}); name the one to
    examine: regress doctor PATH""")


def _named(path: str) -> Target:
    folder = _folder(path, "CHECKPOINT")
    if parse_name(folder.name) is None and (checkpoints(folder) or _looks_like_run(folder)):
        return _of_run(folder)
    if parse_name(folder.name) is None and not any((folder / name).exists() for name in _OF_CHECKPOINT):
        raise DoctorError(f"""{path} is neither a checkpoint nor the output directory of a run: it holds no
        regress_state.json, trainer_state.json, weights, checkpoint-<step> or metrics.jsonl; correct the path""")
    others = [name for name in checkpoints(folder.parent) if name != folder.name]
    return Target(folder.parent, folder.name, True, tuple(others))


class _Copy:
    """Temporary folder that goes with the last target that refers to it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="regress-doctor-")).resolve()
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)


def _of_store(url: str, whole: bool) -> Target:
    copy = _Copy()
    root, checkpoint, others = fetch(url, copy.folder, whole=whole)
    shown = str(open_url(url))
    named = checkpoint is not None and shown.endswith(f"/{checkpoint}")
    if named:
        shown = shown.rpartition("/")[0]
    return Target(root, checkpoint, named, others, shown, copy)


def _of_run(root: Path) -> Target:
    found = checkpoints(root)
    return Target(root, found[0] if found else None, False, tuple(found[1:]))


def _folder(path: str, stated: str) -> Path:
    try:
        folder = local_path(path).expanduser().resolve(strict=True)
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError, DumpError) as error:
        why = getattr(error, "strerror", None) or error
        raise DoctorError(f"{stated} {path} cannot be looked at ({why}); correct the path") from None
    if not is_folder:
        raise DoctorError(
            f"{stated} {path} is a file, but a checkpoint is a folder; name the folder that holds it"
        )
    return folder


def _runs_in(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if _is_folder(path) and (checkpoints(path) or _looks_like_run(path)))


def _looks_like_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _SHOW_A_RUN)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
