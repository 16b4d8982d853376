"""The configuration as plain data, for manifests and comparisons."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from regress.engine.config.schema import Config


def to_plain(config: Config) -> dict[str, Any]:
    """Nested dicts, lists and scalars, in the order of the schema."""
    return asdict(config)


def config_hash(config: Config) -> str:
    """SHA-256 (64 hexadecimal digits) over all values; equal exactly if every key has the same value."""
    text = json.dumps(to_plain(config), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
