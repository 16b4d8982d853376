"""Systems under test by name: the adapters of this package and of others, registered by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from regress.errors import SystemsError, reason
from regress.systems.protocol import SystemUnderTest

GROUP = "regress.systems"

BUILT_IN: Mapping[str, str] = {
    "deepspeed": "regress.systems.adapters.deepspeed:DeepSpeed",
    "megatron": "regress.systems.adapters.megatron:Megatron",
    "trainer": "regress.systems.adapters.trainer:Trainer",
    "trl": "regress.systems.adapters.trl:TRL",
    "verl": "regress.systems.adapters.verl:Verl",
    "verl-pins": "regress.systems.adapters.verl:VerlOnItsPins",
}
"""Adapters of this package, as `pyproject.toml` registers them: known where its metadata is stale, too."""

_MEMBERS = ("name", "version_of", "requirements", "modules", "shims", "environ", "builds")
_METHODS = ("cells", "objective", "prepare", "step", "engaged", "close")


def locations() -> dict[str, str]:
    """Return ``module:attribute`` of each known system, by name: this package's first.

    Raises:
        SystemsError: if two packages register the same name.
    """
    found = dict(BUILT_IN)
    for entry in entry_points(group=GROUP):
        known = found.setdefault(entry.name, entry.value)
        if known != entry.value:
            raise SystemsError(
                f"the system {entry.name!r} is registered by {known} and by {entry.value}: rename one of them"
            )
    return found


def location_of(name: str) -> str:
    """Return ``module:attribute`` of a system: of a registered one, or as it is written.

    Raises:
        SystemsError: if nobody registered it.
    """
    if ":" in name:
        return name
    known = locations()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}" if near else "write package.module:Class for one of your own"
        raise SystemsError(f"there is no system {name!r} among {', '.join(known)}: {hint}")
    return known[name]


def load(location: str) -> SystemUnderTest:
    """Return a new object of the adapter at ``module:attribute``.

    Raises:
        SystemsError: if it cannot be imported, or lacks a member of the protocol.
    """
    module, colon, attribute = location.partition(":")
    if not colon or not module or not attribute:
        raise SystemsError(f"{location!r} names no adapter: write package.module:Class")
    try:
        import_module(module)
        system = EntryPoint(attribute, location, GROUP).load()()
    except Exception as error:
        raise SystemsError(f"the adapter {location} cannot be loaded ({reason(error)})") from error
    lacking = [name for name in _MEMBERS if not hasattr(system, name)]
    lacking += [name for name in _METHODS if not callable(getattr(system, name, None))]
    if lacking:
        raise SystemsError(
            f"the adapter {location} has no {', '.join(lacking)}: give it the members of "
            "regress.systems.protocol.SystemUnderTest, or inherit regress.systems.protocol.System"
        )
    found: SystemUnderTest = system
    return found
