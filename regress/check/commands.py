"""``regress check``: what needs no recording: a loss function beside an objective, a script that resumes."""

from __future__ import annotations

import ast
import shlex
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any

import click

from regress.choice_option import Choice
from regress.dump.command_outputs import LocalFolder, Output, errors_written, json_option, write_output
from regress.errors import ConfigError
from regress.printable_text import echo


class _Checks(click.Group):
    """Checks by name; that of losses has ``module:function``, that of models ``hf:NAME``, for its name."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a check by its name, or by what it is of."""
        return super().get_command(ctx, _check_of(cmd_name) or cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Put the name of a check before what it is of."""
        named = args[0] in self.commands
        return super().resolve_command(ctx, args if named else [_check_of(args[0]) or "loss", *args])


def _check_of(text: str) -> str | None:
    return "model" if text.startswith("hf:") else "loss" if ":" in text else None


@click.group(cls=_Checks, context_settings={"ignore_unknown_options": True})
def check() -> None:
    """Check a loss function, an architecture, or that a script resumes: no recording.

    \b
    regress check my_pkg.losses:grpo_loss --as grpo
    regress check model path/to/checkpoint
    regress check resume -- python train.py --output-dir {run}
    """


@check.command()
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
    "--term",
    "terms",
    metavar="NAME=TERM",
    multiple=True,
    help="What an argument is, if its name is not help.",
)
@click.option("--arg", "arguments", metavar="NAME=VALUE", multiple=True, help="The value of an argument.")
@json_option
@click.pass_context
def loss(
    ctx: click.Context,
    function: str,
    preset: str,
    settings: tuple[str, ...],
    terms: tuple[str, ...],
    arguments: tuple[str, ...],
    json_file: Output | None,
) -> None:
    """Check a loss function against an objective.

    The name of this check may be left out.

    \b
    regress check my_pkg.losses:grpo_loss --as grpo
    regress check my_pkg.losses:policy_loss --as dapo --set clip_high=0.3 --arg loss_type='"token"'
    regress check my_pkg.losses:f --as grpo --term x=log_probs --term w=advantages

    The function is called in float64 by the names of its arguments: log-probs, old and reference log-probs, advantages
    or rewards, a mask, clip constants, coefficients. Its value and its gradient by the log-probs are judged on batches
    with ratios on both sides of the clip range, one-token and empty samples, tokens without loss, in microbatches and
    packed; a departure is reported as the change of the objective that does the same.

    Exit codes: 0 it is that objective, 1 it departs from it, 2 it cannot be called, or there is no such objective.
    """
    from regress.check.check_report import ObjectiveCheck
    from regress.check.loss_check import check_objective
    from regress.import_trust import imported_function

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does

    with errors_written(lambda error: ObjectiveCheck(function, preset, error=error).dumps(), json_file):
        found = check_objective(
            imported_function(function, f"the function {function!r}"),
            preset,
            settings={name: _literal(value) for name, value in _pairs("--set", settings).items()},
            terms=_pairs("--term", terms),
            arguments={name: _literal(value) for name, value in _pairs("--arg", arguments).items()},
        )
    echo(found.to_text())
    if json_file is not None:
        write_output(json_file, found.dumps())
    ctx.exit(found.exit_code)


@check.command()
@click.argument("name", metavar="MODEL")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and samples.")
@click.option(
    "--real-weights", is_flag=True, help="Take the weights of the first layers from the checkpoint."
)
@json_option
@click.pass_context
def model(ctx: click.Context, name: str, seed: int, real_weights: bool, json_file: Output | None) -> None:
    """Check an architecture under padding, packing, checkpointing, a compiler, generation and two ranks.

    \b
    regress check model outputs/demo/final
    regress check model path/to/config.json
    regress check hf:Qwen/Qwen3-0.6B            the configuration is downloaded, the weights are not

    The model is cut to a few layers, one of each kind, with random weights, in float64. Log-probs and gradients of four
    samples are compared with those of each sample alone. `pytest --regress-model MODEL` has a test for each layout.

    Exit codes: 0 no layout is wrong, 1 some are, 2 there is no such model. A layout that the model refuses is not an
        error.
    """
    from regress.check.architecture_check import ModelCheck, check_model

    with errors_written(lambda error: ModelCheck(name, error=error).dumps(), json_file):
        found = check_model(name, seed=seed, real_weights=real_weights)
    echo(found.to_text())
    if json_file is not None:
        write_output(json_file, found.dumps())
    ctx.exit(found.exit_code)


@check.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--resume-with", metavar="ARGUMENTS", default="", help="Added to resume, as one text; by default nothing."
)
@click.option(
    "--stop-after", type=click.IntRange(1), metavar="N", help="Optimizer step; by default half of them."
)
@click.option("--signal", "by", type=Choice(("kill", "term", "int")), default="kill", help="What stops it.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds of a run."
)
@click.option("--folder", type=LocalFolder(), help="Keeps the runs; by default none is.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND", required=True)
@click.pass_context
def resume(
    ctx: click.Context,
    resume_with: str,
    stop_after: int | None,
    by: str,
    timeout: float,
    folder: Path | None,
    json_file: Output | None,
    command: tuple[str, ...],
) -> None:
    """Check that a script resumes: four runs, judged step by step.

    \b
    regress check resume -- python train.py --output-dir {run}
    regress check resume --resume-with '--resume latest' -- torchrun --nproc-per-node 2 train.py --out {run}

    The script runs twice without a stop, then it is stopped behind an optimizer step and run again. {run} is a folder
    of its own for each. Weights, gradients, learning rates and the state of the optimizer of each step are compared,
    bit for bit, through hooks of torch's optimizers; the script is not changed. Where the two uninterrupted runs differ
    already, nothing is judged from that step on.

    Exit codes: 0 it goes on as if it had not been stopped, 1 it does not, 2 it cannot be judged.
    """
    from regress.check.resume_check import ResumeCheck, check_resume

    said = " ".join(command)
    with (
        errors_written(lambda error: ResumeCheck(said, error=error).dumps(), json_file),
        ExitStack() as stack,
    ):
        place = folder or Path(stack.enter_context(TemporaryDirectory()))
        found = check_resume(
            command,
            place.resolve(),
            again=shlex.split(resume_with),
            stop_after=stop_after,
            by=Signals[f"SIG{by.upper()}"],
            timeout=timeout,
        )
    echo(found.to_text())
    if json_file is not None:
        write_output(json_file, found.dumps())
    ctx.exit(found.exit_code)


def _pairs(option: str, given: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"{option} {text!r} is not NAME=VALUE: write the name of one, an equals sign and its value"
            )
        if name in found:
            raise ConfigError(f"{option} {name} is given twice: keep one")
        found[name] = value
    return found


def _literal(text: str) -> Any:
    """Return a value as Python writes it, or as YAML does for null, true and false; anything else is a text."""
    words = {"null": None, "true": True, "false": False, "inf": float("inf")}
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
