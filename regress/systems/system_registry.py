"""Systems under test by name: the adapters of this package and of others, registered by entry point."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint

from regress.errors import SystemsError, reason
from regress.plugins import SYSTEMS, registered
from regress.systems.protocol import SystemUnderTest

_MEMBERS = ("name", "version_of", "requirements", "modules", "shims", "environ", "builds")
_METHODS = ("cells", "objective", "prepare", "step", "engaged", "close")


def locations() -> dict[str, str]:
    """Return ``module:attribute`` of each known system, by name: this package's first.

    Raises:
        ConfigError: if two packages register the same name.
    """
    return {name: point.value for name, point in registered(SYSTEMS).items()}


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
        system = EntryPoint(attribute, location, SYSTEMS).load()()
    except Exception as error:
        raise SystemsError(f"the adapter {location} cannot be loaded ({reason(error)})") from error
    lacking = [name for name in _MEMBERS if not hasattr(system, name)]
    lacking += [name for name in _METHODS if not callable(getattr(system, name, None))]
    if lacking:
        raise SystemsError(f"""the adapter {location} has no {", ".join(lacking)}: give it the members of
        regress.systems.protocol.SystemUnderTest, or inherit regress.systems.protocol.System""")
    found: SystemUnderTest = system
    return found
