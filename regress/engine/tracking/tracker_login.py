"""Logins of trackers. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit

_NO_SERVER = ("offline", "dryrun", "disabled")


def has_wandb_login(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if wandb needs no server, or has a key; it would ask for one on the terminal, and wait."""
    if environ.get("WANDB_MODE", "").lower() in _NO_SERVER:
        return True
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    places = [environ["NETRC"]] if environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        with suppress(OSError, NetrcParseError, RuntimeError):
            hosts = netrc(Path(place).expanduser()).hosts
            if server in hosts or any("wandb" in host for host in hosts):
                return True
    return False
