"""Configuration as plain data, for manifests and comparisons."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from regress.engine.config.schema import Config
from regress.redaction import HIDDEN


def to_plain(config: Config) -> dict[str, Any]:
    """Return nested dicts, lists and scalars, in the order of the schema; keys of services are hidden."""
    plain = asdict(config)
    for section in ("weaver_service", "tinker_service"):
        if plain["service"][section]["api_key"] is not None:
            plain["service"][section]["api_key"] = HIDDEN
    return plain


def flat(config: Config) -> dict[str, str | int | float | bool]:
    """Return dotted keys and scalars; null, lists and empty mappings as text, for trackers that keep
    scalars only.
    """

    def walk(prefix: str, value: Any) -> dict[str, str | int | float | bool]:
        if isinstance(value, dict) and value:
            return {k: v for name, item in value.items() for k, v in walk(f"{prefix}.{name}", item).items()}
        return {
            prefix.removeprefix("."): value if isinstance(value, str | int | float) else json.dumps(value)
        }

    return walk("", to_plain(config))


def config_hash(config: Config) -> str:
    """Return the SHA-256 (64 hexadecimal digits) of all values; equal exactly if every key has the same value."""
    text = json.dumps(to_plain(config), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
