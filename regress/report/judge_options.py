"""Options of commands that judge a dump: how it is judged, and where the report is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import click

from regress.choice_option import Choice
from regress.dump.command_outputs import OutputFile, OutputFolder

Option: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]

only_option: Option = click.option(
    "--only",
    metavar="PATTERN",
    multiple=True,
    help="Quantities or tensors: log_probs, gradient/*q_proj*. May be given several times.",
)
report_option: Option = click.option(
    "--report",
    type=OutputFolder(),
    metavar="DIR|URL",
    help="Write index.html and report.json there.",
)
json_file_option: Option = click.option(
    "--json",
    "--output",
    "json_file",
    type=OutputFile(),
    metavar="FILE|URL|-",
    help="Write the JSON report: the result, causes and what failed; - is standard output, and the rest then goes to "
    "standard error.",
)
json_calls_option: Option = click.option(
    "--json-calls",
    "json_calls",
    type=OutputFile(),
    metavar="FILE|URL|-",
    help="Write the JSON report with every verdict, those within tolerance, too.",
)


def precision_option(help: str) -> Option:
    """Return ``--precision``, which declares what a trainer computes in."""
    return click.option("--precision", type=Choice(["float64", "float32", "bfloat16", "float16"]), help=help)


def ranks_average_option(whose: str) -> Option:
    """Return ``--ranks-average``, of the ranks named in words."""
    words = f"{whose} reports the mean of its own loss: divide losses and token gradients by the ranks."
    return click.option("--ranks-average", is_flag=True, help=words)
