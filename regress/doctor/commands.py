"""Command ``regress doctor``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from regress.dump.command_outputs import Output, OutputFile, save_output
from regress.engine.config.command_flags import CommandWithFlags
from regress.errors import DoctorError
from regress.printable_text import echo

VERBS = (
    *("report_only", "diagnose", "auto_fix", "clean_only", "create_fresh", "backup", "restore", "shell"),
)


@click.command(cls=CommandWithFlags)
@click.option("--report-only", is_flag=True, help="Findings only, not what a repair would do.")
@click.option("--diagnose", is_flag=True, help="Findings with everything that proves them.")
@click.option("--auto-fix", is_flag=True, help="Repair what can be repaired; without it nothing is changed.")
@click.option("--clean-only", is_flag=True, help="Move leftovers of killed writers away; check nothing else.")
@click.option(
    "--create-fresh", is_flag=True, help="Write curriculum_state.json anew, at the checkpoint's stage."
)
@click.option("--backup", is_flag=True, help="Copy the checkpoint and the run's states, with their hashes.")
@click.option(
    "--restore",
    metavar="BACKUP",
    is_flag=False,
    flag_value="newest",
    help="Put back what a backup or a repair has kept; without a name the newest.",
)
@click.option("--shell", is_flag=True, help='Print lines for eval "$(regress doctor --shell)".')
@click.option("--dry-run", is_flag=True, help="Say what the verb would do, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--output",
    type=OutputFile(),
    metavar="FILE|URL|-",
    help="Write the report as JSON there, too; - is standard output.",
)
@click.option("--checkpoint", metavar="PATH", help="The same as CHECKPOINT.")
@click.option(
    "--project-root", metavar="PATH", default=".", help="Where runs are looked for without CHECKPOINT."
)
@click.option("--config-path", "--config_path", metavar="PATH", help="As of regress train: the next run's.")
@click.option("--config-name", "--config_name", metavar="NAME", help="As of regress train: the next run's.")
@click.option(
    "--allow-change", metavar="KEY", multiple=True, help="Accept that a key differs from the checkpoint."
)
@click.option(
    "--fast", is_flag=True, help="Compare sizes, not hashes, and do not look for weights that are NaN."
)
@click.argument("arguments", nargs=-1, metavar="[CHECKPOINT] [KEY=VALUE]...")
@click.pass_context
def doctor(ctx: click.Context, /, **options: Any) -> None:
    """Examine a checkpoint and its run before it is resumed, and repair what can be repaired.

    CHECKPOINT is a checkpoint or an output directory, whose newest checkpoint is taken; without it the
    output_dir of the next run, or the one run below the project root. Give the next run's configuration as to regress
    train, and it is compared with the checkpoint's.

    \b
    regress doctor outputs/demo
    regress doctor outputs/demo --auto-fix
    regress doctor outputs/demo/checkpoint-40 --config-name demo max_steps=80

    Exit codes: 0 nothing of medium or high severity, 1 something is, 2 nothing could be examined.
    """
    from regress.doctor.doctor_verbs import run

    chosen = [verb for verb in VERBS if options[verb]]
    if len(chosen) > 1:
        verbs = " and ".join(f"--{verb.replace('_', '-')}" for verb in chosen)
        raise DoctorError(f"{verbs} exclude one another; give one of them")
    output = options.pop("output")
    found = run(chosen[0] if chosen else "examine", options)
    if output is not None:
        _write(output, found.to_json())
    if options["as_json"]:
        echo(json.dumps(found.to_json(), indent=1))
    else:
        found.show(Console(soft_wrap=False))
    ctx.exit(found.exit_code)


def _write(output: Output, content: dict[str, Any]) -> None:
    if isinstance(output, Path) and not output.parent.is_dir():
        raise DoctorError(
            f"--output {output} cannot be written (no folder {output.parent}); choose another file"
        )
    save_output(output, json.dumps(content, indent=1) + "\n")
