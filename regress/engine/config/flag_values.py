"""Values that flags give to their keys: part of the command line, like ``key=value``."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from regress.engine.config.environment import entry_of
from regress.engine.config.flags import OF_WANDB, TRACKERS, flag_named
from regress.engine.config.leaves import KeyPath, leaves
from regress.engine.config.origins import COMMAND_LINE, Origin
from regress.engine.config.store import Entry
from regress.engine.config.text import in_yaml
from regress.engine.config.values import checked
from regress.errors import ConfigError


def flag_entries(flags: Mapping[str, str] | None, beside: Mapping[KeyPath, Any]) -> Iterator[Entry]:
    """Yield what the flags give to their keys.

    Args:
        flags: text of each flag by its name.
        beside: values that the same command line gives as ``key=value``.

    Raises:
        ConfigError: for a text that is no value of the key, and for a key that is given two values.
    """
    seen: dict[KeyPath, tuple[str, Any]] = {}
    for name, text in (flags or {}).items():
        flag = flag_named(name)
        path = tuple(flag.key.split("."))
        entry = entry_of(path, text, Origin(COMMAND_LINE, f"--{flag.name}"))
        if path in beside:
            _refuse_other(entry, f"{flag.key}={in_yaml(beside[path])}", beside[path])
        if path in seen:
            _refuse_other(entry, *seen[path])
        seen[path] = f"--{flag.name}{'' if flag.given else f' {text}'}", entry.value
        yield entry


def wandb_entry(
    flags: Mapping[str, str] | None, beside: Mapping[KeyPath, Any], trackers: Callable[[], list[str] | None]
) -> Entry | None:
    """Return what adds wandb to the trackers for a flag that means nothing without it, if nobody has decided on it.

    Args:
        flags: text of each flag by its name.
        beside: values that the same command line gives as ``key=value``.
        trackers: returns those of the other layers; None: the best that works here, wandb before all others.
    """
    path = tuple(TRACKERS.split("."))
    given = [flag_named(name) for name in flags or {}]
    asking = [flag.name for flag in given if flag.name in OF_WANDB]
    if not asking or path in beside or any(flag.key == TRACKERS for flag in given):
        return None
    known = trackers()
    if known is None or "wandb" in known:
        return None
    return Entry(path, [*known, "wandb"], Origin(COMMAND_LINE, f"--{asking[0]}"))


def _refuse_other(entry: Entry, stated: str, value: Any) -> None:
    leaf = leaves()[".".join(entry.path)]
    own, other = (checked(leaf, found, entry.origin) for found in (entry.value, value))
    if own != other:
        raise ConfigError(
            f"{entry.origin.name} gives {leaf.key} the value {in_yaml(own)} and {stated} gives it another; leave one "
            "of them away."
        )
