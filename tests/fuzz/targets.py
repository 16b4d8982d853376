"""Readers that mutated inputs are given to: what a user's command does with them, without starting a process.

A target may return, or raise one of our errors with one sentence. Everything else is a defect.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.fuzz.seeds import CORPUS

Target = Callable[[Path, Path], None]
"""Function of the mutated folder, and of the one that is whole."""


def _quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def _compare(golden: Path, actual: Path, *, only: str = "") -> None:
    from regress.compare.dumps.options import Options
    from regress.compare.dumps.selection import Selection
    from regress.compare.dumps.session import compare_dumps
    from regress.report.comparison import report_of
    from regress.report.terminal import screen, whole

    found = compare_dumps(str(golden), str(actual), Options(only=Selection.of(only)))
    report = report_of({"compare": found})
    screen(report, width=100, height=40, colour=True, causes=True).encode()
    whole(report).encode()
    json.dumps(report.to_json(), allow_nan=False).encode()


def compare_actual(path: Path, whole: Path) -> None:
    _compare(whole, path)


def compare_golden(path: Path, whole: Path) -> None:
    _compare(path, whole)


def compare_itself(path: Path, whole: Path) -> None:
    _compare(path, path)


def compare_some(path: Path, whole: Path) -> None:
    _compare(whole, path, only="param*")


def show(path: Path, whole: Path) -> None:
    from regress.dump.inspect import render

    for one in (path, *sorted(path.glob("*/step_*"))[:3]):
        console = _quiet()
        console.print(render(one))
        text = console.file.getvalue()  # type: ignore[attr-defined]  # made above
        if "\x1b]" in text or "\x1b[2J" in text:
            raise AssertionError("a control sequence was printed")
        text.encode()


def check(path: Path, whole: Path) -> None:
    from regress.compare.dumps.checked import check_dump
    from regress.report.text import headline

    for verdict in check_dump(str(path)):
        headline(verdict, "x").encode()


def diff(path: Path, whole: Path) -> None:
    from regress.dump.difference import compare_bitwise

    compare_bitwise(path, whole)


def verify(path: Path, whole: Path) -> None:
    from regress.dump.reader import DumpReader

    reader = DumpReader(path)
    for name in reader.names():
        reader.verify(name)


def replayed(path: Path, whole: Path) -> None:
    from regress.dump.recorded import read_trajectories

    read_trajectories(path)


def golden(path: Path, whole: Path) -> None:
    from regress.golden.store import GoldenStore
    from regress.golden.verify import verify as verified

    store = GoldenStore(path)
    for finding in verified(store):
        finding.text.encode()
    case = store.case("tiny")
    case.verify_inputs()
    for where in case.wheres():
        case.truth(where)
    case.trajectories()


def golden_side(path: Path, whole: Path) -> None:
    from regress.compare.dumps.sides import open_side

    open_side.cache_clear()
    side = open_side(f"golden:{path}/tiny")
    for name in side.entries:
        side.read(name)


def exported(path: Path, whole: Path) -> None:
    from regress.replay.exported import ExportedCase

    case = ExportedCase(path)
    case.optimizer_state()
    _ = case.temperature, case.optimizer, case.optimizer_steps
    for number, update in enumerate(case.updates):
        case.trajectories(int(update["step"]))
        case.learning_rate(number)


def systems(path: Path, whole: Path) -> None:
    from regress.replay.exported import ExportedCase

    case = ExportedCase(path)
    case.samples(1)
    case.tokens_of_loss(0)


def doctor(path: Path, whole: Path) -> None:
    from regress.doctor.run import run

    options = dict.fromkeys(("checkpoint", "config_path", "config_name"))
    options |= {
        "arguments": (str(path),),
        "flags": {},
        "allow_change": (),
        "fast": False,
        "project_root": ".",
    }
    found = run("examine", options | {"as_json": False, "dry_run": False})
    json.dumps(found.to_json()).encode()
    found.show(_quiet())


def report(path: Path, whole: Path) -> None:
    from regress.dump.metrics_file import read_metrics
    from regress.report.run_data import named_runs
    from regress.report.run_figures import run_json
    from regress.report.run_text import run_text

    read_metrics(path / "metrics.jsonl", lambda _: None)
    runs = named_runs([path])
    run_text(runs).encode()
    json.dumps([run_json(one) for one in runs], allow_nan=False)


def resumed_metrics(path: Path, whole: Path) -> None:
    from regress.dump.metrics_file import MetricsWriter

    writer = MetricsWriter(path / "metrics.jsonl")
    writer.write({"loss": 1.0}, step=9)
    writer.close()


def outcome(path: Path, whole: Path) -> None:
    from regress.replay.outcome import read_outcomes

    for found in read_outcomes(path, ["."]).values():
        found.dumps()


def project(path: Path, whole: Path) -> None:
    from regress.compare.verdicts.overrides import read_overrides
    from regress.errors import RegressError
    from regress.golden.location import golden_directory
    from regress.replay.adapter import project_adapter
    from regress.replay.table import project_variants as variant_table
    from regress.trust import allowed_modules

    refused: list[RegressError] = []
    for read in (golden_directory, variant_table, read_overrides, project_adapter, allowed_modules):
        try:
            read(path)
        except RegressError as error:
            refused.append(error)
    for error in refused:
        raise error


OWN: tuple[Target, ...] = (
    compare_actual,
    compare_golden,
    compare_itself,
    compare_some,
    show,
    check,
    diff,
    verify,
    replayed,
)
COMPARED: tuple[Target, ...] = (compare_actual, compare_golden, compare_itself)

TARGETS: dict[str, tuple[Target, ...]] = {
    "own_safetensors": OWN,
    "own_old": OWN,
    "own_pt": OWN,
    "own_jsonl": OWN,
    "nexrl_pt": (*COMPARED, show, replayed),
    "nexrl_jsonl": (*COMPARED, show, replayed),
    "nexrl_weaver": (*COMPARED, check),
    "nexrl_remote": COMPARED,
    "service": (*COMPARED, check, show),
    "bare_safetensors": COMPARED,
    "bare_pt": COMPARED,
    "bare_sharded": COMPARED,
    "golden": (golden, golden_side),
    "exported": (exported, systems),
    "checkpoint": (doctor,),
    "metrics": (report, resumed_metrics),
    "outcome": (outcome,),
    "project": (project,),
}
"""Kind of a seed -> what reads it."""


def seeds() -> dict[str, dict[str, bytes]]:
    """Return the files of every seed."""
    return {
        kind: {
            path.relative_to(CORPUS / kind).as_posix(): path.read_bytes()
            for path in sorted((CORPUS / kind).rglob("*"))
            if path.is_file()
        }
        for kind in TARGETS
    }


def run(target: Target, path: Path, kind: str) -> Any:
    """Run a target; return None, or the sentence that it refused the input with."""
    from regress.errors import RegressError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target(path, CORPUS / kind)
        except RegressError as error:
            return str(error)
    return None
