"""API keys of ``regress serve``: from the command line, a file or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from regress.errors import ConfigError, reason
from regress.untrusted_files import read_bytes

VARIABLE = "GRPO_REGRESS_API_KEY"
_LIMIT = 1 << 20
OWNER = "default"


def api_keys(key: str | None, file: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the keys by the name of their owner.

    Args:
        key: the key of one owner.
        file: file with a line ``KEY`` or ``OWNER KEY`` for each.
        environ: `VARIABLE` has the key of one owner; without the others it counts.

    Raises:
        ConfigError: if there is none, or the file cannot be read as such.
    """
    if key is not None and file is not None:
        raise ConfigError("--api-key and --api-key-file exclude one another; give one of them")
    if file is not None:
        return _of_file(Path(file))
    found = key if key is not None else environ.get(VARIABLE)
    if not found or found.split() != [found]:
        raise ConfigError(
            f"the service needs an API key, one word that clients send; give --api-key-file, or set {VARIABLE}"
        )
    return {OWNER: found}


def _of_file(path: Path) -> dict[str, str]:
    try:
        lines = read_bytes(path, _LIMIT).decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--api-key-file {path} cannot be read ({reason(error)}); give a text file"
        ) from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        owner, key = (OWNER, words[0]) if len(words) == 1 else (words[0], words[-1])
        if len(words) > 2 or owner in keys or key in keys.values():
            raise ConfigError(
                f"line {number} of --api-key-file {path} is not a key of a new owner; write one line OWNER KEY for each"
            )
        keys[owner] = key
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no key; write a line OWNER KEY")
    return keys
