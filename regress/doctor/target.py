"""Choice of what is examined: a checkpoint that was named, or the newest one of an output directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from regress.doctor.tree import Tree, Unreadable
from regress.dump.manifest import MANIFEST
from regress.engine.checkpoint.names import STATE, parse_name
from regress.errors import DoctorError

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
    """

    root: Path
    checkpoint: str | None
    named: bool
    others: tuple[str, ...] = ()

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


def find_target(path: str | None, output_dir: str | None, project_root: str) -> Target:
    """Find what to examine.

    Args:
        path: a checkpoint, an output directory, or None.
        output_dir: where the next run's configuration keeps checkpoints, or None where none was given.
        project_root: where to look last.

    Raises:
        DoctorError: if there is nothing, or more than one run to choose from.
    """
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


def _of_run(root: Path) -> Target:
    found = checkpoints(root)
    return Target(root, found[0] if found else None, False, tuple(found[1:]))


def _folder(path: str, stated: str) -> Path:
    if "://" in path:
        raise DoctorError(
            f"{stated} {path} is not on this machine, and the doctor reads files only; copy the checkpoint here and "
            "name the copy"
        )
    try:
        folder = Path(path).expanduser().resolve(strict=True)
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
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
