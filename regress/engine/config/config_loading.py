"""Composition of files, environment and command line into one typed, checked configuration.

Layers, in increasing priority: defaults of the schema, ``algorithm.preset``, files (in the order of their
defaults lists), environment, command line. A config group chosen on the command line belongs to the last one.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regress.credential_redaction import redacted_tree
from regress.engine.config.config_files import UNREADABLE, Files
from regress.engine.config.config_messages import (
    COMMAND_LINE,
    DEFAULT,
    ENVIRONMENT,
    FILE,
    Origin,
    in_yaml,
    shortened,
)
from regress.engine.config.config_option import Entry, KeyPath, Option, Origins, Variable
from regress.engine.config.config_schema import (
    DERIVATIONS,
    Config,
    conflicts,
    find_option,
    flags_by_name,
    options,
    to_plain,
)
from regress.engine.config.config_values import Values
from regress.engine.config.training_config import shorten_warmup
from regress.errors import ConfigError

PREFIX, SEPARATOR, VERBATIM = "REGRESS_", "__", "system_envs"
SEARCHPATH = "hydra.searchpath"
TRACKERS = ("tracking", "trackers")
T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """Configuration, the origin of each value by dotted key (entry by entry in free mappings), and what to tell people.

    Attributes:
        notes: sentences about values that were fitted to others.
    """

    config: Config
    origins: dict[str, Origin]
    notes: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, str, Origin]]:
        """Yield (dotted key, value in YAML, origin) in the order of the schema; free mappings entry by entry."""

        def walk(key: str, value: Any) -> Iterator[tuple[str, str, Origin]]:
            if key in self.origins:
                yield key, in_yaml(redacted_tree(value)), self.origins[key]
                return
            for name, member in value.items():
                yield from walk(f"{key}.{name}".lstrip("."), member)

        return walk("", to_plain(self.config))


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
        flags: values of the command's flags by name (see `Flag`), part of the command line.

    Raises:
        ConfigError: for mistakes: the first in one sentence, a note ``reason @ KEY (ORIGIN)`` for each of the others.
    """
    environ = os.environ if environ is None else environ
    try:
        return _load(config_path, config_name, overrides, environ, flags or {})
    except OSError as error:  # of looking for files: a name too long, an unreadable directory
        raise ConfigError(f"Path {error.filename} cannot be used ({error.strerror}); correct it.") from error


def _load(
    config_path: str | None,
    config_name: str | None,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    flags: Mapping[str, str],
) -> Loaded:
    parsed = [_parsed(line) for line in overrides]
    searchpath = [one.value() for one in parsed if one.key_or_group == SEARCHPATH]
    files = Files(config_path, config_name, searchpath[-1] if searchpath else None, environ)
    groups = [override for override in parsed if _chooses(override, files)]
    keys = [one for one in parsed if one not in groups and one.key_or_group != SEARCHPATH]
    values = Values(environ)
    given = [_entry(override) for override in keys if not override.is_delete()]
    mistakes = list(_mistakes(values.put, files.entries(groups)))
    mistakes += _mistakes(partial(_put_variable, values), environment_entries(environ))
    mistakes += _mistakes(partial(_override, values), keys)
    mistakes += _mistakes(values.put, flag_entries(flags, given))
    try:
        notes = [*_switch_wandb_on(flags, given, values)]
        for derive in DERIVATIONS:
            derive(values, environ)
        config: Config = values.built(Config)
        notes += shorten_warmup(config, values)
        mistakes = mistakes or list(conflicts(config, values.origin))
    except ConfigError as error:
        mistakes += [str(error), *getattr(error, "__notes__", ()), *_mistakes(values.value, options())]
    if mistakes:
        raise _refusal(mistakes, values.origin)
    return Loaded(config, values.origins(), tuple(notes))


def _mistakes(take: Callable[[T], Any], given: Iterable[T]) -> Iterator[str]:
    """Take what is given, one after the other; yield the sentences that refuse it."""
    iterator = iter(given)
    while True:
        try:
            take(next(iterator))
        except StopIteration:
            return
        except ConfigError as error:
            yield str(error)


def _refusal(mistakes: Iterable[str], origin: Origins) -> ConfigError:
    """Return the error of the first mistake, with a note ``reason @ KEY (ORIGIN)`` for each of the others."""
    first, *others = dict.fromkeys(mistakes)
    error = ConfigError(first)
    for sentence in others:
        key = re.split(r"[^\w.]", sentence)[0]
        if any(key.startswith(f"{one}.") or key == one for one in options()):
            decided = origin(tuple(key.split(".")))
            place = decided.name if decided.layer == FILE else decided
            sentence = f"{sentence.replace(f' ({decided})', '', 1).rstrip('.')} @ {key} ({place})"
        error.add_note(str(ConfigError(sentence)))
    return error


def _put_variable(values: Values, entry: Entry) -> None:
    find_option(*entry[:3])
    if values.origin(entry.path).layer != COMMAND_LINE:  # else a config group was chosen there
        values.put(entry)


def _override(values: Values, override: Override) -> None:
    entry = _entry(override)
    if override.is_delete():
        find_option(*entry[:3])
        values.remove(entry.path)
    else:
        values.put(entry)


