"""``regress oracle``: another trainer's dump, judged by the true float64 values of its own batch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from regress.dump.command_outputs import LocalFolder, Output, errors_written
from regress.dump.dump_location import Location
from regress.errors import OracleError
from regress.printable_text import echo
from regress.report.judge_options import (
    json_calls_option,
    json_file_option,
    only_option,
    precision_option,
    ranks_average_option,
    report_option,
)


@click.command()
@click.argument("path", metavar="DUMP")
@click.option("--preset", metavar="NAME", help="Objective that the trainer claims, such as trl:dapo.")
@click.option(
    "--set",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    help="A value over the preset, such as algorithm.kl_coef=0.05; advantages=1.0 for supervised fine-tuning. "
    "May be given several times.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="CHECKPOINT",
    help="Weights before the first update; by default those that record(initial_weights=True) kept.",
)
@click.option(
    "--reference", metavar="CHECKPOINT", help="Reference model of the KL term; initial: the initial weights."
)
@precision_option("What the trainer is declared to compute in, whatever was recorded of it.")
@ranks_average_option("Each rank")
@only_option
@click.option(
    "--keep",
    type=LocalFolder(),
    metavar="DIR",
    help="New folder for the true values, a dump as any other.",
)
@report_option
@json_file_option
@json_calls_option
@click.pass_context
def oracle(
    ctx: click.Context,
    path: str,
    preset: str | None,
    settings: tuple[str, ...],
    model: Path | None,
    reference: str | None,
    precision: str | None,
    ranks_average: bool,
    only: tuple[str, ...],
    keep: Path | None,
    report: Location | None,
    json_file: Output | None,
    json_calls: Output | None,
) -> None:
    """Judge a recorded trainer without a baseline.

    The engine repeats each recorded update in true float64, on one process, from the dump's own tokens, weights,
    rewards and masks, and the dump is compared with what it should hold.

    \b
    regress oracle outputs/trl --preset trl:dapo
    regress oracle outputs/mine --preset verl:token-mean --set algorithm.entropy_coef=0.001
    regress oracle outputs/mine                   by the objective that its own gradients prove
    regress oracle outputs/sft --set advantages=1.0 --set algorithm.loss=reinforce

    The dump is one of regress.record, with initial_weights=True and rewards or advantages tapped. Each update begins
    with the weights and moments that were recorded before it, so errors do not add up.

    Exit codes: 0 as it should be within tolerance, 1 it differs, 2 something could not be judged.
    """
    from regress.oracle.claimed_objective import resolved
    from regress.oracle.oracle_judge import judge_dump
    from regress.replay.extra_settings import parse_settings
    from regress.report.compare_commands import print_comparison
    from regress.report.comparison_report import refused

    with ExitStack() as resources, errors_written(refused, json_file, json_calls):
        found = judge_dump(
            path,
            _folder(keep, resources),
            preset=preset,
            settings=parse_settings(settings, "algorithm.kl_coef=0.05"),
            model=model,
            reference=reference,
            precision=precision,
            ranks_average=ranks_average,
            only=only,
        )
        echo(f"objective: {found.claim.words}")
        echo(f"  {resolved(found.objective)}")
        code = print_comparison(
            {"oracle": found.comparison},
            folder=report,
            json_file=json_file,
            json_calls=json_calls,
            again="" if keep is not None else _command(ctx.params),
        )
        for note in found.notes:
            echo(f"note: {note}")
        if keep is not None:
            echo(f"written: {found.truth}")
    ctx.exit(code)


def _command(given: Mapping[str, Any]) -> str:
    """Return the command that makes the true values again, which are gone when this one ends."""
    named = [("preset", given["preset"]), *(("set", text) for text in given["settings"])]
    named += [(name, given[name]) for name in ("model", "reference", "precision")]
    options = [part for name, value in named if value is not None for part in (f"--{name}", str(value))]
    averaged = ["--ranks-average"] if given["ranks_average"] else []
    return shlex.join(["regress", "oracle", given["path"], *options, *averaged])


def _folder(keep: Path | None, resources: ExitStack) -> Path:
    """Return the folder of the true values: a new one that is kept, or a temporary one."""
    from regress.replay.temporary_workspace import Workspace

    if keep is None:
        return resources.enter_context(Workspace())
    if keep.exists() and any(keep.iterdir()):
        raise OracleError(f"--keep {keep} is not empty: give a new folder")
    return keep
