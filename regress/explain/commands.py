"""``regress explain``: the behaviour of a recorded trainer, read from its updates."""

from __future__ import annotations

import click

from regress.dump.command_outputs import Output, errors_written, json_option, write_output
from regress.printable_text import echo


@click.command()
@click.argument("path", metavar="DUMP")
@click.option("--step", type=int, metavar="N", help="By default all with token gradients.")
@click.option("--update", type=int, metavar="N", help="Update within the step; by default all.")
@click.option(
    "--preset", metavar="NAME", help="The objective that the trainer should follow, such as trl:dapo."
)
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    path: str,
    step: int | None,
    update: int | None,
    preset: str | None,
    json_file: Output | None,
) -> None:
    """Say what a recorded trainer really does.

    One update is enough; of several, each says what it shows: ratios and clipping show off policy alone.

    \b
    regress explain outputs/demo/debug_dump
    regress explain their_dump --step 3 --output explanation.json
    regress explain golden:dense --preset grpo

    From the gradient of the loss by each token's log-prob: mask, temperature, weights and their denominator,
    advantages, KL, entropy bonus, clipping, and the presets that do the same. Each statement comes with the numbers
    that prove it; what the dump does not tell is named, with what to record for it.

    Exit codes: 0 explained, 1 the trainer departs from what such a trainer has to do, or no update shows that it
    follows the preset asked for, 2 nothing to explain, or a preset that cannot be evaluated.
    """
    from regress.explain.explanation import explain_dump
    from regress.explain.statement import Explanation

    with errors_written(lambda error: Explanation(path, (), preset, error).dumps(), json_file):
        found = explain_dump(path, step=step, update=update, preset=preset)
    echo(found.to_text())
    if json_file is not None:
        write_output(json_file, found.dumps())
    if found.error is not None:
        echo(f"error: {found.error['message']}", err=True)
    ctx.exit(found.exit_code)
