"""Damages of a checkpoint: each function makes one of a healthy run."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.unit.doctor.builder import STEPS, Run

C = "checkpoint-4"
MANIFEST, TRAINER = f"{C}/manifest.json", f"{C}/trainer_state.json"


def tear(name: str) -> Callable[[Run], None]:
    def damage(run: Run) -> None:
        path = run.folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return damage


def remove(name: str) -> Callable[[Run], None]:
    def damage(run: Run) -> None:
        path = run.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write(name: str, content: bytes, *, seal: bool = False) -> Callable[[Run], None]:
    def damage(run: Run) -> None:
        path = run.folder / name
        path.write_bytes(content)
        if seal:
            run.seal(path.parent)

    return damage


def flip_a_bit(run: Run) -> None:
    path = run.checkpoint() / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def not_finite(run: Run) -> None:
    weights = {"lm_head.weight": np.array([1.0, np.nan, np.inf], dtype=np.float32)}
    save_file(weights, run.checkpoint() / "model.safetensors")
    run.seal(run.checkpoint())


def pickled(run: Run) -> None:
    (run.checkpoint() / "model.safetensors").rename(run.checkpoint() / "pytorch_model.bin")
    run.seal(run.checkpoint())


def lose_a_shard(run: Run) -> None:
    folder = run.checkpoint()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"lm_head.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    run.seal(folder)


def named_pipe(run: Run) -> None:
    path = run.checkpoint() / "model.safetensors"
    path.unlink()
    os.mkfifo(path)


def link_out(run: Run) -> None:
    outside = run.folder.parent / "outside.json"
    path = run.checkpoint() / "config.json"
    path.rename(outside)
    path.symlink_to(outside)


def traverse(run: Run) -> None:
    stamp = {"size": 1, "sha256": "0" * 64}
    files = json.loads((run.folder / MANIFEST).read_text())["files"]
    run.write_manifest(run.checkpoint(), {"files": files | {"../../outside": stamp}})


def half_written(run: Run) -> None:
    """A writer that was killed: a temporary folder beside the checkpoints, without manifest."""
    half = run.folder / ".partial-checkpoint-6"
    shutil.copytree(run.checkpoint(), half)
    (half / "manifest.json").unlink()
    (half / f".partial-{_dead_process()}-manifest.json").write_text('{"files": {')
    _age(half)


def waiting(run: Run) -> None:
    (run.folder / "wandb_backup").mkdir()
    run.write_json("wandb_backup/step_000003.json", {"schema_version": 1, "step": 3, "rows": []})


def replaced(run: Run) -> None:
    """A writer that was killed while it gave a new checkpoint the name of an old one."""
    old = run.checkpoint().rename(run.folder / f".replaced-{C}")
    _age(old)


def _age(folder: Path) -> None:
    an_hour_ago = time.time() - 3600
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (an_hour_ago, an_hour_ago))


def _dead_process() -> int:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return process


def foreign(run: Run) -> None:
    """Lay what Hugging Face's Trainer leaves: no state of ours, no manifest, pickled optimizer."""
    for step in STEPS:
        for name in ("regress_state.json", "manifest.json", "curriculum_state.json"):
            (run.checkpoint(step) / name).unlink()
        (run.checkpoint(step) / "optimizer.safetensors").unlink()
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
            (run.checkpoint(step) / name).write_bytes(b"PK\x03\x04 not opened by anybody")


def torn_metrics(run: Run) -> None:
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"segment": 0, "sequ')
