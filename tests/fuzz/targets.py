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


def explained(path: Path, whole: Path) -> None:
    from regress.explain.explain import explain_dump

    found = explain_dump(str(path))
    "\n".join(one.text for one in found.statements).encode()
    json.dumps(found.to_json(), allow_nan=False)


def oracle(path: Path, whole: Path) -> None:
    from regress.oracle.judge import judge_dump

    judge_dump(str(path), path.with_name("work"))


def tasks(path: Path, whole: Path) -> None:
    from regress.tasks.files import read_task
    from regress.tasks.rows import RowFields

    for name in _changed(path, whole):
        read_task(path / name, RowFields())


def settings(path: Path, whole: Path) -> None:
    from regress.engine.config import load_config
    from regress.engine.config.show import print_config

    print_config(load_config(str(path), "run", environ={}), _quiet())


def tracked(path: Path, whole: Path) -> None:
    from regress.engine.tracking.backup import Backup
    from regress.engine.tracking.replay import _lacking
    from regress.engine.tracking.state import acknowledge, read_sync_state

    found = read_sync_state(path)
    for name, entry in ({"trackers": {}} if found is None else found)["trackers"].items():
        _lacking(name, path, entry, lambda _: None)
        Backup(path).rows(name)
    acknowledge(path, "tensorboard", 3)


def adapter(path: Path, whole: Path) -> None:
    from regress.engine.adapters.build import read_adapter
    from regress.engine.adapters.settings import base_of, of_directory

    of_directory(path, "model.path")
    base_of(path, None, "model.path")
    read_adapter(path)


def results(path: Path, whole: Path) -> None:
    from regress.faults.fault import CATEGORIES, COMMON
    from regress.replay.curves import read, verdicts
    from regress.report.fault_rows import read_fault_rows
    from regress.report.faults import markdown
    from regress.systems.table import read_rows, text_of

    for line in text_of(read_rows(path / "rows.json")):
        line.encode()
    rows = read_fault_rows(path / "faults.json")
    curves = verdicts(read(path / "curves.json"))
    told = [(one.fault, one.end, one.low, one.high, one.noticed) for one in curves]
    markdown(rows, COMMON, CATEGORIES, told).encode()


def state(path: Path, whole: Path) -> None:
    from regress.service.core.limits import Limits
    from regress.service.core.recovery import recover
    from regress.service.core.state import State
    from regress.service.keys import api_keys

    api_keys(None, str(path / "keys.txt"))
    found = State(path, Limits())
    try:
        for save in found.ledger.saves.values():
            found.store.check(save.folder)
        recover(found)
        for name in found.ledger.operations:
            found.operation(name)
    finally:
        found.close()


def pending(path: Path, whole: Path) -> None:
    from regress.golden.pending import list_pending
    from regress.golden.prune import prunable
    from regress.golden.store import GoldenStore

    store = GoldenStore(path)
    for one in list_pending(store):
        for change in one.difference().changes:
            str(change).encode()
    prunable(store, path / "orphans.json")


def continued(path: Path, whole: Path) -> None:
    from regress.dump.continuation import Place, Position, StartingPlace
    from regress.dump.continuation import continued as kept
    from regress.dump.formats import FORMATS

    kept(path, FORMATS["safetensors"], StartingPlace(Place(1, 0), Position(8, "0" * 64), "checkpoint-1"))


def resumed(path: Path, whole: Path) -> None:
    from regress.dump.reader import DumpReader
    from regress.engine.checkpoint.names import latest
    from regress.engine.checkpoint.state import read_state
    from regress.engine.checkpoint.weights import _tensors
    from regress.engine.tracking.state import read_sync_state

    place = latest(str(path))
    if place is None:
        return
    found = read_state(place)
    for record in DumpReader(found.dump).records("optimizer", found.step):
        record.tensors.keys()
    _tensors(Path(str(found.path)), "checkpoint")
    read_sync_state(path)


def doctor_repairs(path: Path, whole: Path) -> None:
    from regress.doctor.run import run

    options = dict.fromkeys(("checkpoint", "config_path", "config_name", "restore"))
    options |= {
        "arguments": (str(path),),
        "flags": {},
        "allow_change": (),
        "fast": False,
        "project_root": ".",
    }
    for verb, dry in (("auto_fix", True), ("auto_fix", False), ("undo", False)):
        found = run(verb, options | {"as_json": False, "dry_run": dry})
        json.dumps(found.to_json()).encode()
        found.show(_quiet())


def wire(path: Path, whole: Path) -> None:
    from tests.fuzz.wire import post

    post(path, whole)


def _planted(name: str, made: object) -> Target:
    """Return a target whose reader has lost one of its guards."""

    def target(path: Path, whole: Path) -> None:
        from unittest.mock import patch

        with patch(f"regress.inputs.{name}", made):
            resumed_metrics(path, whole)
            report(path, whole)

    target.__name__ = f"without_{name}"
    return target


def _open_whatever(path: Path) -> Any:
    return path.open("rb")


def _changed(path: Path, whole: Path) -> list[str]:
    """Return the files that are not what they were."""
    return [
        one.name
        for one in sorted(whole.iterdir())
        if not _plain(path / one.name) or (path / one.name).read_bytes() != one.read_bytes()
    ]


def _plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30


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
    explained,
    oracle,
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
    "tasks": (tasks,),
    "settings": (settings,),
    "tracking": (tracked, doctor),
    "adapter": (adapter,),
    "results": (results,),
    "state": (state,),
    "requests": (wire,),
    "pending": (pending,),
    "continued": (continued,),
    "resumable": (resumed, doctor_repairs),
}
"""Kind of a seed -> what reads it."""


PLANTED: dict[str, tuple[Target, ...]] = {
    "planted_traceback": (_planted("_clause", lambda error: error.position),),
    "planted_hang_or_memory": (_planted("open_file", _open_whatever),),
}
"""Readers with a bug, by which the search itself is tested; all read the seed ``metrics``."""


def seed_of(kind: str) -> Path:
    """Return the folder of the seed of a kind."""
    return CORPUS / ("metrics" if kind in PLANTED else kind)


def seeds() -> dict[str, dict[str, bytes]]:
    """Return the files of every seed."""
    return {
        kind: {
            path.relative_to(seed_of(kind)).as_posix(): path.read_bytes()
            for path in sorted(seed_of(kind).rglob("*"))
            if path.is_file()
        }
        for kind in (*TARGETS, *PLANTED)
    }


def run(target: Target, path: Path, kind: str) -> Any:
    """Run a target; return None, or the sentence that it refused the input with."""
    from regress.errors import RegressError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target(path, seed_of(kind))
        except RegressError as error:
            return str(error)
    return None
