"""Removal of credentials from texts for people, logs and files.

A URL can hold them before its ``@`` (``s3://KEY:SECRET@bucket``, ``https://token@host``), with slashes, colons or
percent signs in them, in any link of a chain (``simplecache::s3://KEY:SECRET@bucket``), and behind its path
(``?X-Amz-Signature=...``, ``#token``, ``;sig=...``); its slashes may have been forgotten (``s3:KEY:SECRET@bucket``).
Nothing tells a path with an ``@`` from a password with a slash, so whatever stands before the last ``@`` of a URL is
removed. The command line passes all that it prints through here: `redacted_output`.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

HIDDEN = "***"

_LOCAL = ("file", "local", "golden")
_AT = re.compile(r"@|%40", re.I)
_URL = re.compile(
    r"(?<![\w+.-])(?:[a-z][a-z0-9+.-]*:)?(?<!/)/{1,}[^\s]*"
    r"|[a-z][a-z0-9+.-]*:/+[^\s]*"
    r"|(?<![\w+.-])[a-z][a-z0-9+.-]+:(?![:/\s])[^\s]+",  # without its slashes, or what stands before a URL
    re.I,
)
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*):/+|^//", re.I)
_BARE = re.compile(
    r"(?!golden:)(?:[a-z][a-z0-9+.-]*::)*(?P<scheme>[a-z][a-z0-9+.-]+):(?!:)(?=[^\s]*(?:@|%40))", re.I
)
"""Match a protocol without slashes; a golden case with its revision (``golden:dense@HEAD``) is none."""
_PLAIN = re.compile(
    r"(?:tinker|weaver)://[\w.-]+(?::[\w.-]+)*/\w+/[\w.-]+|hf://datasets/[\w.-]+/[\w.-]+@[\w.-]+(?:/[\w.-]+)*",
    re.ASCII,
)
"""Addresses that have a colon or an ``@`` and hold no credentials: a save of a service, whose model's id has colons
(``tinker://s1:train:0/weights/x``), and a dataset of the hub at a revision."""
_BEHIND = re.compile(r"([?#;]|%3f)(?=[^\s]*\w)", re.I)
_CLOSING = "'\"`)]}>,.:;"
_VARIABLE = re.compile(r"[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)[A-Z0-9_]*")
_PORT = re.compile(r"[^/@:]*:(?!\d+(?:/|$))[^/]*")


def redacted_url(url: str) -> str:
    """Return a URL without what may be a credential; the URL is the whole of the text."""
    match = _SCHEME.search(url) or _BARE.match(url)
    if match is None or _PLAIN.fullmatch(url):
        return url
    start, rest = url[: match.end()], url[match.end() :]
    if (match["scheme"] or "").lower() in _LOCAL and not _names_somebody(match[0], rest):
        own, chained, following = rest.partition("::")
        return start + own + chained + redacted_url(following)
    signs = [*_AT.finditer(rest)]
    if signs:
        rest = f"{HIDDEN}@{rest[signs[-1].end() :]}"
    elif _PORT.match(rest.rpartition("://")[2]):
        return start + HIDDEN
    behind = _BEHIND.search(rest)
    if behind is not None:
        rest = f"{rest[: behind.start()]}{behind[1]}{HIDDEN}"
    return start + rest


def _names_somebody(start: str, rest: str) -> bool:
    """Return True if a URL of a local file, such as ``file://user:password@host/x``, has what none needs."""
    slashes = start.count("/")
    return slashes == 0 or (slashes == 2 and bool(_AT.search(rest.partition("/")[0])))


def redacted(text: str) -> str:
    """Return a text whose URLs hold no credentials; texts without a URL come back as they are."""
    if "//" not in text and (":" not in text or ("/" not in text and not _AT.search(text))):
        return text
    return _URL.sub(_redacted_match, text)


def _redacted_match(match: re.Match[str]) -> str:
    body = match[0].rstrip(_CLOSING)
    return redacted_url(body) + match[0][len(body) :]


class _Redacting:
    """Stream of texts or bytes that writes them `redacted` to another one, and is that one otherwise."""

    def __init__(self, stream: Any) -> None:
        self.unredacted = stream

    @property
    def buffer(self) -> _Redacting:
        return _Redacting(self.unredacted.buffer)

    def write(self, text: str | bytes) -> int:
        if isinstance(text, str):
            self.unredacted.write(redacted(text))
        else:
            known = bytes(text).decode("utf-8", "surrogateescape")
            self.unredacted.write(redacted(known).encode("utf-8", "surrogateescape"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unredacted, name)


@contextmanager
def redacted_output() -> Iterator[None]:
    """Print nothing to standard output and standard error that holds credentials, tracebacks included.

    In a process of its own an exception that nobody catches ends it here, as Python would.
    """
    own = sys.stderr is sys.__stderr__
    out: Any = _Redacting(sys.stdout)
    err: Any = _Redacting(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        except Exception:
            if not own:
                raise
            traceback.print_exc()
            raise SystemExit(1) from None


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
