"""Optional packages, as the metadata of this distribution names them: which are absent, and what installs them."""

from __future__ import annotations

import shlex
from importlib import metadata

from packaging.markers import Marker
from packaging.requirements import Requirement

DISTRIBUTION = "grpo-regress"


def install(extra: str) -> str:
    """Return the command that installs the packages of an extra, wherever this one was installed from."""
    found = _requirements(extra)
    if not found:  # run from its sources, without metadata
        return f"pip install '.[{extra}]' in the source folder of {DISTRIBUTION}"
    return f"pip install {shlex.join(f'{one.name}{one.specifier}' for one in found)}"


def missing(extra: str) -> str | None:
    """Return why an extra cannot be used, as the end of a sentence with its remedy; None if it can."""
    names = [one.name for one in _requirements(extra) if not installed(one.name)]
    if not names:
        return None
    verb = "is" if len(names) == 1 else "are"
    return f"needs {', '.join(names)}, which {verb} not installed; run {install(extra)}"


def _requirements(extra: str) -> list[Requirement]:
    """Return what an extra brings; nothing where this distribution has no metadata."""
    try:
        found = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return []
    return [one for one in found if one.marker is not None and _only_for(extra, one.marker)]


def _only_for(extra: str, marker: Marker) -> bool:
    return marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def installed(name: str) -> bool:
    """Return True if a distribution is installed, in whatever version."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
