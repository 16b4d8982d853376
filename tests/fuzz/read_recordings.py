"""Readers of dumps, golden cases and exports that mutated inputs are given to."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def _compare(golden: Path, actual: Path, *, only: str = "") -> None:
    from regress.compare.dumps.comparison import compare_dumps
    from regress.compare.dumps.comparison_options import Options
    from regress.compare.dumps.tensor_selection import Selection
    from regress.report.comparison_report import report_of
    from regress.report.terminal_report import screen, whole

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
    from regress.dump.dump_inspection import render

    for one in (path, *sorted(path.glob("*/step_*"))[:3]):
        console = quiet()
        console.print(render(one))
        text = console.file.getvalue()  # type: ignore[attr-defined]  # made above
        if "\x1b]" in text or "\x1b[2J" in text:
            raise AssertionError("a control sequence was printed")
        text.encode()


def check(path: Path, whole: Path) -> None:
    from regress import check_dump
    from regress.report.verdict_text import headline

    for verdict in check_dump(str(path)):
        headline(verdict, "x").encode()


def diff(path: Path, whole: Path) -> None:
    from regress.dump.bitwise_difference import compare_bitwise

    compare_bitwise(path, whole)


def verify(path: Path, whole: Path) -> None:
    from regress.dump.dump_reader import DumpReader

    reader = DumpReader(path)
    for name in reader.names():
        reader.verify(name)


def replayed(path: Path, whole: Path) -> None:
    from regress.dump.recorded_trajectories import read_trajectories

    read_trajectories(path)


def golden(path: Path, whole: Path) -> None:
    from regress.golden.golden_directory import GoldenStore
    from regress.golden.golden_verification import verify as verified

    store = GoldenStore(path)
    for finding in verified(store):
        finding.text.encode()
    case = store.case("tiny")
    case.verify_inputs()
    for where in case.wheres():
        case.truth(where)
    case.trajectories()


def golden_side(path: Path, whole: Path) -> None:
    from regress.compare.dumps.opened_dump import close_sides, open_side

    close_sides()
    side = open_side(f"golden:{path}/tiny")
    for name in side.entries:
        side.read(name)


def exported(path: Path, whole: Path) -> None:
    from regress.replay.exported_case import ExportedCase

    case = ExportedCase(path)
    case.optimizer_state()
    _ = case.temperature, case.optimizer, case.optimizer_steps
    for number, update in enumerate(case.updates):
        case.trajectories(int(update["step"]))
        case.learning_rate(number)


def systems(path: Path, whole: Path) -> None:
    from regress.replay.exported_case import ExportedCase

    case = ExportedCase(path)
    case.samples(1)
    case.tokens_of_loss(0)
