"""Options with a few values, of which a misspelt one is told the nearest."""

from __future__ import annotations

from typing import Any

import click

from regress.errors import meant


class Choice(click.Choice[str]):
    """`click.Choice` whose error names the values that are near."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return the sentence on a value that is none of these."""
        return f"{meant(str(value), self.choices)}{super().get_invalid_choice_message(value, ctx)}"
