"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from regress.dump.command_outputs import LocalFolder
from regress.golden.hub_goldens import PREFIX, hub_directory

F = TypeVar("F", bound=Callable[..., Any])


class GoldenFolder(LocalFolder):
    """A folder of this machine, or an address on the hub, whose folder in the cache is taken."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the folder; raise `GoldenError` for an address that leads nowhere."""
        if isinstance(value, str) and value.startswith(PREFIX):
            return hub_directory(value)
        return super().convert(value, param, ctx)


def directory_option(command: F) -> F:
    """Add --golden-dir."""
    return click.option(
        "--golden-dir",
        type=GoldenFolder(),
        metavar="DIR",
        help="Golden directory, or hf://datasets/ORG/NAME@REVISION; otherwise regress_golden_dir in pyproject.toml, or "
        "golden/ beside that file.",
    )(command)


def code_option(command: F) -> F:
    """Add --allow-code."""

    def allow(_: click.Context, __: click.Parameter, value: bool) -> None:
        if value:
            from regress.import_trust import allow_all_code

            allow_all_code()

    return click.option(
        "--allow-code",
        is_flag=True,
        expose_value=False,
        callback=allow,
        help="Import any module that a case or configuration names, not only those of [tool.regress] allow_code; "
        "GRPO_REGRESS_ALLOW_CODE=1 is the same.",
    )(command)
