"""``regress explain``: the behaviour of a recorded trainer, read from one update."""

from __future__ import annotations

import json

import click

from regress.dump.outputs import Output, OutputFile, write_output
from regress.errors import CompareError, DumpError
from regress.printed import echo


@click.command()
@click.argument("path", metavar="DUMP")
@click.option("--step", type=int, metavar="N", help="By default the first with token gradients.")
@click.option("--update", type=int, metavar="N", help="Update within the step; by default the first.")
@click.option(
    "--preset", metavar="NAME", help="The objective that the trainer should follow, such as trl:dapo."
)
@click.option(
    "--json",
    "--output",
    "json_file",
    type=OutputFile(),
    metavar="FILE|URL|-",
    help="Write the explanation as JSON; - is standard output, and the rest then goes to standard error.",
)
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

    One update is enough.

    \b
    regress explain outputs/demo/debug_dump
    regress explain their_dump --step 3 --output explanation.json

    From the gradient of the loss by each token's log-prob: mask, temperature, weights and their denominator,
    advantages, KL, entropy bonus, clipping, and the presets that do the same. Each statement comes with the numbers
    that prove it; what the dump does not tell is named, with what to record for it.

    Exit codes: 0 explained, 1 the trainer departs from what such a trainer has to do, 2 nothing to explain.
    """
    from regress.explain.explain import explain_dump

    try:
        found = explain_dump(path, step=step, update=update, preset=preset)
    except (CompareError, DumpError) as error:
        echo(f"error: {error}", err=True)
        ctx.exit(2)
    echo(found.to_text())
    if json_file is not None:
        write_output(json_file, json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    ctx.exit(int(bool(found.departures)))
