"""The ``regress`` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from regress import __version__
from regress.choice_option import Choice
from regress.command_group import Commands, FriendlyGroup, renamed
from regress.credential_redaction import redacted_url
from regress.dump.command_outputs import Output, OutputFolder, errors_written, json_option, write_output
from regress.dump.dump_location import Location
from regress.engine.config.command_flags import CommandWithFlags
from regress.errors import ConfigError
from regress.golden.golden_options import code_option
from regress.plugins import RESUME_CHECKS, TRAINERS, load, named, registered
from regress.printable_text import echo
from regress.progress_bar import progress
from regress.report.judge_options import json_calls_option, json_file_option

if TYPE_CHECKING:
    from regress.engine.config.config_schema import Config
    from regress.engine.training_run import RunResult

_BUILT_IN = sorted(path.stem for path in (Path(__file__).parent / "engine/config/conf").glob("*.yaml"))

_OLD = {
    "calibrate": ("regress.replay.commands:calibrate", "regress golden calibrate CASE"),
    "study": ("regress.replay.commands:validate", "regress golden validate CASE"),
}
"""Hidden spelling of a command -> where it is, and how it is spelled now."""


@click.group(
    cls=FriendlyGroup, commands=Commands(_OLD), context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="regress")
def main() -> None:
    """Did you change how it is computed, or what is computed?

    A numerical regression harness for GRPO and RL post-training: train with recorded tensors, replay the
    recorded rollouts under another computation, compare.
    """


@main.command(cls=CommandWithFlags)
@click.option(
    "--config-path", "--config_path", metavar="PATH", help="Directory of configurations, or one YAML file."
)
@click.option(
    "--config-name",
    "--config_name",
    metavar="NAME",
    help=f"Configuration in that directory, or a built-in one ({', '.join(_BUILT_IN)}).",
)
@click.option(
    "--print-config", is_flag=True, help="Show every key with its value and what decided it; do not run."
)
@click.option(
    "--allow-change",
    multiple=True,
    metavar="KEY",
    help="With trainer.resume_from_checkpoint: this key of model, data, objective or seed may differ from the "
    "checkpoint's. Give it once for each.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the run that output_dir holds, with its checkpoints (its dumps: debug.overwrite=true); without this "
    "it is refused.",
)
@code_option
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(
    config_path: str | None,
    config_name: str | None,
    print_config: bool,
    allow_change: tuple[str, ...],
    overwrite: bool,
    overrides: tuple[str, ...],
    flags: dict[str, str],
) -> None:
    """Train with GRPO, as configured.

    \b
    Values come from these sources, later ones override earlier ones:
      the defaults, the algorithm.preset, the YAML file (Hydra: defaults lists,
      interpolation), the environment (REGRESS_OPTIMIZER__LEARNING_RATE=1e-3),
      the command line (optimizer.learning_rate=1e-3, or the flag --lr 1e-3).

    \b
    Train on a built-in task:
      regress train --config-name reverse_string
    Record every tensor of three steps, then replay the recorded rollouts:
      regress train --config-name demo
      regress train --config-name demo_replay
    Every key, with its value and its origin:
      regress train --print-config
    Another model family, another loss, packed batches:
      regress train model=llama algorithm.preset=dapo batching.layout=packed
    """
    from regress.engine.config import load_config
    from regress.engine.config import print_config as show

    console = Console()
    loaded = load_config(config_path, config_name, overrides, flags=flags)
    for note in loaded.notes if os.environ.get("RANK", "0") == "0" else ():
        echo(f"note: {note}", err=True)
    if print_config:
        show(loaded, console)
        return
    from regress.engine.determinism_environment import export_environment

    export_environment(loaded.config.system_envs)

    def examined() -> None:
        for check in registered(RESUME_CHECKS).values():
            load(check)(loaded.config, console, allow_change)

    sys.path.append(str(Path.cwd()))  # rewards of one's own: task.rewards names package.module:function
    run = load(named(TRAINERS, loaded.config.trainer.type))  # torch starts here, after the environment is set
    result = run(
        loaded.config,
        console,
        allow_change=allow_change,
        before_resume=examined,
        earlier="replace" if overwrite else "refuse",
    )
    if result.main:
        _tell(result, loaded.config)


def _tell(result: RunResult, config: Config) -> None:
    echo(f"{config.max_steps} steps done")
    echo(f"metrics:      {result.output_dir / 'metrics.jsonl'}")
    remote = config.trainer.type == "remote"
    echo(f"final model:  {result.output_dir / 'final'}" + (", in the service" if remote else ""))
    if result.dump_dir is not None:
        echo(f"{'files:  ' if remote else 'tensors:'}      {result.dump_dir}")
    if result.dump_dir is not None and not remote:
        echo(f"look at them: regress dump show {result.dump_dir}")


@main.group()
def dump() -> None:
    """Show, check and copy recorded tensors."""


@dump.command()
@click.argument("path")
@json_option
def show(path: str, json_file: Output | None) -> None:
    """Show a dump directory, or one of its files, as a table.

    PATH may be a URL.

    \b
    regress dump show outputs/demo/debug_dump
    regress dump show outputs/demo/debug_dump/forward_data/step_000000_rank0_micro0.safetensors
    regress dump show s3://bucket/run
    """
    from regress.dump.dump_inspection import Shown, inspected

    with errors_written(lambda error: Shown(path, error=error).dumps(), json_file):
        found = inspected(path)
        Console().print(found.table())
        if json_file is not None:
            write_output(json_file, found.dumps())


@dump.command()
@click.argument("path")
@json_file_option
@json_calls_option
@click.pass_context
def check(ctx: click.Context, path: str, json_file: Output | None, json_calls: Output | None) -> None:
    """Check the invariants of every update, without any golden values.

    \b
    regress dump check outputs/demo/debug_dump

    Masks and padding are disjoint, tokens and weights add up, advantages of a group sum to 0, ratios match the
    log-probs (exactly 1 on policy), log-probs and entropies lie in their range, losses are the sums of their
    terms, records name the same token ids, replicas hold the same bytes, and nothing is NaN or filled with zeros.

    What the records do not tell is listed as not checked.

    Exit codes: 0 all that was checked holds, 1 something does not, 2 nothing could be checked.
    """
    from regress.report.comparison_report import CHECK, checked, refused
    from regress.report.report_files import write_report_files
    from regress.report.verdict_text import headline

    with errors_written(refused, json_file, json_calls):
        report = checked(path)
        for call in report.failed:
            echo(headline(call.verdict, path))
        for cause in report.diagnoses.get(CHECK, ()):
            echo(str(cause))
        for note in report.notes:
            echo(note)
        echo(report.title)
        write_report_files(report, json_file, json_calls)
    ctx.exit(report.exit_code)


@dump.command()
@click.argument("path", metavar="DUMP")
@click.argument("target", metavar="FOLDER", type=OutputFolder())
@click.option("--redact", is_flag=True, help="Hash token ids, texts, and names of parameters and modules.")
@click.option(
    "--key",
    metavar="TEXT",
    help="Secret of the hashes: dumps that are exported with one key can be compared. By default it is drawn.",
)
@click.option("--format", type=Choice(("safetensors", "pt", "jsonl")), help="By default that of the dump.")
def export(path: str, target: Location, redact: bool, key: str | None, format: str | None) -> None:
    """Copy a dump to another folder, to send it to somebody.

    \b
    regress dump export outputs/demo/debug_dump /tmp/case --redact
    regress dump export A /tmp/a --redact --key "$SECRET"
    regress dump export B /tmp/b --redact --key "$SECRET"
    regress compare /tmp/a /tmp/b                            as A and B compare

    With --redact shapes, places and numbers stay, weights and rewards, too. Nonzero rows of an embedding's gradient
    still tell how many tokens there are, not which.
    """
    from regress.dump.redacted_copy import Redaction, copy_dump

    if key is not None and not redact:
        raise ConfigError("--key is for hashes, which only --redact makes: give both")
    change = Redaction(key) if redact else None
    with progress("copying") as bar:
        count = copy_dump(path, target, change, format=format, advance=bar.advance)
    echo(f"{count} records: {redacted_url(str(target))}")


@dump.command()
@click.argument("first")
@click.argument("second")
@click.pass_context
def diff(ctx: click.Context, first: str, second: str) -> None:
    """Compare two dumps of the same token layout and format bit by bit.

    \b
    regress dump diff outputs/demo/debug_dump outputs/demo_replay/debug_dump
    regress dump diff outputs/demo/debug_dump s3://bucket/run

    Exit codes: 0 the same bits, 1 a difference, 2 a dump that cannot be read.
    """
    from regress.dump.bitwise_difference import compare_bitwise

    found = compare_bitwise(first, second)
    for difference in found.differences:
        echo(f"{difference.file}: {difference.what}")
    if found.differences:
        echo(f"different: {len(found.differences)} differences in {found.records} records")
        ctx.exit(1)
    echo(f"bit-identical: {found.records} records, {found.tensors} tensors")


dump.add_command(renamed(diff, "dump diff", "regress compare --bitwise GOLDEN ACTUAL"))


if __name__ == "__main__":
    sys.exit(main())
