"""Options of a command that are aliases of keys. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from regress.engine.config.flags import FLAGS

AnyCommand = TypeVar("AnyCommand", bound=Callable[..., Any])


def flag_options(command: AnyCommand) -> AnyCommand:
    """Add the flags that are aliases of keys to a command."""
    for flag in reversed(FLAGS):
        takes: dict[str, Any] = {"metavar": flag.metavar}
        if flag.given is not None and not flag.optional:
            takes = {"is_flag": True, "flag_value": flag.given}
        elif flag.given is not None:
            takes = {"metavar": f"[{flag.metavar}]", "is_flag": False, "flag_value": flag.given}
        text = f"Alias of {flag.key}" + (f"={flag.given}." if flag.given else ".")
        command = click.option(
            *flag.spellings, flag.name.replace("-", "_"), default=None, help=text, **takes
        )(command)
    return command


def given_flags(options: dict[str, Any]) -> dict[str, str]:
    """Remove the flags from the options of a command, and return those that were given."""
    names = [flag.name.replace("-", "_") for flag in FLAGS]
    found = {name: options.pop(name, None) for name in names}
    return {name: text for name, text in found.items() if text is not None}
