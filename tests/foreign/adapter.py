"""The script of examples/foreign_trainer.py in the place of the engine: base variants, and data parallelism by samples.

``plant.json`` beside it names a fault of the script to plant: {"function": ..., "old": ..., "new": ...}.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed

from regress.dump.dump_manifest import Provenance
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording, tap
from regress.errors import NotSupported
from regress.layout import Segment, TokenLayout

HERE = Path(__file__).parent
SUPPORTED = {"batching.micro_batch_size", "parallel.dp"}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
TYPES = ("forward_data", "is_loss_debug", "gradient", "param", "optimizer")


def script() -> ModuleType:
    """The trainer, with the fault that is planted, if one is."""
    source, plant = (HERE / "foreign_trainer.py").read_text(), HERE / "plant.json"
    if plant.is_file():
        fault = json.loads(plant.read_text())
        assert source.count(fault["old"]) == 1
        source = source.replace(fault["old"], fault["new"])
    module = ModuleType("foreign_trainer")
    exec(compile(source, "foreign_trainer.py", "exec"), module.__dict__)
    return module


def run(case: Path, variant: Any, precision: Any, folder: Path) -> None:
    """Replay an exported case."""
    if unknown := sorted(variant.overrides.keys() - SUPPORTED):
        raise NotSupported(f"it has no {unknown[0]}")
    if str(precision) not in DTYPES:
        raise NotSupported(f"it does not compute in {precision}")
    rank, world = distributed.get_rank(), distributed.get_world_size()

    def gather(value: Any) -> list[Any]:
        found = [None] * world
        distributed.all_gather_object(found, value)
        return found

    options = dict.fromkeys(TYPES, True)
    origin = Provenance(config={"model": {"dtype": str(precision)}}, mesh={"world_size": world})
    with recording(Recorder(folder, options=options, provenance=origin, rank=rank, gather=gather)):
        script().train(
            case, DTYPES[str(precision)], observe=lambda update, found: record(update, found, rank)
        )


def record(update: dict[str, Any], found: dict[str, Any], rank: int) -> None:
    """One update: token quantities in a right-padded batch, then what belongs to the whole update."""
    with at(step=update["number"], rank=rank):
        tokens(found)
        for name in ("gradient", "param", "optimizer"):
            tap(name, found[name], meta={"grad_norm": found["grad_norm"]} if name == "gradient" else None)


def tokens(found: dict[str, Any]) -> None:
    ids = [sample["prompt_ids"] + sample["completion_ids"] for sample in found["samples"]]
    B, T = len(ids), max(map(len, ids))
    layout = TokenLayout((B, T), tuple(Segment(row, 0, len(own), row, 0) for row, own in enumerate(ids)))
    meta = {"samples": [[sample["group_id"], sample["run_id"]] for sample in found["samples"]]}
    batch = {name: torch.zeros(B, T, dtype=values.dtype) for name, values in found["tokens"][0].items()}
    mask = torch.zeros(B, T, dtype=torch.int64)
    for row, (sample, own) in enumerate(zip(found["samples"], found["tokens"], strict=True)):
        start = len(sample["prompt_ids"])
        mask[row, start : len(ids[row])] = sample["mask"]
        for name, values in own.items():
            batch[name][row][mask[row].bool()] = values
    forward = {name: batch.pop(name) for name in ("log_probs", "entropy")}
    with at(micro=0):
        tap("forward_data", {**forward, "response_mask": mask}, layout=layout, meta=meta)
        tap("is_loss_debug", {**batch, "effective_valid": mask}, layout=layout, meta=meta)
