"""The conftest.py of projects whose replays are copies of a dump made beforehand; `GoldenProject` writes it there.

It counts the replays in `replays.txt`. `stub.json` says of a variant what shall become of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import regress.replay.case_run
import regress.replay.case_truth
import regress.replay.engine_replayer
from regress.dump.dump_reader import DumpReader
from regress.dump.record import replace_tensors
from regress.dump.recorder import Recorder
from regress.errors import ReplayError

HERE = Path(__file__).parent
PATCH = pytest.MonkeyPatch()


def replay(case: Any, variant: Any, precision: Any, folder: Path, **_: Any) -> DumpReader:
    """Replay in place of the engine."""
    with (HERE / "replays.txt").open("a") as file:
        file.write(f"{case.name}/{variant.name}{precision.suffix}\n")
    path = HERE / "stub.json"
    fault = json.loads(path.read_text()).get(variant.name) if path.is_file() else None
    if fault == "refuse":
        raise ReplayError("the policy is gone; bring it back")
    if fault == "break":
        raise ZeroDivisionError("no tokens")
    made = Path((HERE / "made.txt").read_text())
    if fault is None:
        shutil.copytree(made, folder / "dump", dirs_exist_ok=True)
    else:
        _copy_with(fault if isinstance(fault, list) else [fault], DumpReader(made), folder / "dump")
    return DumpReader(folder / "dump")


def _copy_with(faults: list[dict[str, Any]], made: DumpReader, folder: Path) -> None:
    recorder = Recorder(folder, options={}, provenance=made.manifest.provenance)
    for record in made:
        for fault in faults:
            name = fault["tensor"]
            if record.type == fault["type"] and record.step >= fault.get("from", 0):
                record = replace_tensors(record, {name: record.tensors[name] * fault["factor"]})
        recorder.put(record)
    recorder.close()


def pytest_configure() -> None:
    PATCH.setattr(
        regress.replay.engine_replayer, "import_engine", lambda: None
    )  # seconds, and nobody computes
    PATCH.setattr(regress.replay.case_run, "replay", replay)
    PATCH.setattr(regress.replay.case_truth, "replay", replay)


def pytest_unconfigure() -> None:
    PATCH.undo()
