"""``regress replay`` and ``regress variants``: golden cases under variants, judged and reported on one page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from regress.choice_option import Choice
from regress.dump.command_outputs import LocalFolder, Output, OutputFolder, json_option, write_output
from regress.dump.dump_location import Location
from regress.errors import ConfigError
from regress.golden.golden_directory import open_store
from regress.golden.golden_files import CASE_FILE
from regress.golden.golden_options import code_option, directory_option
from regress.parallel.launch.cluster_launchers import LAUNCHERS, Launch
from regress.printable_text import echo
from regress.replay.variant import TIERS, Extent, Precision, Variant
from regress.report.number_format import plural
from regress.report.text_table import Table

if TYPE_CHECKING:
    from regress.replay.command_replays import Results, Session
    from regress.replay.test_matrix import Replay
    from regress.report.headroom import VariantRow
    from regress.report.report_model import Report

POOL = "pool"
EVERYTHING = "*"
_WIDTH = 140  # columns of a table where there is no terminal
_RANKS, _MICROS = 8, 8
"""Maximum ranks and microbatches in the table of a failing quantity."""


@click.command()
@click.argument("cases", nargs=-1, metavar="[CASE]...")
@click.option(
    "--variants",
    "--variant",
    "variants",
    default=EVERYTHING,
    metavar="GLOB|EXPR",
    help="Patterns with commas between them, or an expression such as 'tp2 and not packed'; all by default.",
)
@click.option(
    "--tier",
    type=Choice([*TIERS]),
    default="semantics",
    show_default=True,
    help="The same mathematics (float64), accurate enough (float32, bfloat16, mixed), or the same bytes.",
)
@click.option(
    "--matrix",
    type=Choice([extent.value for extent in Extent]),
    help="Each variant on one case, on those that it could break, or on all that are possible. The last is the default "
    "where both cases and variants are named, else the second.",
)
@click.option(
    "--report",
    type=OutputFolder(),
    metavar="DIR|URL",
    help="Write index.html, report.json and report.txt there.",
)
@click.option("--list", "listing", is_flag=True, help="Only tell what would be replayed.")
@directory_option
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Configuration laid over every variant, such as model.patch=my_kernels:apply; repeatable.",
)
@code_option
@click.option(
    "--keep-dumps",
    type=LocalFolder(),
    metavar="DIR",
    help="Leave the dumps of the replays there.",
)
@click.option("--device", metavar="NAME", help="In place of that of the cases, such as cuda.")
@click.option(
    "--launcher",
    type=Choice([POOL, *LAUNCHERS]),
    default=POOL,
    show_default=True,
    help="What starts the ranks: a pool on this machine, or what a cluster has.",
)
@click.option(
    "--nnodes", type=int, default=1, show_default=True, help="Nodes that share the ranks of a replay."
)
@click.option(
    "--node-rank", type=int, help="Which of them this is; all are simulated on this machine without it."
)
@click.option(
    "--rdzv-endpoint",
    metavar="HOST:PORT",
    help="Where the nodes meet: node 0, and a port that is free there.",
)
@click.option(
    "--work",
    metavar="DIR|URL",
    help="A new folder that all nodes see, for their dumps, or the URL of one in a store.",
)
@click.option(
    "--timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds that a launcher has for a replay.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes of this machine that run replays at a time; each holds an engine.",
)
@click.pass_context
def replay(
    ctx: click.Context,
    cases: tuple[str, ...],
    variants: str,
    tier: str,
    matrix: str | None,
    report: Location | None,
    listing: bool,
    golden_dir: Path | None,
    settings: tuple[str, ...],
    keep_dumps: Path | None,
    device: str | None,
    launcher: str,
    nnodes: int,
    node_rank: int | None,
    rdzv_endpoint: str | None,
    work: str | None,
    timeout: float,
    jobs: int,
) -> None:
    """Replay golden cases under other computations.

    Judges every tensor of every rank and microbatch; the table shows the headroom of each variant: how many times
    larger its largest error could have been.

    \b
    regress replay                              every case, every variant, in float64
    regress replay dense --variants 'packed*'
    regress replay dense gpt2 --variants 'tp2 and not packed' --tier all
    regress replay dense --matrix full --list
    regress replay dense --set model.patch=my_kernels:apply

    \b
    On a cluster, on every node:
      regress replay dense --variants fsdp8-tp4 --device cuda --launcher torchrun
        --nnodes 4 --node-rank $NODE --rdzv-endpoint $HOST:29500 --work s3://bucket/replay

    Exit codes: 0 all within tolerance, 1 a tensor is not, 2 a replay could not run.
    """
    from regress.dump.dump_location import location
    from regress.replay.command_replays import (
        Session,
        adapter_around,
        chosen_replays,
        project_overrides,
        variant_table,
    )
    from regress.replay.extra_settings import settings_of_variants, with_settings
    from regress.replay.judging_layouts import layout_lines
    from regress.replay.replay_jobs import run_all
    from regress.replay.replayer_registry import Machine

    launch = _launch(launcher, nnodes, node_rank, rdzv_endpoint, work, timeout)
    if launch is not None and jobs > 1:
        raise ConfigError(
            f"--launcher {launcher} runs one replay at a time; leave --jobs away, or take --launcher pool"
        )
    own = settings_of_variants(settings)
    plain = variant_table()
    extent = Extent(matrix or (Extent.FULL if cases and variants != EVERYTHING else Extent.DEFAULT))
    store = open_store(golden_dir)
    refused: dict[str, str] = {}
    chosen = [
        replace(one, variant=with_settings(one.variant, own))  # the run tells where they do not apply
        for one in chosen_replays(store, cases, variants, tier, plain, extent, refused)
    ]
    table = {name: with_settings(variant, own) for name, variant in plain.items()}
    overrides, adapter = project_overrides(store), adapter_around()
    console = Console()
    place = None if work is None else location(work)
    session = Session(
        Machine(launch, device, place), keep_dumps, tokens=report is not None, adapter=adapter, settings=own
    )
    if listing:
        console.print(_listed(chosen, session).rich())
        for line in layout_lines(chosen, [one.name for one in chosen], refused, "judge"):
            echo(line)
        return
    if launch is not None and not launch.judges:
        for one in chosen:
            session.attend(one)
        return
    results = run_all(chosen, table, overrides, session, cases, jobs)
    layouts = layout_lines(chosen, results.calls, {**refused, **results.unsupported})
    _tell(results, report, console, layouts)
    _tell_left_out(results, None if adapter is None else adapter.name)
    ctx.exit(results.exit_code)


def _launch(
    launcher: str, nnodes: int, node_rank: int | None, endpoint: str | None, work: str | None, timeout: float
) -> Launch | None:
    if launcher == POOL:
        if (nnodes, node_rank, endpoint, work) != (1, None, None, None):
            raise ConfigError("""a pool of ranks lives on one machine; give --launcher torchrun or accelerate together
            with --nnodes, --node-rank, --rdzv-endpoint and --work""")
        return None
    launch = Launch(launcher, nnodes, node_rank, endpoint, timeout)
    if nnodes > 1 and node_rank is not None and work is None:
        raise ConfigError(
            "several nodes need one folder for their dumps; give --work, a new folder that all of them see"
        )
    return launch


def _tell(results: Results, report: Location | None, console: Console, layouts: Sequence[str]) -> None:
    from regress.report.headroom import QUANTITY_COLUMNS, variant_rows, variants_table
    from regress.report.report_files import write_report
    from regress.report.terminal_report import first_failing

    rows = variant_rows(results.calls, results.errors)
    wide = Console(width=max(console.width, _WIDTH)) if not console.is_terminal else console
    wide.print(variants_table(rows, QUANTITY_COLUMNS).rich())
    _tell_failures(results)
    broken = first_failing(results.all_calls)
    if broken is not None:
        for part in (
            Text(broken.title, "bold"),
            broken.table(_RANKS, _MICROS).rich(),
            Text(broken.statistics),
        ):
            wide.print(part)
    for name, error in results.errors.items():
        echo(f"{name} cannot be replayed: {error}")
    if report is not None:
        for path in write_report(report, _report_of(results, rows)):
            echo(f"written: {path}")
    verdicts = [call.verdict for call in results.all_calls]
    bad = sum(not verdict.ok for verdict in verdicts)
    if not verdicts:
        echo("nothing was compared")
        return
    for line in layouts:
        echo(line)
    end = f"{bad} failed in {plural(len(results.failed), 'replay')}" if bad else "all within tolerance"
    compared = f"{plural(len(verdicts), 'check')} of {plural(results.tensors, 'tensor')}"
    missing = f"; {plural(len(results.errors), 'replay')} could not be judged" if results.errors else ""
    echo(f"{plural(len(results.calls), 'replay')}, {compared}: {end}{missing}")


def _tell_failures(results: Results) -> None:
    """Print what fails together, with its cause."""
    from regress.report.failure_groups import GROUPS
    from regress.report.github_summary import annotated, annotation
    from regress.report.verdict_text import describe_divergence

    groups = results.groups()
    for group in groups[:GROUPS]:
        assert group.first is not None
        name = group.replays[0]
        divergence, causes = results.divergences.get(name), results.diagnoses.get(name, ())
        echo(group.title)
        for line in describe_divergence(divergence, causes, group.first):
            echo(f"  {line}")
        if len(results.failed) > 1:
            echo(f"  {group.extent('check')}")
        if annotated():
            path = str(results.cases[name.partition("/")[0]].folder / CASE_FILE)
            echo(annotation(path, 1, group.title, f"{group.extent('check')}\n{group.cause}"))
    if len(groups) > GROUPS:
        echo(f"and {len(groups) - GROUPS} more")


def _report_of(results: Results, rows: Sequence[VariantRow]) -> Report:
    from regress.replay.case_recording import surroundings
    from regress.report.report_model import Report

    return Report(
        "regress replay",
        results.all_calls,
        errors=results.errors,
        tokens=results.tokens,
        divergences=results.divergences,
        diagnoses=results.diagnoses,
        tensors=results.tensors,
        notes=results.left_out,
        environment={
            "command": shlex.join(["regress", *sys.argv[1:]]),
            **surroundings(results.cases.values()),
        },
        variants=rows,
    )


def _tell_left_out(results: Results, adapter: str | None) -> None:
    """Print the adapter of the replays, and those left out because it or the settings do not apply."""
    if adapter is not None:
        echo(f"replayed by {adapter}, as [tool.regress] replay says")
    for sentence in results.left_out:
        echo(sentence)


def _listed(chosen: list[Replay], session: Session) -> Table:
    replayers = session.replayers(Path())
    rows = []
    for one in chosen:
        tests = sum(1 for _ in replayers.of(one.variant).items(one))
        rows.append((one.name, str(one.world_size), str(tests), one.variant.why))
    columns = ("replay", "ranks", "tests", "what it could break")
    return Table(columns, rows, words=("replay", columns[-1]), folded=columns[-1:])


@click.command()
@click.argument("pattern", default="*", metavar="[GLOB|EXPR]")
@json_option
def variants(pattern: str, json_file: Output | None) -> None:
    """List the variants and the faults they could reveal.

    Their overrides stand beside them.

    \b
    regress variants
    regress variants 'packed*'
    regress variants 'tp2 and not packed'

    Lists those of this package, and those of [tool.regress.variants] in pyproject.toml.
    """
    from regress.replay.command_replays import variant_table
    from regress.replay.replay_plan import mesh_sizes
    from regress.replay.variant_names import choose

    table = variant_table()
    rows = []
    chosen = choose(table, pattern)
    for name in chosen:
        row = table[name]
        mesh = " ".join(f"{key}{size}" for key, size in mesh_sizes({}, row.overrides).items())
        settings = [
            f"{key.rpartition('.')[2]}={value}" for key, value in row.overrides.items() if not _is_mesh(key)
        ]
        cells = (row.why, _precisions(row), ", ".join(row.cases), " ".join(settings))
        rows.append((name, mesh or "1", *cells))
    columns = ("variant", "mesh", "what it could break", "precisions", "cases", "overrides")
    console = Console()
    console = console if console.is_terminal else Console(width=max(console.width, _WIDTH))
    console.print(Table(columns, rows, folded=columns[2:]).rich())
    echo(plural(len(chosen), "variant"))
    if json_file is not None:
        data = {"schema_version": 1, "variants": {name: _variant_data(table[name]) for name in chosen}}
        write_output(json_file, json.dumps(data, indent=1, allow_nan=False) + "\n")


def _variant_data(row: Variant) -> dict[str, Any]:
    from regress.replay.replay_plan import mesh_sizes

    return {
        "why": row.why,
        "mesh": mesh_sizes({}, row.overrides),
        "precisions": [str(one) for one in row.precisions],
        "bitwise_reference": row.bitwise_reference,
        "cases": [*row.cases],
        "overrides": dict(row.overrides),
    }


def _is_mesh(key: str) -> bool:
    from regress.layout import DIMENSIONS

    return key in [f"parallel.{name}" for name in DIMENSIONS]


def _precisions(row: Variant) -> str:
    return ", ".join(
        f"as {row.bitwise_reference}" if p is Precision.BITWISE else str(p) for p in row.precisions
    )
