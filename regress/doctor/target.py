"""Choice of what is examined: a checkpoint that was named, or the newest one of an output directory."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.doctor.fetch import fetch
from regress.doctor.tree import Tree, Unreadable
from regress.dump.location import is_remote, local_path
from regress.dump.manifest import MANIFEST
from regress.dump.remote import open_url
from regress.engine.checkpoint.names import STATE, parse_name
from regress.errors import DoctorError, DumpError

_OF_CHECKPOINT = (
    *("regress_state.json", "trainer_state.json", "config.json", "adapter_config.json"),
    *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
)
_OF_RUN = ("metrics.jsonl", "curriculum_state.json", "wandb_sync_state.json", "final")


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
        raise DoctorError(
            f"{start} holds no run: no checkpoint-<step>, metrics.jsonl or outputs/<name>; name the checkpoint or the "
            "output directory: regress doctor PATH"
        )
    several = ", ".join(str(run) for run in runs[:4])
    raise DoctorError(
        f"{start} holds {len(runs)} runs ({several}{', ...' if len(runs) > 4 else ''}); name the one to examine: "
        "regress doctor PATH"
    )


def _named(path: str) -> Target:
    folder = _folder(path, "CHECKPOINT")
    if parse_name(folder.name) is None and (checkpoints(folder) or _looks_like_run(folder)):
        return _of_run(folder)
    if parse_name(folder.name) is None and not any((folder / name).exists() for name in _OF_CHECKPOINT):
        raise DoctorError(
            f"{path} is neither a checkpoint nor the output directory of a run: it holds no "
            "regress_state.json, trainer_state.json, weights, checkpoint-<step> or metrics.jsonl; correct the path"
        )
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
        told = getattr(error, "strerror", None) or error
        raise DoctorError(f"{stated} {path} cannot be looked at ({told}); correct the path") from None
    if not is_folder:
        raise DoctorError(
            f"{stated} {path} is a file, but a checkpoint is a folder; name the folder that holds it"
        )
    return folder


def _runs_in(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if _is_folder(path) and (checkpoints(path) or _looks_like_run(path)))


def _looks_like_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _OF_RUN)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
