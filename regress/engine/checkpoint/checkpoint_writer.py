"""Writing of a checkpoint: all of it or nothing, and the removal of old ones only after that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from regress.dump.dump_files import remove_tree
from regress.dump.dump_location import Location, children
from regress.dump.dump_manifest import MANIFEST
from regress.durable_files import TEMPORARY, discard, publish, recover
from regress.engine.checkpoint.checkpoint_manifest import read_manifest, stamps_of, verify, write_manifest
from regress.engine.checkpoint.checkpoint_names import UNFINISHED, checkpoints, parse_name
from regress.engine.checkpoint.checkpoint_tensors import save_weights, write_records, write_tensors
from regress.engine.checkpoint.run_snapshot import Snapshot
from regress.errors import CheckpointError, DumpError, RegressError, reason


def write_checkpoint(snapshot: Snapshot, home: Location, limit: int | None) -> Location:
    """Write a checkpoint into a directory, verify it, and only then remove all but the newest ``limit``.

    On this machine it is a folder with a leading dot until it is complete, and is then renamed. In a store the
    manifest, uploaded last, makes it one.

    Raises:
        RegressError: in one sentence, if it cannot be written; the directory then holds what it held before.
    """
    final: Location
    with written(home, snapshot.name):
        if isinstance(home, Path):
            final = _write_here(snapshot, home)
            verify(final, read=False)  # the stamps are those of what the disk gave back
        else:
            with tempfile.TemporaryDirectory(prefix="regress-checkpoint-") as folder:
                write_files(snapshot, Path(folder))
                final = upload(Path(folder), home / snapshot.name)
            verify(final)
        if limit is not None:
            prune(home, limit)
    return final


@contextmanager
def written(home: Location, name: str) -> Iterator[None]:
    """Turn errors of writing into one sentence that names the checkpoint."""
    try:
        yield
    except (OSError, SafetensorError, DumpError) as error:
        cause = error.__cause__ if isinstance(error, DumpError) else error
        if isinstance(error, DumpError) and not isinstance(cause, OSError):
            raise
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else reason(error)
        raise RegressError(f"""{name} cannot be written to {home} ({why}); free space there or choose another
        trainer.checkpoint_dir: earlier checkpoints are as they were""") from error


def _write_here(snapshot: Snapshot, home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    working = home / f"{TEMPORARY}{snapshot.name}"
    shutil.rmtree(working, ignore_errors=True)
    try:
        write_files(snapshot, working)
        publish(working, home / snapshot.name)
        return home / snapshot.name
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise


def write_files(snapshot: Snapshot, folder: Path) -> None:
    """Write all files of a checkpoint into a folder, the manifest last."""
    folder.mkdir(parents=True, exist_ok=True)
    if snapshot.model is not None:
        save_weights(snapshot.model, snapshot.weights, folder)
    snapshot.tokenizer.save_pretrained(folder)
    for name, content in snapshot.files.items():
        (folder / name).write_bytes(content)
    for name, tensors in snapshot.tensors.items():
        write_tensors(folder / name, tensors)
    if snapshot.records:
        write_records(folder / UNFINISHED, snapshot.records)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes for the owner alone
    write_manifest(folder, stamps_of(folder))


def upload(folder: Path, final: Location) -> Location:
    """Copy a complete checkpoint into a store, its manifest last."""
    if (final / MANIFEST).exists():
        (final / MANIFEST).unlink()
    for name in (*read_manifest(folder), MANIFEST):
        target = final
        for part in name.split("/"):
            target = target / part
        target.write_bytes((folder / name).read_bytes())
    return final


def prune(home: Location, limit: int) -> None:
    """Remove all complete checkpoints but the newest ones; each stops being one before its first file goes."""
    for path in checkpoints(home)[:-limit]:
        if isinstance(path, Path):
            discard(path)
        else:
            (path / MANIFEST).unlink()
            remove_tree(path)


def clean(home: Location) -> None:
    """Finish what a killed process left half done: replaced checkpoints come back, working folders go.

    Raises:
        RegressError: if the directory cannot be written.
    """
    if not isinstance(home, Path):
        return
    with written(home, "a checkpoint"):
        recover(home, _is_name, lambda folder: (folder / MANIFEST).is_file())


def _is_name(name: str) -> bool:
    return parse_name(name) is not None


def require_empty(home: Location) -> None:
    """Refuse to write checkpoints beside those of another run.

    Raises:
        CheckpointError: naming one of them.
    """
    found = [path for path in children(home) if parse_name(path.name) is not None]
    if found:
        raise CheckpointError(f"""{home} holds {found[-1].name} of an earlier run, and the checkpoints of two runs must
        not mix; go on with it (trainer.resume_from_checkpoint=latest), or choose another trainer.checkpoint_dir""")
