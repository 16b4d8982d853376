"""Names and paths of saves: ``<model_id>/<kind>/<name>``, never a path of the file system."""

from __future__ import annotations

import re

from regress.service.api import SaveKind, ServiceError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def checked_name(name: str) -> str:
    """Return the name of a save; raises `ServiceError` unless it can be the name of a folder anywhere."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ServiceError(
            f"{name!r} is no name of a save; use 1 to 128 letters, digits, dots, dashes and underscores, the first a "
            "letter or digit"
        )
    return name


def save_path(model_id: str, kind: SaveKind, name: str) -> str:
    """Return the path by which a save is loaded."""
    return f"{model_id}/{kind.value}/{name}"
