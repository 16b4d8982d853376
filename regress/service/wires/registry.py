"""Wire protocols by name: a new one is a file, and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from regress.service.api import ServiceError
from regress.service.wires.tinker import TINKER
from regress.service.wires.weaver import WEAVER
from regress.service.wires.wire import Wire

WIRES: dict[str, Wire] = {wire.name: wire for wire in (WEAVER, TINKER)}


def chosen(names: Sequence[str] | None) -> list[Wire]:
    """Return the wires of some names, None: all.

    Raises:
        ServiceError: a name is unknown, or there is none.
    """
    if names is None:
        return [*WIRES.values()]
    unknown = [name for name in names if name not in WIRES]
    if unknown or not names:
        what = f"the wire {unknown[0]!r} is unknown" if unknown else "no wire is named"
        raise ServiceError(f"{what}; choose from {', '.join(WIRES)}", code="unknown_wire")
    return [WIRES[name] for name in dict.fromkeys(names)]
