"""Listing behind ``--print-config``: every key, its value and its origin."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from regress.engine.config.compose import Loaded
from regress.engine.config.origins import DEFAULT, Origin
from regress.engine.config.plain import to_plain
from regress.engine.config.text import in_yaml
from regress.redaction import redacted_tree


def print_config(loaded: Loaded, console: Console | None = None) -> None:
    """Print the listing: a table on a terminal, elsewhere lines of YAML, ``key: value  # origin``."""
    console = console or Console()
    if console.is_terminal:
        console.print(_table(loaded))
        return
    for key, value, origin in config_rows(loaded):
        console.print(f"{key}: {value}  # {origin}", markup=False, highlight=False, soft_wrap=True)


def config_rows(loaded: Loaded) -> Iterator[tuple[str, str, Origin]]:
    """Yield (dotted key, value in YAML, origin) in the order of the schema; free mappings entry by entry."""
    yield from _rows((), to_plain(loaded.config), loaded.origins)


def _rows(path: tuple[str, ...], value: Any, origins: dict[str, Origin]) -> Iterator[tuple[str, str, Origin]]:
    key = ".".join(path)
    if key in origins:
        yield key, in_yaml(redacted_tree(value)), origins[key]
        return
    for name, member in value.items():
        yield from _rows((*path, name), member, origins)


def _table(loaded: Loaded) -> Table:
    table = Table(title="configuration", title_justify="left", header_style="bold")
    for name in ("key", "value", "origin"):
        table.add_column(name, overflow="fold")
    for key, value, origin in config_rows(loaded):
        style = "dim" if origin.layer == DEFAULT else ""
        table.add_row(Text(key), Text(value), Text(str(origin)), style=style)
    return table
