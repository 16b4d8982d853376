"""Checkpoints as releases before schema 2 wrote them: tensors other than the weights lie in a dump of their own."""

from __future__ import annotations

import json
from pathlib import Path

from regress.dump.dump_manifest import Provenance
from regress.dump.record import Record
from regress.dump.record_types import RECORD_TYPES
from regress.dump.recorder import Recorder
from regress.engine.checkpoint.checkpoint_manifest import stamps_of, write_manifest
from regress.engine.checkpoint.checkpoint_tensors import optimizer_of, reference_of, unfinished_of
from regress.engine.checkpoint.trainer_state import read_state


def downgrade(folder: Path) -> None:
    """Give a checkpoint schema 1."""
    state = read_state(folder)
    found = [("optimizer", optimizer_of(state))]
    if state.has_reference:
        found.append(("param", reference_of(state)))
    records = [Record.of(type, Record(type, state.step).where, tensors) for type, tensors in found]
    if state.updates_in_step:
        records += unfinished_of(state).values()
    recorder = Recorder(
        folder / "state",
        options={record_type.name: True for record_type in RECORD_TYPES},
        provenance=Provenance(),
    )
    for record in records:
        recorder.put(record)
    recorder.close()
    for name in ("optimizer", "reference", "unfinished"):
        (folder / f"{name}.safetensors").unlink(missing_ok=True)
    tree = json.loads((folder / "regress_state.json").read_text())
    (folder / "regress_state.json").write_text(json.dumps(tree | {"schema_version": 1}))
    (folder / "manifest.json").unlink()
    write_manifest(folder, stamps_of(folder))
