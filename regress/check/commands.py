"""``regress check``: somebody's loss function against an objective of the catalogue."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from regress.dump.outputs import Output, errors_written, json_option, write_output
from regress.errors import ConfigError
from regress.printed import echo


@click.command()
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option(
    "--as",
    "preset",
    metavar="PRESET",
    required=True,
    help="The objective that it should be, such as grpo or trl:dapo.",
)
@click.option(
    "--set", "settings", metavar="FIELD=VALUE", multiple=True, help="A field that differs from the preset's."
)
@click.option(
    "--term", "terms", metavar="NAME=TERM", multiple=True, help="What an argument is, if its name is no help."
)
@click.option("--arg", "arguments", metavar="NAME=VALUE", multiple=True, help="The value of an argument.")
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    function: str,
    preset: str,
    settings: tuple[str, ...],
    terms: tuple[str, ...],
    arguments: tuple[str, ...],
    json_file: Output | None,
) -> None:
    """Check a loss function against an objective: no model, no recording.

    \b
    regress check my_pkg.losses:grpo_loss --as grpo
    regress check my_pkg.losses:policy_loss --as dapo --set clip_high=0.3 --arg loss_type='"token"'
    regress check my_pkg.losses:f --as grpo --term x=log_probs --term w=advantages

    The function is called in float64 by the names of its arguments: log-probs, old and reference log-probs, advantages
    or rewards, a mask, clip constants, coefficients. Its value and its gradient by the log-probs are judged on batches
    with ratios on both sides of the clip range, one-token and empty samples, tokens without loss, in microbatches and
    packed; a departure is told as the change of the objective that does the same.

    Exit codes: 0 it is that objective, 1 it departs from it, 2 it cannot be called, or there is no such objective.
    """
    from regress.check.objective import check_objective
    from regress.check.report import ObjectiveCheck
    from regress.trust import imported_function

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does

    with errors_written(lambda error: ObjectiveCheck(function, preset, error=error).dumps(), json_file):
        found = check_objective(
            imported_function(function, f"the function {function!r}"),
            preset,
            settings={name: _literal(value) for name, value in _pairs("--set", settings)},
            terms=dict(_pairs("--term", terms)),
            arguments={name: _literal(value) for name, value in _pairs("--arg", arguments)},
        )
    echo(found.to_text())
    if json_file is not None:
        write_output(json_file, found.dumps())
    ctx.exit(found.exit_code)


def _pairs(option: str, given: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"{option} {text!r} is no NAME=VALUE: write the name of one, an equals sign and its value"
            )
        yield name, value


def _literal(text: str) -> Any:
    """Return a value as Python writes it, or as YAML does for null, true and false; anything else is a text."""
    words = {"null": None, "true": True, "false": False, "inf": float("inf")}
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
