"""Names of saves, and their addresses on a wire: ``<scheme>://<model id>/<word of the kind>/<name>``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from regress.service.service_api import SAVE_NAME, Saved, SaveKind, ServiceError
from regress.service.wires.wire_protocol import Call, shown

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,255}")


def save_name(name: str | None) -> str | None:
    """Return the name of a save, if it is one.

    Raises:
        ServiceError: it has other characters than letters, digits, ``.``, ``_`` and ``-``, or begins with ``.`` or
            ``-``.
    """
    if name is not None and not SAVE_NAME.fullmatch(name):
        raise ServiceError(f"""{shown(name)} is not a name of a save; use up to 128 letters, digits, '.', '_' and '-',
        with no dot or dash first""")
    return name


class Addresses:
    """Addresses of saves on one wire.

    Args:
        scheme: scheme of the addresses.
        words: word of each kind of save.
    """

    def __init__(self, scheme: str, words: Mapping[SaveKind, str]) -> None:
        self._scheme = f"{scheme}://"
        self._words = dict(words)
        self._kinds = {word: kind for kind, word in words.items()}

    def of(self, saved: Saved) -> str:
        """Return the address of a save."""
        return self.of_path(saved.path)

    def of_path(self, path: str) -> str:
        """Return the address of a service's path of a save."""
        model_id, kind, name = path.rsplit("/", 2)
        if SaveKind(kind) not in self._words:
            raise ServiceError(f"the save {shown(name)} is of a kind that this protocol has no address for")
        return f"{self._scheme}{model_id}/{self._words[SaveKind(kind)]}/{name}"

    def path(self, address: str, call: Call) -> str:
        """Return the service's path for an address that the API key of a request owns.

        Raises:
            ServiceError: it is not an address, or another key's.
        """
        parts = address.removeprefix(self._scheme).split("/")
        if (
            not address.startswith(self._scheme)
            or len(parts) != 3
            or not _MODEL.fullmatch(parts[0])
            or parts[1] not in self._kinds
        ):
            words = ", ".join(self._kinds)
            raise ServiceError(f"""{shown(address)} is not an address of a save; use {self._scheme}<model
            id>/<{words}>/<name>, as the service returned it""")
        save_name(parts[2])
        return f"{call.own(parts[0])}/{self._kinds[parts[1]].value}/{parts[2]}"
