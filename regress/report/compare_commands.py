"""``regress compare``: two dumps of any layouts and systems, judged and reported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from regress.choice_option import Choice
from regress.compare.dumps.engines import ENGINES, engine_named
from regress.dump.command_outputs import Output, errors_written
from regress.dump.dump_location import Location
from regress.errors import ConfigError
from regress.golden.golden_options import directory_option
from regress.printable_text import echo
from regress.progress_bar import progress
from regress.report.judge_options import (
    json_calls_option,
    json_file_option,
    only_option,
    precision_option,
    ranks_average_option,
    report_option,
)
from regress.report.number_format import plural

if TYPE_CHECKING:
    from regress.compare.dumps.comparison import Comparison, Engine
    from regress.compare.dumps.comparison_options import Options
    from regress.compare.dumps.tolerance_bounds import Bounds
    from regress.compare.verdicts.verdict import Verdict
    from regress.report.mode_comparison import Directories, Modes
    from regress.report.report_model import Report
    from regress.report.token_values import TokenTable

_WIDTH = 110  # where there is no terminal
_SHOWN = 8
"""Number of notes and samples that the terminal names one by one; the files have all."""


@click.command()
@click.argument("golden", required=False, metavar="[GOLDEN")
@click.argument("actual", required=False, metavar="ACTUAL]")
@click.option(
    "--step", metavar="N|A:B", help="One step, or those from A to B; by default all that both dumps have."
)
@only_option
@click.option(
    "--common", is_flag=True, help="What only one of the two has is listed, and is not a difference."
)
@precision_option("What ACTUAL is declared to compute in, whatever was recorded of it; its bounds are used.")
@ranks_average_option("Each rank of ACTUAL")
@click.option(
    "--rtol", type=click.FloatRange(0), help="Tolerated error, relative to the largest golden value."
)
@click.option("--atol", type=click.FloatRange(0), help="Tolerated absolute error, added to that.")
@click.option("--bitwise", is_flag=True, help="Every byte of what is compared has to be the same.")
@click.option("--tolerances", metavar="CASE", help="Those that were measured for a golden case.")
@click.option(
    "--noise",
    metavar="GOLDEN2",
    help="A second recording of GOLDEN: a difference no larger than that of the two cannot be judged.",
)
@report_option
@json_file_option
@json_calls_option
@click.option(
    "--self-hosted-dir", "--self_hosted_dir", metavar="DIR", help="NexRL: the dump of the trainer itself."
)
@click.option(
    "--remote-api-dir", "--remote_api_dir", metavar="DIR", help="NexRL: that of a client of a remote trainer."
)
@click.option("--weaver-dir", "--weaver_dir", metavar="DIR", help="NexRL: that of the remote trainer.")
@click.option(
    "--num-ranks", "--num_ranks", type=click.IntRange(1), help="Ranks that are compared; all by default."
)
@click.option(
    "--num-micros", "--num_micros", type=click.IntRange(1), help="Microbatches of a rank; all by default."
)
@click.option(
    "--engine",
    type=Choice(ENGINES),
    default="processes",
    help="Who does the work: this process, processes of this machine when there is much of it (the default), or a Ray "
    "cluster.",
)
@click.option(
    "--workers",
    type=int,
    metavar="N",
    help="Processes or tasks at a time; by default one for each processor.",
)
@click.option(
    "--ray-address",
    metavar="HOST:PORT",
    help="An existing Ray cluster; by default that of RAY_ADDRESS, else one is started.",
)
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Verify the bytes that are read by the checksums of their dump.",
)
@directory_option
@click.pass_context
def compare(
    ctx: click.Context,
    golden: str | None,
    actual: str | None,
    step: str | None,
    only: tuple[str, ...],
    common: bool,
    precision: str | None,
    ranks_average: bool,
    rtol: float | None,
    atol: float | None,
    bitwise: bool,
    tolerances: str | None,
    noise: str | None,
    report: Location | None,
    json_file: Output | None,
    json_calls: Output | None,
    self_hosted_dir: str | None,
    remote_api_dir: str | None,
    weaver_dir: str | None,
    num_ranks: int | None,
    num_micros: int | None,
    engine: str,
    workers: int | None,
    ray_address: str | None,
    verify: bool,
    golden_dir: Path | None,
) -> None:
    """Compare two sources; the first judges the second.

    A source is a dump, a golden case, a file of tensors or a checkpoint folder.

    Padding side, packing, microbatches, row order, data, context, tensor and pipeline parallelism may differ: samples
    are matched by id, else by their tokens, and parameters element by element. Dumps of NexRL (self-hosted, remote API,
    weaver; pt and jsonl, of both generations) are read as they are.

    \b
    regress compare outputs/base/debug_dump outputs/packed/debug_dump
    regress compare A B --step 3:5 --only 'gradient/*q_proj*'
    regress compare A B --tolerances dense --report out
    regress compare A B --noise A2                           A2 is A, recorded once more
    regress compare golden:dense outputs/mine/debug_dump     by its truth and measured tolerances
    regress compare A B --engine ray --ray-address head:6379
    As NexRL's compare_debug_dumps.py, whose sections the JSON report has:
      regress compare --self_hosted_dir A --weaver_dir B --step 0 --output report.json

    Exit codes: 0 equal within tolerance, 1 they differ, 2 something could not be compared.
    """
    from regress.compare.comparison_request import bounds_of
    from regress.compare.dumps.golden_source import located
    from regress.compare.dumps.rank_averaged_loss import averaged
    from regress.report.comparison_report import refused
    from regress.report.mode_comparison import modes_of

    with errors_written(refused, json_file, json_calls):
        pairs, dirs = _pairs(golden, actual, self_hosted_dir, remote_api_dir, weaver_dir, golden_dir)
        bounds = bounds_of(rtol, atol, bitwise, tolerances, golden_dir, precision=precision)
        options = replace(_options(step, only, num_ranks, num_micros, bounds), common=common, verify=verify)
        if ranks_average:
            pairs = {name: (one, averaged(other)) for name, (one, other) in pairs.items()}
        work = engine_named(engine, workers=workers, address=ray_address, notify=_warn)
        modes = None if dirs is None else modes_of(dirs, options)
        compared = pairs if modes is None else modes.pairs
        found = {name: _compared(one, other, options, work) for name, (one, other) in compared.items()}
        if noise is not None:
            second = located(noise, golden_dir)
            found = {name: _beside_noise(one, second, options, work) for name, one in found.items()}
        tables = [] if report is json_file is json_calls is None else _tables(found, options)
        code = print_comparison(found, tables, modes, report, json_file, json_calls, options)
    ctx.exit(code)


def _pairs(
    golden: str | None,
    actual: str | None,
    self_hosted: str | None,
    remote_api: str | None,
    weaver: str | None,
    folder: Path | None,
) -> tuple[dict[str, tuple[str, str]], Directories | None]:
    """Return the pairs of golden and actual sources, by name."""
    from regress.compare.dumps.golden_source import located
    from regress.report.mode_comparison import Directories

    others = {"remote API": remote_api, "weaver": weaver}
    if self_hosted is None:
        if golden is None or actual is None or any(others.values()):
            raise ConfigError("""two dumps are compared: give GOLDEN and ACTUAL, or --self_hosted_dir with --weaver_dir
            or --remote_api_dir""")
        return {"compare": (located(golden, folder), located(actual, folder))}, None
    if golden is not None or actual is not None:
        raise ConfigError("give either GOLDEN and ACTUAL, or --self_hosted_dir and the others, not both")
    pairs = {name: (self_hosted, path) for name, path in others.items() if path is not None}
    if not pairs:
        raise ConfigError(
            f"{self_hosted} alone cannot be compared: give --weaver_dir or --remote_api_dir, or both"
        )
    return pairs, Directories(self_hosted, remote_api, weaver)


def _options(
    step: str | None, only: Sequence[str], ranks: int | None, micros: int | None, bounds: Bounds
) -> Options:
    from regress.compare.dumps.comparison_options import Options
    from regress.compare.dumps.tensor_selection import Selection

    steps = None
    if step is not None:
        match = re.fullmatch(r"(-?\d+)(?::(-?\d+))?", step)
        if match is None:
            raise ConfigError(f"--step {step!r} is neither a step nor a range of them: write 3, or 3:5")
        steps = int(match[1]), int(match[2] or match[1])
        if steps[0] > steps[1]:
            raise ConfigError(f"--step {step} begins after it ends: write {steps[1]}:{steps[0]}")
    return Options(steps, ranks, micros, bounds, Selection.of(*only))


def _warn(text: str) -> None:
    echo(f"warning: {text}", err=True)


def _compared(golden: str, actual: str, options: Options, engine: Engine) -> Comparison:
    from regress.compare.dumps.comparison import compare_dumps

    with progress(f"{golden} and {actual}") as bar:

        def advance(number: int) -> None:
            if number < 0:
                bar.expect(-number)
            else:
                bar.advance(number)

        return compare_dumps(golden, actual, options, engine=engine, advance=advance)


def _beside_noise(found: Comparison, noise: str, options: Options, engine: Engine) -> Comparison:
    from regress.compare.baseline_noise import judged_beside_noise

    return judged_beside_noise(found, _compared(found.golden, noise, options, engine))


def _tables(found: Mapping[str, Comparison], options: Options) -> list[TokenTable]:
    from regress.report.comparison_report import comparison_tables

    return [table for name, one in found.items() for table in comparison_tables(name, one, options)]


def print_comparison(
    found: Mapping[str, Comparison],
    tokens: Sequence[TokenTable] = (),
    modes: Modes | None = None,
    folder: Location | None = None,
    json_file: Output | None = None,
    json_calls: Output | None = None,
    options: Options | None = None,
    again: str = "",
) -> int:
    """Print comparisons, write their reports, and return the exit code.

    Args:
        found: the comparisons by name.
        modes: the modes of a training, of which these are comparisons.
        folder, json_file, json_calls: where the report is written, if anywhere; to `json_file` what failed alone.
        options: those of the comparisons.
        again: command that makes the golden dump and compares again, where that dump is not kept.
    """
    from regress.compare.dumps.different_runs import APART
    from regress.report.comparison_report import MODES, report_of
    from regress.report.lens_report import lens_lines
    from regress.report.report_files import write_report, write_report_files
    from regress.report.terminal_report import colourful, screen

    sections = {} if modes is None else modes.sections()
    between = None if modes is None else modes.found()
    codes = [comparison.exit_code for comparison in found.values()]
    codes += [1] if between is not None and between.discrepancies else []
    ended = 1 if 1 in codes else max(codes)
    report = replace(report_of(found, sections, tokens, between, options, again), ended=ended)
    for name, where in report.environment.items():
        echo(f"{name}: {where}")
    apart = [note for note in report.notes if APART in note]
    for line in apart:
        echo(line)
    console = Console()
    width = console.width if console.is_terminal else _WIDTH
    colour = colourful(console.is_terminal)
    click.echo(screen(report, width=width, height=40, colour=colour, causes=False), nl=False)
    for line in () if modes is None else modes.lines(sections):
        echo(line)
    for one in report.diagnoses.get(MODES, ()):
        echo(str(one))
    for name, comparison in found.items():
        for line in _failures(comparison.failed, name if len(found) > 1 else ""):
            echo(line)
        for line in _causes(report, name):
            echo(f"{name}: {line}" if len(found) > 1 else line)
        for line in lens_lines(report.lenses[name]) if name in report.lenses else ():
            echo(line)
    for line in _listed(note for note in report.notes if note not in apart):
        echo(f"note: {line}")
    for name, error in report.errors.items():
        echo(f"not compared: {name}: {error}")
    if folder is not None:
        for path in write_report(folder, report):
            echo(f"written: {path}")
    write_report_files(report, json_file, json_calls)
    return ended


def _failures(failed: Sequence[Verdict], name: str) -> Iterator[str]:
    """Yield each tensor that differs, at the place where it differs most, in the order of computation."""
    from regress.report.verdict_text import headline, placed

    for verdict in failed[:_SHOWN]:
        yield f"✗ {placed(name, verdict)}: {headline(verdict)}"
    if len(failed) > _SHOWN:
        yield f"and {plural(len(failed) - _SHOWN, 'more tensor')}"


def _causes(report: Report, name: str) -> Iterator[str]:
    """Yield what the failures of a comparison have in common, what follows from them, and the probable causes."""
    divergence = report.divergences.get(name)
    yield from () if divergence is None else str(divergence).splitlines()[1:]
    for cause in report.diagnoses.get(name, ()):
        yield from str(cause).splitlines()


def _listed(lines: Any) -> Iterator[str]:
    known = [*lines]
    yield from known[:_SHOWN]
    if len(known) > _SHOWN:
        yield f"and {len(known) - _SHOWN} more, which the JSON report has"
