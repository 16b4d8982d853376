"""Composition of files, environment and command line into one typed, checked configuration.

Layers, in increasing priority: defaults of the schema, ``algorithm.preset``, files (in the order of their
defaults lists), environment, command line. A config group chosen on the command line belongs to the last one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from regress.engine.config.curriculum import apply_thresholds
from regress.engine.config.defaults import FileLayer
from regress.engine.config.environment import apply_environment
from regress.engine.config.files import path_errors
from regress.engine.config.flag_values import flag_entries, wandb_entry
from regress.engine.config.flags import TRACKERS
from regress.engine.config.leaves import KeyPath, Leaf, leaves
from regress.engine.config.lengths import allocate, apply_length_variables
from regress.engine.config.origins import DEFAULT, PRESET, Origin
from regress.engine.config.overrides import parse_overrides, searchpath_override
from regress.engine.config.primary import find_primary
from regress.engine.config.resolve import Resolver, environment
from regress.engine.config.rules import check_rules
from regress.engine.config.schema import Config
from regress.engine.config.store import Entry, Store
from regress.engine.config.text import in_yaml
from regress.engine.config.values import checked
from regress.engine.config.warmup import shorten_warmup
from regress.errors import ConfigError
from regress.grpo.presets import PRESETS


@dataclass(frozen=True)
class Loaded:
    """Configuration, the origin of each value by dotted key (entry by entry in free mappings), and what to tell people.

    Attributes:
        notes: sentences about values that were fitted to others.
    """

    config: Config
    origins: dict[str, Origin]
    notes: tuple[str, ...] = ()


def load_config(
    config_path: str | None = None,
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Loaded:
    """Compose and check a configuration.

    Args:
        config_path: a directory, or the YAML file itself; ``None`` for the working directory.
        config_name: a YAML file there or a built-in one, with or without suffix; ``None`` for no file.
        overrides: ``key=value``, ``group=name``, ``~key``, in Hydra's grammar.
        environ: variables for the environment layer and ``${oc.env:NAME}``; ``None`` for those of the
            process.
        flags: values of the command's flags by name (see `regress.engine.config.flags`), part of the command line.

    Raises:
        ConfigError: for any mistake, in one sentence.
    """
    environ = os.environ if environ is None else environ
    with environment(environ), path_errors():
        store = Store()
        files = FileLayer(find_primary(config_path, config_name, searchpath_override(overrides)))
        command_line = parse_overrides(overrides, files.is_group)
        files.apply(command_line.choices, store)
        apply_length_variables(environ, store)
        apply_environment(environ, store)
        command_line.apply(store)
        notes = _apply_flags(flags or {}, command_line.keys(), store)
        _expand_preset(store)
        _allocate_lengths(store)
        apply_thresholds(environ, store, lambda: _build(store))
        config = _build(store)
        notes += shorten_warmup(config, store)
    check_rules(config, store.origin)
    return Loaded(config, store.origins(), notes)


def _apply_flags(flags: Mapping[str, str], beside: Mapping[KeyPath, Any], store: Store) -> tuple[str, ...]:
    """Put the values of flags into the store; return a sentence where that switches on what no flag names."""
    for entry in flag_entries(flags, beside):
        store.put(entry)
    leaf = leaves()[TRACKERS]
    added = wandb_entry(flags, beside, lambda: _value(leaf, Resolver(store.tree(), store.origin), store))
    if added is None:
        return ()
    store.put(added)
    given = f"{TRACKERS}={in_yaml(added.value)}"
    return (f"{added.origin.name} switched wandb on ({given}); --no-wandb keeps it off",)


def _expand_preset(store: Store) -> None:
    """Set the fields of ``algorithm.preset``, below every explicitly given value."""
    leaf = leaves()["algorithm.preset"]
    name = _value(leaf, Resolver(store.tree(), store.origin), store)
    for field, value in PRESETS[name].items() if name is not None else ():
        path = ("algorithm", field)
        if store.origin(path).layer == DEFAULT:
            store.put(Entry(path, value, Origin(PRESET, name)))


def _allocate_lengths(store: Store) -> None:
    resolver = Resolver(store.tree(), store.origin)
    allocate(store, lambda path: _value(leaves()[".".join(path)], resolver, store))


def _build(store: Store) -> Config:
    resolver = Resolver(store.tree(), store.origin)
    config: Config = _typed(
        Config, {key: _value(leaf, resolver, store) for key, leaf in leaves().items()}, ""
    )
    return config


def _value(leaf: Leaf, resolver: Resolver, store: Store) -> Any:
    value = checked(leaf, resolver.resolved(leaf.path), store.origin(leaf.path))
    if leaf.kind is not dict:
        return value
    members = {name: leaf.member(name) for name in value}
    return {name: checked(entry, value[name], store.origin(entry.path)) for name, entry in members.items()}


def _typed(kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """Build the dataclass ``kind`` with its sections, from values by dotted key."""
    hints, members = get_type_hints(kind), {}
    for spec in fields(kind):
        key, hint = f"{prefix}{spec.name}", hints[spec.name]
        members[spec.name] = _typed(hint, values, f"{key}.") if is_dataclass(hint) else values[key]
    try:
        return kind(**members)
    except ConfigError as error:  # of the objective, which checks itself
        raise ConfigError(f"{prefix}{error}") from None
