"""Builder of a small run on disk: two complete checkpoints, metrics, and the state of curriculum and tracking."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from regress.dump.canonical_json import dumps
from regress.dump.dump_files import file_stamp
from regress.dump.dump_manifest import environment, package_versions
from regress.engine.checkpoint.checkpoint_manifest import write_manifest
from regress.engine.checkpoint.configuration_changes import resolved
from regress.engine.checkpoint.trainer_state import CheckpointState, json_bytes, trainer_state
from regress.engine.config import Config, load_config

STEPS = (2, 4)
UPDATES_PER_STEP = 2
RUN_ID = "a1b2c3d4"
CONFIG = ("exp_name=prepared", "max_steps=8", "trainer.mini_batch_size=32", "model.config={hidden_size: 16}")


ELSEWHERE = "/output/directory/of/a/prepared/run"


@cache
def _config() -> Config:
    """The configuration of every prepared run, with another output directory."""
    return load_config(None, None, [*CONFIG, f"output_dir={ELSEWHERE}"], environ={}).config


class Run:
    """A run that was stopped after step 4 and can be resumed.

    Args:
        folder: its output directory.
        lora: the checkpoints hold an adapter in place of a whole model.
    """

    def __init__(self, folder: Path, *, lora: bool = False) -> None:
        self.folder, self.lora = folder, lora
        folder.mkdir(parents=True)
        self.config = _config()
        for step in STEPS:
            self._write_checkpoint(step)
        last = self.checkpoint()
        (folder / "curriculum_state.json").write_bytes((last / "curriculum_state.json").read_bytes())
        self.write_json("wandb_sync_state.json", self.tracking(STEPS[-1]))
        rows = [{"segment": 0, "sequence": 0, "time": 1.0, "step": 0, "update": 0}]
        rows += [
            {"segment": 0, "sequence": n, "time": 1.0 + n, "step": n, "rollouts/returns_mean": 0.25 * n}
            for n in range(1, STEPS[-1])
        ]
        evaluation = {"eval_avg_test_pass_rate": 0.5, "curriculum/current_stage": 1}
        rows.append({"segment": 0, "sequence": STEPS[-1], "time": 9.0, "step": STEPS[-1], **evaluation})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def checkpoint(self, step: int = STEPS[-1]) -> Path:
        return self.folder / f"checkpoint-{step}"

    def files(self) -> dict[str, str]:
        """Hash of every file, and the target of every link, by path; what the doctor keeps for itself is left out."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            name = str(path.relative_to(self.folder))
            if name.startswith(".regress-doctor"):
                continue
            if path.is_symlink():
                found[name] = f"link to {path.readlink()}"
            elif path.is_file():
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[name] = "folder" if path.is_dir() else "special"
        return found

    def write_json(self, name: str, content: Any) -> None:
        (self.folder / name).write_text(json.dumps(content, indent=1))

    def change(self, name: str, change: Callable[[dict[str, Any]], object], *, seal: bool = False) -> None:
        """Change the content of a JSON file; with `seal`, its checkpoint's manifest follows."""
        path = self.folder / name
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree, indent=1))
        if seal:
            self.seal(path.parent)

    def tracking(self, step: int) -> dict[str, Any]:
        """Return what trackers had when the run was at a step."""
        place = {"segment": 0, "sequence": step, "step": step, "update": None, "resumed_from": None}
        names = {"run_id": RUN_ID, "run_name": "prepared", "project": "prepared", "trackers": {}}
        return {"schema_version": 1, "time": 1.0, **place, **names}

    def position(self, step: int) -> dict[str, Any]:
        """State of tracking in a checkpoint."""
        return {"schema_version": 1, "segment": 0, "sequence": step, "run_id": RUN_ID}

    def curriculum(self, step: int) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "current_stage": 1,
            "current_stage_name": "advanced",
            "current_round": 1,
            "stage_start_step": 1,
            "stage_count": 2,
            "last_update_step": step,
            "stages": [
                {
                    "name": name,
                    "dataset_levels": [name],
                    "complexity_range": [0.0, 5.0],
                    "performance_threshold": 0.6,
                }
                for name in ("basic", "advanced")
            ],
            "performance_history": [{"step": step, "performance": 0.7, "stage": 1, "round": 1}],
            "stage_advancement_log": [],
        }

    def seal(self, checkpoint: Path) -> None:
        """Write the manifest of what the checkpoint holds now."""
        files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and not path.is_symlink()]
        manifest = checkpoint / "manifest.json"
        write_manifest(
            checkpoint,
            {str(path.relative_to(checkpoint)): file_stamp(path) for path in files if path != manifest},
        )

    def write_manifest(self, checkpoint: Path, change: dict[str, Any]) -> None:
        """Write a manifest that has other values than it should, and fits its own checksum."""
        path = checkpoint / "manifest.json"
        tree = {**json.loads(path.read_text()), **change}
        del tree["sha256"]
        tree["sha256"] = hashlib.sha256(dumps(tree).encode()).hexdigest()
        path.write_text(json.dumps(tree, indent=1))

    def _write_checkpoint(self, step: int) -> None:
        folder = self.checkpoint(step)
        folder.mkdir()
        name = "adapter_model.safetensors" if self.lora else "model.safetensors"
        save_file({"lm_head.weight": np.full((4, 16), step, dtype=np.float32)}, folder / name)
        save_file({"m": np.full((4, 16), step / 8, dtype=np.float32)}, folder / "optimizer.safetensors")
        model = {"peft_type": "LORA", "r": 4} if self.lora else {"model_type": "qwen3", "hidden_size": 16}
        state = self._state(step)
        write = {
            "adapter_config.json" if self.lora else "config.json": model,
            "tokenizer.json": {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}}},
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
            "trainer_state.json": trainer_state(self.config, state, 96),
            "curriculum_state.json": self.curriculum(step),
        }
        for file, content in write.items():
            (folder / file).write_bytes(json_bytes(content))
        (folder / "regress_state.json").write_bytes(state.to_bytes())
        self.seal(folder)

    def _state(self, step: int) -> CheckpointState:
        return CheckpointState(
            path=Path(),
            step=step,
            update=step * UPDATES_PER_STEP,
            updates_in_step=0,
            config={
                key: value.replace(ELSEWHERE, str(self.folder)) if isinstance(value, str) else value
                for key, value in resolved(self.config).items()
            },
            world_size=1,
            mesh={},
            scheduler={"updates": step * UPDATES_PER_STEP, "learning_rates": [1e-3]},
            segment=0,
            sequence=step,
            parts={"curriculum": self.curriculum(step), "tracking": self.position(step)},
            pass_rates={0: 0.25, step: 0.5},
            environment=environment(self.config.device, self.config.threads),
            versions=package_versions(),
        )
