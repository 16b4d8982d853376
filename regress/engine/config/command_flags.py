"""Flags of a command that are aliases of options; the schema is read when they are asked for."""

from functools import cache
from typing import Any

import click


class CommandWithFlags(click.Command):
    """A command with a flag for each alias, as text in ``flags`` of its callback: those that were given, by name."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own options, and the flags."""
        return [*super().get_params(ctx), *_flags()]

    def invoke(self, ctx: click.Context) -> Any:
        """Gather the flags that were given."""
        found = {flag.name: ctx.params.pop(str(flag.name)) for flag in _flags()}
        ctx.params["flags"] = {name: text for name, text in found.items() if text is not None}
        return super().invoke(ctx)


@cache
def _flags() -> tuple[click.Option, ...]:
    from regress.engine.config.config_schema import flags_by_name

    made = []
    for flag, option in flags_by_name().values():
        metavar = flag.metavar or {int: "N", float: "NUMBER"}.get(option.kind, "TEXT")
        takes: dict[str, Any] = {"metavar": metavar}
        if flag.given is not None and not flag.optional:
            takes = {"is_flag": True, "flag_value": flag.given}
        elif flag.given is not None:
            takes = {"metavar": f"[{metavar}]", "is_flag": False, "flag_value": flag.given}
        text = f"Alias of {option.key}" + (f"={flag.given}." if flag.given else ".")
        made.append(
            click.Option([*flag.spellings, flag.name.replace("-", "_")], default=None, help=text, **takes)
        )
    return tuple(made)
