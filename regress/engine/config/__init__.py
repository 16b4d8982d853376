"""The configuration of a run: YAML files, environment and command line, typed and checked.

Imports no torch, because the variables it reads (``system_envs``) must be set before torch starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regress.engine.config.compose import Loaded, load_config
    from regress.engine.config.origins import Origin
    from regress.engine.config.plain import config_hash, flat, to_plain
    from regress.engine.config.schema import Config
    from regress.engine.config.show import print_config

__all__ = ["Config", "Loaded", "Origin", "config_hash", "flat", "load_config", "print_config", "to_plain"]

_HOMES = {
    "Config": "schema",
    "Loaded": "compose",
    "Origin": "origins",
    "config_hash": "plain",
    "flat": "plain",
    "load_config": "compose",
    "print_config": "show",
    "to_plain": "plain",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
