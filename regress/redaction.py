"""Removal of credentials from texts for people, logs and files.

A URL can hold them before its ``@`` (``s3://KEY:SECRET@bucket``, ``https://token@host``), with slashes, colons or
percent signs in them, in any link of a chain (``simplecache::s3://KEY:SECRET@bucket``), and behind its path
(``?X-Amz-Signature=...``, ``#token``, ``;sig=...``). Nothing tells a path with an ``@`` from a password with a slash,
so whatever stands before the last ``@`` of a URL is removed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_LOCAL = ("file", "local")
_URL = re.compile(r"(?<![\w+.-])(?:[a-z][a-z0-9+.-]*:)?(?<!/)/{1,}[^\s]*|[a-z][a-z0-9+.-]*:/+[^\s]*", re.I)
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*):/+|^//", re.I)
_AT = re.compile(r"@|%40", re.I)
_BEHIND = re.compile(r"([?#;]|%3f)(?=[^\s]*\w)", re.I)
_CLOSING = "'\"`)]}>,.:;"
_VARIABLE = re.compile(r"[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]*")
_PORT = re.compile(r"[^/@:]*:(?!\d+(?:/|$))[^/]*")


def redacted_url(url: str) -> str:
    """Return a URL without what may be a credential; the URL is the whole of the text."""
    match = _SCHEME.search(url)
    if match is None or (match["scheme"] or "").lower() in _LOCAL:
        return url
    start, rest = url[: match.end()], url[match.end() :]
    signs = [*_AT.finditer(rest)]
    if signs:
        rest = f"{HIDDEN}@{rest[signs[-1].end() :]}"
    elif _PORT.match(rest.rpartition("://")[2]):
        return start + HIDDEN
    behind = _BEHIND.search(rest)
    if behind is not None:
        rest = f"{rest[: behind.start()]}{behind[1]}{HIDDEN}"
    return start + rest


def redacted(text: str) -> str:
    """Return a text whose URLs hold no credentials; texts without a URL come back as they are."""
    if "/" not in text or (":" not in text and "//" not in text):
        return text
    return _URL.sub(_redacted_match, text)


def _redacted_match(match: re.Match[str]) -> str:
    url = match[0]
    if _SCHEME.search(url) is None:
        return url
    body = url.rstrip(_CLOSING)
    return redacted_url(body) + url[len(body) :]


def redacted_tree(value: Any) -> Any:
    """Return a tree of mappings and lists whose texts, keys aside, hold no credentials.

    An environment variable that is named like one (``WANDB_API_KEY``) loses its value.
    """
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key, item) else redacted_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(item) for item in value]
    return value


def _is_secret(key: Any, value: Any) -> bool:
    return isinstance(key, str) and isinstance(value, str) and bool(_VARIABLE.fullmatch(key))
