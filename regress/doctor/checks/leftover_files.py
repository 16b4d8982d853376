"""Leftovers of this tool: half-written files and folders whose writer is gone. Nothing else is ever cleaned up.

A leftover is proven by its name, which only this tool gives (``.partial-checkpoint-6``, ``.pruned-checkpoint-2``,
``.partial-<process>-manifest.json``, ``.wandb_sync_state.json.partial``), by its content, which is the beginning of
such a file, and by its writer: no process of that number runs here, none has it open, and nothing was written for some
minutes, in case the writer runs on another machine that shares the folder.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from regress.doctor.check_context import CheckContext
from regress.doctor.doctor_finding import Fix, Issue, Move, Store, clean, issue
from regress.doctor.safe_tree import Tree, Unreadable
from regress.dump.dump_files import TEMPORARY

_PROC = Path("/proc")
_WRITES = os.O_WRONLY | os.O_RDWR


def writer_of(path: Path) -> int | None:
    """Return the number of another process that has a file open for writing: this one, or one below this folder.

    None where there is none, or where the operating system does not tell.
    """
    start = f"{path}{os.sep}"
    for process, handle, target in _handles():
        if (target == str(path) or target.startswith(start)) and _writes(process, handle):
            return process
    return None


def _handles() -> Iterator[tuple[int, str, str]]:
    own = os.getpid()
    for folder in _PROC.glob("[0-9]*"):
        process = int(folder.name)
        if process == own:
            continue
        try:
            handles = [*(folder / "fd").iterdir()]
        except OSError:
            continue  # gone, or another user's
        for handle in handles:
            try:
                yield process, handle.name, str(handle.readlink())
            except OSError:
                continue


def _writes(process: int, handle: str) -> bool:
    try:
        lines = (_PROC / str(process) / "fdinfo" / handle).read_text().splitlines()
    except OSError:
        return False
    flags = next((line.split()[1] for line in lines if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & _WRITES)


QUIET = 300.0
"""Seconds without a change after which a writer on another machine is taken to be gone."""
_FOLDER = re.compile(r"\.(?P<kind>partial|replaced|pruned)-(?P<target>checkpoint-\d+(?:-update\d+)?)")
_FILE = re.compile(rf"{re.escape(TEMPORARY)}(?P<process>\d{{1,10}})-(?P<target>.+)|\.(?P<beside>.+)\.partial")
_FILES = (
    *(
        r"(regress_state|trainer_state|curriculum_state|wandb_sync_state|manifest)\.json",
        r"config\.(json|yaml)",
    ),
    *(r"(generation|adapter|tokenizer)_config\.json", r"tokenizer\.json", r"special_tokens_map\.json"),
    *(r"chat_template\.jinja", r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"),
    r"(optimizer|reference|unfinished)\.safetensors",
    *(r"step_\d{6,}(_\w+)?\.(safetensors|pt|jsonl|json)", r"(vocab|added_tokens)\.json", r"merges\.txt"),
    *(r"(metrics|eval_samples)\.jsonl", r"README\.md"),
)
_WRITTEN = re.compile("|".join(_FILES))
_BEGINNINGS = {".json": b"{", ".jsonl": b"{", ".safetensors": None, ".pt": b"PK", ".yaml": None, ".txt": None}


def check_leftovers(context: CheckContext) -> Iterator[Issue]:
    """Find half-written files and folders, in the output directory and in its checkpoints."""
    root = context.tree.root
    places = [root, *(root / name for name in _checkpoints(context)), root / "wandb_backup"]
    for place in places:
        if not place.is_dir() or place.is_symlink():
            continue
        for path in sorted(place.glob(".*")):
            if _FOLDER.fullmatch(path.name) or _FILE.fullmatch(path.name):
                yield from _check(context, path)


def _checkpoints(context: CheckContext) -> list[str]:
    return [name for name in (context.target.checkpoint, *context.target.others) if name is not None]


def _check(context: CheckContext, path: Path) -> Iterator[Issue]:
    name = path.relative_to(context.tree.root).as_posix()
    context.claimed.add(name)
    reason = _reason_to_keep(context.tree, path, name)
    folder = _FOLDER.fullmatch(path.name)
    if reason is not None:
        yield issue(
            "unproven_leftover",
            f"{clean(name)} looks half written, but {reason}, so it stays; nothing reads it, remove it if you know it",
            path=name,
        )
    elif folder is not None and folder["kind"] == "replaced" and not context.tree.exists(folder["target"]):
        move = Move(name, folder["target"])
        yield issue(
            "leftover",
            f"{name} is a checkpoint whose successor was never finished, so it is {move.to} again; "
            "regress doctor --clean-only gives it its name back",
            path=name,
            fix=Fix(f"rename {name} to {move.to}", (move,)),
        )
    else:
        yield issue(
            "leftover",
            f"{clean(name)} was left half done by a process that is gone, and nothing reads it; "
            "regress doctor --clean-only moves it away",
            path=name,
            fix=Fix(f"move {clean(name)} into a backup", (Store(name),)),
        )


def _reason_to_keep(tree: Tree, path: Path, name: str) -> str | None:
    """Return why something may not be a leftover of this tool, or None if it is proven."""
    if path.is_symlink():
        return "it is a link"
    file, folder = _FILE.fullmatch(path.name), _FOLDER.fullmatch(path.name)
    if file is not None and file["process"] and _runs(int(file["process"])):
        return f"process {file['process']}, which may write it, runs"
    writer = writer_of(path)
    if writer is not None:
        return f"process {writer} has it open"
    paths = [path] if path.is_file() else [path, *path.rglob("*")]
    youngest = max((part.lstat().st_mtime for part in paths), default=0.0)
    if time.time() - youngest < QUIET:
        return "it changed within the last minutes"
    if folder is not None:
        return _reason_to_keep_folder(tree, path, name)
    if file is None or path.is_dir():
        return "this tool makes no folder of this name"
    return _reason_to_keep_file(tree, name, _target(file))


def _target(match: re.Match[str]) -> str:
    return match["target"] or match["beside"]


def _reason_to_keep_folder(tree: Tree, path: Path, name: str) -> str | None:
    if not path.is_dir():
        return "it is not a folder"
    for file in tree.names(name):
        own = file.rpartition("/")[2]
        match = _FILE.fullmatch(own)
        reason = _reason_to_keep_file(tree, file, _target(match) if match else own)
        if reason is not None:
            return f"in it lies {clean(file)}: {reason}"
    return None


def _reason_to_keep_file(tree: Tree, name: str, target: str) -> str | None:
    if not _WRITTEN.fullmatch(target):
        return f"this tool writes no file {clean(target)}"
    try:
        size = tree.size(name)
        with tree.opened(name) as file:
            head = file.read(9)
    except Unreadable as error:
        return f"it {error}"
    suffix = Path(target).suffix
    start = _BEGINNINGS.get(suffix)
    fits = not head or start is None or head.lstrip().startswith(start)
    if suffix == ".safetensors":
        fits = size < 9 or head[8:9] == b"{"
    return None if fits else f"its content is not that of {clean(target)}"


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
