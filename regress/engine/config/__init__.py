"""The configuration of a run: YAML files, environment and command line, typed and checked.

Imports no torch, because the variables it reads (``system_envs``) must be set before torch starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regress.engine.config.config_loading import Loaded, load_config, print_config
    from regress.engine.config.config_messages import Origin
    from regress.engine.config.config_schema import Config, config_hash, flat, to_plain

__all__ = ["Config", "Loaded", "Origin", "config_hash", "flat", "load_config", "print_config", "to_plain"]

_HOMES = {"config_loading": ("Loaded", "load_config", "print_config"), "config_messages": ("Origin",)}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "config_schema")
    return getattr(import_module(f"{__name__}.{home}"), name)
