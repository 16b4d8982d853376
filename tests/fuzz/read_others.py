"""Readers of all other files: checkpoints, metrics, settings, data, states and results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.read_recordings import quiet

Target = Callable[[Path, Path], None]


def doctor(path: Path, whole: Path) -> None:
    from regress.doctor.doctor_verbs import run

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
    found.show(quiet())


def report(path: Path, whole: Path) -> None:
    from regress.dump.metrics_file import read_metrics
    from regress.report.run_data import named_runs
    from regress.report.run_report import run_json, run_text

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
    from regress.replay.replay_outcome import read_outcomes

    for found in read_outcomes(path, ["."]).values():
        found.dumps()


def project(path: Path, whole: Path) -> None:
    from regress.compare.verdicts.tolerance_overrides import read_overrides
    from regress.golden.golden_directory import golden_directory
    from regress.import_trust import allowed_modules
    from regress.replay.user_trainer import project_adapter
    from regress.replay.variant_table import project_variants as variant_table

    readers = (golden_directory, variant_table, read_overrides, project_adapter, allowed_modules)
    _each(partial(read, path) for read in readers)


def explained(path: Path, whole: Path) -> None:
    from regress.explain.explanation import explain_dump

    found = explain_dump(str(path))
    "\n".join(one.text for one in found.statements).encode()
    json.dumps(found.to_json(), allow_nan=False)


def oracle(path: Path, whole: Path) -> None:
    from regress.oracle.oracle_judge import judge_dump

    judge_dump(str(path), path.with_name("work"))


def tasks(path: Path, whole: Path) -> None:
    from regress.tasks.data_files import read_task
    from regress.tasks.data_rows import RowFields

    for name in _changed(path, whole):
        read_task(path / name, RowFields())


def settings(path: Path, whole: Path) -> None:
    from regress.engine.config import load_config, print_config

    print_config(load_config(str(path), "run", environ={}), quiet())


def tracked(path: Path, whole: Path) -> None:
    from regress.engine.tracking.metrics_replay import _lacking
    from regress.engine.tracking.tracker_backup import Backup
    from regress.engine.tracking.tracker_state import acknowledge, read_sync_state

    found = read_sync_state(path)
    for name, entry in ({"trackers": {}} if found is None else found)["trackers"].items():
        _lacking(name, path, entry, lambda _: None)
        Backup(path).rows(name)
    acknowledge(path, "tensorboard", 3)


def adapter(path: Path, whole: Path) -> None:
    from regress.engine.adapters.adapter_modules import read_adapter
    from regress.engine.adapters.adapter_settings import base_of, of_directory

    of_directory(path, "model.path")
    base_of(path, None, "model.path")
    read_adapter(path)


def results(path: Path, whole: Path) -> None:
    from regress.systems.conformance_table import read_rows, text_of
    from tests.faults.fault import CATEGORIES, COMMON
    from tests.faults.trials.curves import read, verdicts
    from tests.faults.trials.report import markdown
    from tests.faults.trials.rows import read_fault_rows

    for line in text_of(read_rows(path / "rows.json")):
        line.encode()
    rows = read_fault_rows(path / "faults.json")
    curves = verdicts(read(path / "curves.json"))
    told = [(one.fault, one.end, one.low, one.high, one.noticed) for one in curves]
    markdown(rows, COMMON, CATEGORIES, told).encode()


def history(path: Path, whole: Path) -> None:
    from regress.report.headroom_history import add_reports, courses, history_json

    def kept(*reports: Path) -> None:
        add_reports(path / "history.sqlite", reports)
        found = courses(path / "history.sqlite", 40)
        "".join(f"{one} {one.rose}" for one in found).encode()
        history_json(found)

    _each([kept, partial(kept, path / "report.json")])


def checks(path: Path, whole: Path) -> None:
    from regress.golden.stored_checks import read_check, stored_checks

    for name in stored_checks(path):
        read_check(path, name)


def state(path: Path, whole: Path) -> None:
    from regress.service.api_keys import api_keys
    from regress.service.core.service_limits import Limits
    from regress.service.core.service_state import State

    api_keys(None, str(path / "keys.txt"))
    found = State(path, Limits())
    try:
        for save in found.ledger.saves.values():
            found.store.check(save.folder)
        found.recover()
        for number in range(1, 7):
            if found.ledger.operation(f"op-{number}") is not None:
                found.operation(f"op-{number}")
    finally:
        found.close()


def update(path: Path, whole: Path) -> None:
    from regress.golden.golden_directory import GoldenStore
    from regress.golden.golden_verification import prunable
    from regress.golden.schema_migration import migrate

    store = GoldenStore(path)
    migrate(store)
    prunable(store, path / "orphans.json")


def continued(path: Path, whole: Path) -> None:
    from regress.dump.dump_continuation import ContinuationPoint, Position, StartingPlace
    from regress.dump.dump_continuation import continued as kept
    from regress.dump.formats import FORMATS

    kept(
        path,
        FORMATS["safetensors"],
        StartingPlace(ContinuationPoint(1, 0), Position(8, "0" * 64), "checkpoint-1"),
    )


def resumed(path: Path, whole: Path) -> None:
    from regress.engine.checkpoint.checkpoint_names import OPTIMIZER, UNFINISHED, latest
    from regress.engine.checkpoint.checkpoint_tensors import _tensors, optimizer_of, unfinished_of
    from regress.engine.checkpoint.trainer_state import read_state
    from regress.engine.recorded_optimizer_state import _read
    from regress.engine.tracking.tracker_state import read_sync_state

    place = latest(str(path))
    if place is None:
        return
    found = read_state(place)
    _tensors(Path(str(found.path)), "checkpoint")
    optimizer_of(found)
    if (place / UNFINISHED).exists():
        unfinished_of(found)
    _read(Path(str(found.path)) / OPTIMIZER, "optimizer.state_path")
    read_sync_state(path)


def doctor_repairs(path: Path, whole: Path) -> None:
    from regress.doctor.checkpoint_repair import NEWEST
    from regress.doctor.doctor_verbs import run

    options = dict.fromkeys(("checkpoint", "config_path", "config_name"))
    options |= {
        "restore": NEWEST,
        "arguments": (str(path),),
        "flags": {},
        "allow_change": (),
        "fast": False,
        "project_root": ".",
    }
    for verb, dry in (("auto_fix", True), ("auto_fix", False), ("restore", False)):
        found = run(verb, options | {"as_json": False, "dry_run": dry})
        json.dumps(found.to_json()).encode()
        found.show(quiet())


def wire(path: Path, whole: Path) -> None:
    from tests.fuzz.wire import post

    post(path, whole)


def planted(name: str, made: object) -> Target:
    """Return a target whose reader has lost one of its guards."""

    def target(path: Path, whole: Path) -> None:
        from unittest.mock import patch

        with patch(f"regress.untrusted_files.{name}", made):
            resumed_metrics(path, whole)
            report(path, whole)

    target.__name__ = f"without_{name}"
    return target


def open_whatever(path: Path) -> Any:
    return path.open("rb")


def trusts_a_count(path: Path, whole: Path) -> None:
    """A reader that gives a number of a file as much memory as it asks for."""
    from regress.dump.metrics_file import read_rows

    for row in read_rows(path / "metrics.jsonl", lambda _: None):
        for value in row.values():
            _ = b"1" * min(value, 1 << 30) if isinstance(value, int) else b""


def _each(readers: Iterable[Callable[[], object]]) -> None:
    """Call all readers; raise the first refusal after the last of them."""
    from regress.errors import RegressError

    refused: list[RegressError] = []
    for read in readers:
        try:
            read()
        except RegressError as error:
            refused.append(error)
    for error in refused:
        raise error


def _changed(path: Path, whole: Path) -> list[str]:
    """Return the files that are not what they were."""
    return [
        one.name
        for one in sorted(path.iterdir())
        if not (whole / one.name).exists()
        or not _plain(one)
        or one.read_bytes() != (whole / one.name).read_bytes()
    ]


def _plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30
