"""Names and paths of saves: ``<model_id>/<kind>/<name>``, never a path of the file system."""

from __future__ import annotations

from regress.service.api import SAVE_NAME, SaveKind, ServiceError


def checked_name(name: str) -> str:
    """Return the name of a save; raises `ServiceError` unless it can be the name of a folder anywhere."""
    if not isinstance(name, str) or not SAVE_NAME.fullmatch(name):
        raise ServiceError(
            f"{name!r} is no name of a save; use 1 to 128 letters, digits, dots, dashes and underscores, with no dot "
            "or dash first"
        )
    return name


def save_path(model_id: str, kind: SaveKind, name: str) -> str:
    """Return the path by which a save is loaded."""
    return f"{model_id}/{kind.value}/{name}"