def _switch_wandb_on(flags: Mapping[str, str], given: Sequence[Entry], values: Values) -> Iterator[str]:
    """Add wandb to the trackers for a flag that means nothing without it, if nobody has decided on it; yield a note."""
    found = [flags_by_name()[name.replace("_", "-")] for name in flags]
    asking = [flag.name for flag, _ in found if flag.of_wandb]
    decided = {entry.path for entry in given} | {option.path for _, option in found}
    if not asking or TRACKERS in decided:
        return
    known = values.value(".".join(TRACKERS))
    if known is None or "wandb" in known:
        return
    added = [*known, "wandb"]
    values.put(Entry(TRACKERS, added, Origin(COMMAND_LINE, f"--{asking[0]}")))
    yield (
        f"--{asking[0]} switched wandb on ({'.'.join(TRACKERS)}={in_yaml(added)}); --no-wandb keeps it off"
    )


def _parsed(line: str) -> Override:
    """Return an override in Hydra's grammar. Raises `ConfigError` for anything else, and for sweeps."""
    stated = f"Override {shortened(line)} (command line)"
    try:
        override = OverridesParser.create().parse_override(line)
        if not override.key_or_group:
            raise HydraException(f"no key in {line}")
    except (HydraException, ValueError) as error:
        raise ConfigError(f"""{stated} is malformed; write KEY=VALUE, KEY=[A,B], GROUP=NAME or ~KEY, and a value with
        special characters as KEY='"VALUE"'.""") from error
    if override.is_sweep_override():
        raise ConfigError(f"""{stated} gives several values to sweep over, and a run takes one; write a list as
        KEY=[A,B], and text with commas as KEY='"A,B"'.""")
    if override.is_hydra_override() and override.key_or_group != SEARCHPATH:
        raise ConfigError(f"{stated} is a setting of Hydra, of which only {SEARCHPATH} is used; remove it.")
    return override


def _chooses(override: Override, files: Files) -> bool:
    """Return True if an override chooses a file of a config group, or deletes the choice."""
    name = override.key_or_group
    may = override.is_delete() or isinstance(override.value(), str | list)
    return may and name not in options() and files.is_group(name)


def _path(override: Override) -> KeyPath:
    return tuple(override.key_or_group.split("."))


def _entry(override: Override) -> Entry:
    value = None if override.is_delete() else override.value()
    spelled = override.get_value_string() if isinstance(value, bool | int | float) else None
    return Entry(_path(override), value, Origin(COMMAND_LINE), spelled)


def environment_entries(environ: Mapping[str, str]) -> Iterator[Entry]:
    """Yield what variables give: those that options name, and those with our prefix, which win.

    ``REGRESS_OPTIMIZER__LEARNING_RATE=1e-3`` sets ``optimizer.learning_rate``: section and key are joined by two
    underscores, in capitals or not. Below a free mapping names become lower case, except below ``system_envs``.
    """
    for option in options().values():
        for note in option.notes:
            if isinstance(note, Variable) and note.name in environ:
                yield text_entry(option.path, environ[note.name], Origin(ENVIRONMENT, note.name))
    for variable in sorted(environ):
        if variable.upper().startswith(PREFIX):
            first, *rest = variable[len(PREFIX) :].split(SEPARATOR)
            rest = rest if first.lower() == VERBATIM else [name.lower() for name in rest]
            yield text_entry((first.lower(), *rest), environ[variable], Origin(ENVIRONMENT, variable))


def text_entry(path: KeyPath, text: str, origin: Origin) -> Entry:
    """Return what a text gives to a key: YAML, except for keys that hold text. Raises `ConfigError` if it is none."""
    option = find_option(path, text, origin)
    if option is None or option.holds_text(path) or "${" in text:
        return Entry(
            path, None if text == "null" and option is not None and option.optional else text, origin
        )
    try:
        # a scalar in OmegaConf's YAML, where 1e-3 is a number
        parsed: Any = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except UNREADABLE as error:
        raise ConfigError(
            f"{'.'.join(path)}={shortened(text)} ({origin}) is not valid YAML; quote it."
        ) from error
    return Entry(path, parsed["value"], origin)


def flag_entries(flags: Mapping[str, str], beside: Sequence[Entry]) -> Iterator[Entry]:
    """Yield what flags give to their keys.

    Args:
        flags: text of each flag by its name.
        beside: what the same command line gives as ``key=value``.

    Raises:
        ConfigError: for a text that is not a value of the key, and for a key that is given two values.
    """
    seen = {entry.path: (f"{'.'.join(entry.path)}={in_yaml(entry.value)}", entry.value) for entry in beside}
    for name, text in flags.items():
        flag, option = flags_by_name()[name.replace("_", "-")]
        entry = text_entry(option.path, text, Origin(COMMAND_LINE, f"--{flag.name}"))
        if option.path in seen:
            _refuse_other(option, entry, *seen[option.path])
        seen[option.path] = f"--{flag.name}{'' if flag.given else f' {text}'}", entry.value
        yield entry


def _refuse_other(option: Option, entry: Entry, stated: str, value: Any) -> None:
    own, other = (option.checked(each, lambda _: entry.origin) for each in (entry.value, value))
    if own != other:
        raise ConfigError(f"""{entry.origin.name} gives {option.key} the value {in_yaml(own)} and {stated} gives it
        another; leave one of them away.""")


def print_config(loaded: Loaded, console: Console | None = None) -> None:
    """Print the listing: a table on a terminal, elsewhere lines of YAML, ``key: value  # origin``."""
    console = console or Console()
    if not console.is_terminal:
        for key, value, origin in loaded.rows():
            console.print(f"{key}: {value}  # {origin}", markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(title="configuration", title_justify="left", header_style="bold")
    for name in ("key", "value", "origin"):
        table.add_column(name, overflow="fold")
    for row in loaded.rows():
        style = "dim" if row[2].layer == DEFAULT else ""
        table.add_row(*(Text(str(cell)) for cell in row), style=style)
    console.print(table)
