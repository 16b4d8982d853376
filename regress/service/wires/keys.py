"""API keys: who a request comes from. Keys are compared in constant time, and are neither logged nor shown."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from regress.service.api import ServiceError

_BEARER = "bearer "


class Keys:
    """Known keys.

    Args:
        keys: keys by the name of their owner.
        headers: names of the headers that have a key, beside ``Authorization: Bearer``.
    """

    def __init__(self, keys: Mapping[str, str], headers: Sequence[str]) -> None:
        if not keys or not all(keys.values()):
            raise ServiceError(
                "the service has no API key; set one, and give it to the clients", code="no_key"
            )
        self._digests = {owner: _digest(key) for owner, key in keys.items()}
        self._headers = tuple(dict.fromkeys(headers))

    def owner(self, headers: Mapping[str, str]) -> str:
        """Return the owner of a request's key.

        Raises:
            ServiceError: there is no key, or no such key.
        """
        found = self._find(headers)
        if found is None:
            names = ", ".join((*self._headers, "authorization: bearer"))
            raise ServiceError(f"the API key is missing or unknown; send one in {names}", code="unauthorized")
        return found

    def known(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request has a known key."""
        return self._find(headers) is not None

    def _find(self, headers: Mapping[str, str]) -> str | None:
        sent = [headers[name] for name in self._headers if name in headers]
        bearer = headers.get("authorization", "")
        if bearer.lower().startswith(_BEARER):
            sent.append(bearer[len(_BEARER) :].strip())
        owner = None
        for digest in map(_digest, sent):
            for name, known in self._digests.items():  # all of them, whichever fits
                if hmac.compare_digest(digest, known):
                    owner = name
        return owner


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
