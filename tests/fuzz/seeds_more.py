"""Seeds of what is not a dump and no golden case: data, settings, states of services and trackers, results of runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.seeds import dump, seed


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1) + "\n")


def _lines(path: Path, rows: list[Any]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


@seed
def tasks(folder: Path) -> None:
    """Problems in the three forms of a data file."""
    import pyarrow as pa
    from pyarrow import parquet

    rows: list[dict[str, Any]] = [
        {"prompt": f"{n} + 1 =", "answer": str(n + 1), "level": 1 + n % 2, "complexity": 0.5}
        for n in range(4)
    ]
    _write(folder / "array.json", rows)
    _lines(folder / "lines.jsonl", rows)
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")


@seed
def settings(folder: Path) -> None:
    """A configuration with a defaults list, a group of its own and an interpolation."""
    _write(
        folder / "run.yaml",
        "defaults:\n  - base\n  - _self_\nexp_name: mine\nmax_steps: 4\nalgorithm:\n  loss: ppo_clip\n  kl_coef: 0.01\n"
        "optimizer:\n  learning_rate: 1e-4\n  betas: [0.9, 0.95]\noutput_dir: ${oc.env:NOWHERE,outputs}/${exp_name}\n",
    )
    _write(folder / "base.yaml", "seed: 3\ndata: &data\n  prompts_per_step: 2\n  group_size: 4\n")


@seed
def tracking(folder: Path) -> None:
    """A run that a tracker took part in, and rows that it did not take."""
    row = {"segment": 0, "sequence": 3, "time": 2.0, "step": 1, "update": 1, "loss": 0.5}
    earlier = {"segment": 0, "sequence": 2, "time": 1.0, "step": 0, "update": 0, "loss": 0.75}
    _lines(folder / "metrics.jsonl", [earlier, row])
    place = {"segment": 0, "sequence": 3, "step": 1, "update": None, "resumed_from": None}
    taken = {"run_id": "a1b2c3d4", "acknowledged": 2}
    names = {"name": "mine", "project": "p", "run_name": "r", "trackers": {"tensorboard": taken}}
    _write(folder / "wandb_sync_state.json", {"schema_version": 1, "time": 1.0, **place, **names})
    kept = [{"tracker": "tensorboard", "row": row}]
    _write(folder / "wandb_backup" / "step_000001.json", {"schema_version": 1, "step": 1, "rows": kept})


@seed
def adapter(folder: Path) -> None:
    from safetensors.numpy import save_file

    held = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "lora_dropout": 0.1}
    held |= {"bias": "none", "init_lora_weights": True, "base_model_name_or_path": "base", "rank_pattern": {}}
    _write(folder / "adapter_config.json", held)
    _write(folder / "base" / "config.json", {"model_type": "qwen3", "hidden_size": 8})
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {name.format("A"): np.ones((4, 8), np.float32), name.format("B"): np.ones((8, 4), np.float32)}
    save_file(weights, folder / "adapter_model.safetensors")


@seed
def results(folder: Path) -> None:
    """Rows of a conformance table and of injected faults, reward curves, a report with a history, stored checks."""
    from regress.golden.stored_checks import StoredCheck
    from regress.golden.value_tree import Tree
    from regress.report.headroom_history import add_reports
    from regress.systems.conformance_row import ConformanceRow, Error, Result
    from regress.systems.conformance_table import write_rows
    from regress.systems.protocol import Cell, Layout
    from tests.faults.trials.rows import FaultRow, to_json

    folder.mkdir(parents=True)
    errors = {"log_probs": Error(1e-7, 0.5, 4, 0), "gradient": Error(None, None, 2, 1)}
    cells = [
        ConformanceRow(
            "toy",
            "1.0",
            Cell(Layout("dp2", 2), "trl:dapo"),
            next(iter(Result)),
            errors,
            told="x",
            first="gradient w",
            shims=("!a",),
        )
    ]
    write_rows(folder / "rows.json", cells)
    caught = FaultRow(
        *("kl_detached", "loss", "semantic", "repo#1", "dense", "base", "float64"),
        *(False, False, "token_loss", True, "token_loss", "step0", 3e9, True, True, ("kl",), "right"),
        common={"loss_5": True},
        values={"loss": 0.5},
    )
    _write(folder / "faults.json", to_json([caught]))
    _write(
        folder / "curves.json",
        {"steps": 2, "curves": {"": {"0": [0.1, 0.2], "1": [0.1, 0.3]}, "f": {"0": [0, 0]}}},
    )
    kept = {"quantity": "gradient", "precision": "float32", "closest": {"multiple": 0.5}, "failed": 0}
    gone = {"quantity": "loss", "precision": "float64", "closest": None, "failed": 2}
    for title in ("earlier", "now"):
        _write(folder / "report.json", {"title": title, "headroom": [kept, gone]})
        if title == "earlier":
            add_reports(folder / "history.sqlite", [folder / "report.json"])
    for size in (3, 2000):  # as text, and as a record
        value = Tree.of({"loss": np.arange(size) / 3, "name": "a", "kept": [None, 2**70]})
        check = StoredCheck("tests/test_loss.py::test_kl", f"value{size}", value, 1e-6, 0.0, "measured", {})
        path = folder / check.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(check.encode())


@seed
def state(folder: Path) -> None:
    """State directory of a service: a model, a step, a save, a sampler, an operation that had not ended, and keys."""
    from regress.engine.checkpoint.checkpoint_manifest import stamps_of, write_manifest
    from regress.service.core.ledger_entries import (
        Failure,
        ModelEntry,
        OperationEntry,
        Point,
        SamplerEntry,
        SaveEntry,
        SessionEntry,
    )
    from regress.service.core.sqlite_ledger import FILE, Ledger
    from regress.service.service_api import (
        AdamParams,
        LoraSpec,
        ModelInfo,
        ModelSpec,
        OptimResult,
        Saved,
        SaveKind,
        ServiceError,
    )

    spec = ModelSpec("tiny", LoraSpec(4, 1))
    info = ModelInfo("m", "tiny", "/t", "q", spec.lora, 0, {"a": "b"})
    step = OptimResult(1, 1.5, 1.0, AdamParams(0.1, 0.9, 0.95, 1e-8, 0.0, 1.0))
    saved = Saved("m", SaveKind.STATE, "n", "m/state/n", 1)
    failed = Failure.of(ServiceError("it failed", code="c"))
    point = Point("n-1", optimizer=True, step=1, name="m/state/n")
    folder.mkdir(parents=True)
    found = Ledger(folder / FILE, 100)
    found.write(
        SessionEntry("s", {"owner": "ann"}, "k"),
        OperationEntry("op-1", "m", "create_model", None, "d1", False, None, 1, True, None, info),
        OperationEntry("op-2", "m", "optim_step", 1, "d2", True, None, 2, True, None, step),
        OperationEntry("op-3", "m", "save", 2, "d3", False, None, 3, True, None, saved),
        OperationEntry("op-4", "m", "optim_step", 3, "d4", True, None, 4, False, failed),
        OperationEntry("op-5", "p", "sample", None, "d5", False, 1),
        OperationEntry("op-6", "m", "optim_step", 4, "d6", True),
        ModelEntry("m", "s", spec, info, 1, point, 3, True),
        SaveEntry(saved, "n-1", True),
        SamplerEntry("p", "s", "m/state/n", None, "n-1"),
    )
    found.close()
    _write(folder / "saves" / "n-1" / "model.bin", "weights")
    write_manifest(folder / "saves" / "n-1", stamps_of(folder / "saves" / "n-1"))
    _write(folder / "keys.txt", "# owners\nann tml-ann\nbob tml-bob\n")


@seed
def requests(folder: Path) -> None:
    """Bodies of requests to the service; `tests.fuzz.wire` knows where each is sent."""
    from tests.fuzz.wire import bodies

    for name, body in bodies().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


@seed
def update(folder: Path) -> None:
    """A case of schema 1, an update that was interrupted once it was decided, and stored checks without a test."""
    from regress.durable_files import UPDATE
    from tests.fuzz.seeds import golden
    from tests.unit.golden.schema_1 import downgrade

    golden(folder)
    downgrade(folder / "tiny")
    _write(folder / UPDATE / "files.json", [["checks/x.safetensors", "0"], ["tiny/truth/x", None]])
    _write(folder / UPDATE / "0", [])
    _write(folder / "orphans.json", [])


@seed
def continued(folder: Path) -> None:
    """A dump that a resumed run goes on with."""
    dump(folder, "safetensors")


@seed
def resumable(folder: Path) -> None:
    """A run that is resumed: its checkpoints as the engine reads them."""
    from tests.fuzz.seeds import CORPUS

    shutil.copytree(CORPUS / "checkpoint", folder)
