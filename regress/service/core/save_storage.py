"""Saves on disk: whole or not there, each file with its hash; their paths are ``<model_id>/<kind>/<name>``."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Collection
from pathlib import Path

from regress.dump.dump_files import remove_tree
from regress.durable_files import TEMPORARY, publish
from regress.engine.checkpoint.checkpoint_manifest import stamps_of, verify, write_manifest
from regress.errors import DumpError, RegressError, reason
from regress.service.service_api import SAVE_NAME, SaveKind, ServiceError


def checked_name(name: str) -> str:
    """Return the name of a save; raises `ServiceError` unless it can be the name of a folder anywhere."""
    if not isinstance(name, str) or not SAVE_NAME.fullmatch(name):
        raise ServiceError(f"""{name!r} is not a name of a save; use 1 to 128 letters, digits, dots, dashes and
        underscores, with no dot or dash first""")
    return name


def save_path(model_id: str, kind: SaveKind, name: str) -> str:
    """Return the path by which a save is loaded."""
    return f"{model_id}/{kind.value}/{name}"


CONTENT = "checkpoint"
"""Folder beside the manifest of what the host wrote, which allows no other files in it."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SaveStore:
    """Folders of saves below the state directory; a folder is written once and never changed.

    Args:
        root: folder of all saves.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, folder: str) -> Path:
        """Return where the host's files of a folder lie."""
        return self._root / folder / CONTENT

    def write(self, stem: str, content: Callable[[Path], int]) -> tuple[str, int]:
        """Write a save.

        Args:
            stem: first part of the folder's name.
            content: writes the save into a folder that does not exist, and returns the model's step.

        Returns:
            The folder's name, and the step.

        Raises:
            ServiceError: what ``content`` raises, or that the disk is full; nothing is left then.
        """
        name = f"{stem}-{secrets.token_hex(4)}"
        temporary = self._root / f"{TEMPORARY}{name}"
        try:
            temporary.mkdir()
            step = content(temporary / CONTENT)
            write_manifest(temporary, stamps_of(temporary))
            publish(temporary, self._root / name)
        except BaseException as error:
            remove_tree(temporary)
            if isinstance(error, OSError | DumpError):
                raise unsaved(error) from error
            raise
        return name, step

    def check(self, folder: str) -> None:
        """Raise `ServiceError` unless a save is there as it was written."""
        try:
            verify(self._root / folder)
        except RegressError as error:
            raise ServiceError(
                f"the save in {folder} of the state directory is damaged ({reason(error)}); load another one",
                code="damaged_save",
                category="server",
            ) from error

    def remove(self, folder: str) -> None:
        """Remove a save."""
        remove_tree(self._root / folder)

    def clean(self, kept: Collection[str]) -> None:
        """Remove all folders but those to be kept."""
        for path in self._root.iterdir():
            if path.name not in kept:
                remove_tree(path)


def unsaved(error: BaseException) -> ServiceError:
    """Return the error of a save that could not be written."""
    cause = error if isinstance(error, OSError) else error.__cause__
    full = isinstance(cause, OSError) and cause.errno in _FULL
    why = "the disk of the service is full" if full else f"the save cannot be written ({reason(error)})"
    return ServiceError(
        f"{why}; earlier saves are valid: free space below --state-dir and save again",
        code="storage_full" if full else "storage",
        category="server",
        retryable=True,
    )
