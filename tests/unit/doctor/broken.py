"""List of prepared broken checkpoints: the defect, what the doctor must say, and what a repair must leave."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.unit.doctor.builder import RUN_ID, STEPS, Run

HIGH, MEDIUM, LOW = "high", "medium", "low"
REPAIRED, ASIDE, LEFT = "repaired", "moved aside", "left"
"""After a repair nothing is found; the checkpoint lies under another name, so that `latest` is one that is complete;
the same is found as before."""


@dataclass(frozen=True)
class Broken:
    """One prepared checkpoint.

    Attributes:
        damage: makes it of a healthy run.
        finds: type and severity of every issue, no more and no fewer.
        after: what a repair leaves.
        changed: the only files that a repair may change, by their path in the output directory.
        overrides: configuration of the next run, where it matters.
        environ: variables of the caller.
    """

    name: str
    damage: Callable[[Run], object]
    finds: Mapping[str, str]
    after: str = LEFT
    changed: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    lora: bool = False


def _tear(name: str) -> Callable[[Run], None]:
    def tear(run: Run) -> None:
        path = run.folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])

    return tear


def _remove(name: str, *, seal: bool = False) -> Callable[[Run], None]:
    def remove(run: Run) -> None:
        path = run.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        if seal:
            run.seal(path.parent)

    return remove


def _write(name: str, content: bytes) -> Callable[[Run], object]:
    return lambda run: (run.folder / name).write_bytes(content)


def _flip_a_bit(run: Run) -> None:
    path = run.checkpoint() / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _not_finite(run: Run) -> None:
    weights = {"lm_head.weight": np.array([1.0, np.nan, np.inf], dtype=np.float32)}
    save_file(weights, run.checkpoint() / "model.safetensors")
    run.seal(run.checkpoint())


def _pickled(run: Run) -> None:
    (run.checkpoint() / "model.safetensors").rename(run.checkpoint() / "pytorch_model.bin")
    run.seal(run.checkpoint())


def _lose_a_shard(run: Run) -> None:
    folder = run.checkpoint()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"lm_head.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    run.seal(folder)


def _named_pipe(run: Run) -> None:
    path = run.checkpoint() / "model.safetensors"
    path.unlink()
    os.mkfifo(path)


def _link_out(run: Run) -> None:
    outside = run.folder.parent / "outside.json"
    path = run.checkpoint() / "config.json"
    path.rename(outside)
    path.symlink_to(outside)


def _traverse(run: Run) -> None:
    stamp = {"size": 1, "sha256": "0" * 64}
    files = json.loads((run.folder / MANIFEST).read_text())["files"]
    run.write_manifest(run.checkpoint(), {"files": files | {"../../outside": stamp}})


def _half_written(run: Run) -> None:
    """A writer that was killed: a temporary folder beside the checkpoints, without manifest."""
    half = run.folder / ".partial-checkpoint-6"
    shutil.copytree(run.checkpoint(), half)
    (half / "manifest.json").unlink()
    (half / "state" / f".partial-{_dead_process()}-manifest.json").write_text('{"files": {')
    _age(half)


def _waiting(run: Run) -> None:
    (run.folder / "wandb_backup").mkdir()
    run.write_json("wandb_backup/step_000003.json", {"schema_version": 1, "step": 3, "rows": []})


def _replaced(run: Run) -> None:
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


def _foreign(run: Run) -> None:
    """Lay what Hugging Face's Trainer leaves: no state of ours, no manifest, pickled optimizer."""
    for step in STEPS:
        for name in ("regress_state.json", "manifest.json", "curriculum_state.json"):
            (run.checkpoint(step) / name).unlink()
        shutil.rmtree(run.checkpoint(step) / "state")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
            (run.checkpoint(step) / name).write_bytes(b"PK\x03\x04 not opened by anybody")


def _torn_metrics(run: Run) -> None:
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"segment": 0, "sequ')


C, EARLIER = "checkpoint-4", "checkpoint-2"
MANIFEST, TRAINER = f"{C}/manifest.json", f"{C}/trainer_state.json"
REBUILT = (MANIFEST, TRAINER)

BROKEN = [
    # the commit
    Broken(
        "no_manifest",
        _remove(MANIFEST),
        {"incomplete_checkpoint": MEDIUM, "tracking_step_offset": LOW},
        ASIDE,
    ),
    Broken("torn_manifest", _tear(MANIFEST), {"corrupted_manifest": HIGH}, ASIDE),
    Broken(
        "manifest_of_an_unfinished_write",
        lambda run: run.write_manifest(run.checkpoint(), {"complete": False}),
        {"incomplete_checkpoint": HIGH},
        ASIDE,
    ),
    Broken("manifest_points_outside", _traverse, {"unsafe_path": HIGH}, ASIDE),
    # weights
    Broken("no_weights", _remove(f"{C}/model.safetensors"), {"missing_model_weights": HIGH}, ASIDE),
    Broken("torn_weights", _tear(f"{C}/model.safetensors"), {"corrupted_model_weights": HIGH}, ASIDE),
    Broken("one_bit_of_the_weights", _flip_a_bit, {"checksum_mismatch": HIGH}, ASIDE),
    Broken(
        "header_of_an_exabyte",
        _write(f"{C}/model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        {"corrupted_model_weights": HIGH},
        ASIDE,
    ),
    Broken("weights_not_finite", _not_finite, {"nonfinite_weights": HIGH}, ASIDE),
    Broken("pickled_weights", _pickled, {"pickled_weights": HIGH}, ASIDE),
    Broken("a_shard_is_missing", _lose_a_shard, {"missing_model_weights": HIGH}, ASIDE),
    Broken("weights_are_a_pipe", _named_pipe, {"unsafe_path": HIGH}, ASIDE),
    # trainer_state.json, which is made again of what the checkpoint knows
    Broken("no_trainer_state", _remove(TRAINER), {"missing_checkpoint_file": HIGH}, REPAIRED, (TRAINER,)),
    Broken("torn_trainer_state", _tear(TRAINER), {"corrupted_checkpoint_file": HIGH}, REPAIRED, (TRAINER,)),
    Broken(
        "trainer_state_lacks_keys",
        lambda run: run.change(TRAINER, lambda tree: (tree.pop("epoch"), tree.pop("best_metric")), seal=True),
        {"incomplete_trainer_state": MEDIUM},
        REPAIRED,
        REBUILT,
    ),
    Broken(
        "trainer_state_at_step_0",
        lambda run: run.change(TRAINER, lambda tree: tree.update(global_step=0), seal=True),
        {"invalid_global_step": MEDIUM},
        REPAIRED,
        REBUILT,
    ),
    Broken(
        "trainer_state_is_a_list",
        lambda run: (_write(TRAINER, b"[]")(run), run.seal(run.checkpoint())),
        {"trainer_state_read_error": HIGH},
        REPAIRED,
        REBUILT,
    ),
    Broken(
        "trainer_state_nested_deeply",
        _write(TRAINER, b"[" * 200_000),
        {"corrupted_checkpoint_file": HIGH},
        REPAIRED,
        (TRAINER,),
    ),
    Broken(
        "another_file_of_weights",
        lambda run: save_file({"x": np.ones(1)}, run.checkpoint() / "model-extra.safetensors"),
        {"unlisted_file": HIGH},
        REPAIRED,
        (f"{C}/model-extra.safetensors",),
    ),
    Broken("notes_of_the_user", _write(f"{C}/notes.txt", b"my notes"), {"unlisted_file": LOW}),
    # files that other checkpoints of the run hold too
    Broken(
        "no_config",
        _remove(f"{C}/config.json"),
        {"missing_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/config.json",),
    ),
    Broken(
        "torn_config",
        _tear(f"{C}/config.json"),
        {"corrupted_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/config.json",),
    ),
    Broken("config_is_a_link_outside", _link_out, {"unsafe_path": HIGH}, REPAIRED, (f"{C}/config.json",)),
    Broken(
        "no_tokenizer",
        _remove(f"{C}/tokenizer.json"),
        {"missing_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/tokenizer.json",),
    ),
    Broken(
        "no_adapter_config",
        _remove(f"{C}/adapter_config.json"),
        {"missing_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/adapter_config.json",),
        lora=True,
    ),
    Broken(
        "no_adapter",
        _remove(f"{C}/adapter_model.safetensors"),
        {"missing_model_weights": HIGH},
        ASIDE,
        lora=True,
    ),
    # the state that cannot be derived
    Broken("no_state", _remove(f"{C}/regress_state.json"), {"missing_checkpoint_file": HIGH}, ASIDE),
    Broken(
        "state_of_a_later_release",
        lambda run: run.change(
            f"{C}/regress_state.json", lambda tree: tree.update(schema_version=99), seal=True
        ),
        {"unsupported_schema": HIGH},
        LEFT,
    ),
    Broken("no_optimizer_state", _remove(f"{C}/state/optimizer"), {"missing_checkpoint_file": HIGH}, ASIDE),
    Broken(
        "folder_was_renamed",
        lambda run: run.checkpoint().rename(run.folder / "checkpoint-9"),
        {"checkpoint_misnamed": MEDIUM},
        REPAIRED,
        ("checkpoint-9", C),
    ),
    # curriculum
    Broken(
        "torn_curriculum_state",
        _tear("curriculum_state.json"),
        {"corrupted_curriculum_state": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
    ),
    Broken(
        "no_curriculum_state_in_the_checkpoint",
        _remove(f"{C}/curriculum_state.json"),
        {"missing_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/curriculum_state.json",),
    ),
    Broken(
        "curriculum_ahead_of_its_checkpoint",
        lambda run: run.change(
            f"{C}/curriculum_state.json", lambda tree: tree.update(last_update_step=150), seal=True
        ),
        {"step_mismatch": MEDIUM},
        REPAIRED,
        (f"{C}/curriculum_state.json", MANIFEST),
    ),
    Broken(
        "curriculum_stage_is_a_list",
        lambda run: run.change("curriculum_state.json", lambda tree: tree.update(stages=[[], []])),
        {"invalid_stage_format": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
    ),
    Broken(
        "curriculum_lacks_its_stage",
        lambda run: run.change("curriculum_state.json", lambda tree: tree.pop("current_stage")),
        {"missing_field": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
    ),
    Broken(
        "curriculum_stage_without_threshold",
        lambda run: run.change(
            "curriculum_state.json", lambda tree: tree["stages"][0].pop("performance_threshold")
        ),
        {"incomplete_stage_config": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
    ),
    # tracking and metrics
    Broken(
        "tracked_as_another_run",
        lambda run: run.change("wandb_sync_state.json", lambda tree: tree.update(run_id="another")),
        {"tracking_run_mismatch": MEDIUM},
    ),
    Broken("rows_wait_for_a_tracker", _waiting, {"unsent_backups": LOW}),
    Broken(
        "tracker_is_ahead",
        lambda run: run.write_json("wandb_sync_state.json", run.tracking(150)),
        {"tracking_step_offset": LOW},
    ),
    Broken(
        "torn_tracking_state",
        _tear("wandb_sync_state.json"),
        {"corrupted_tracking_state": MEDIUM},
        REPAIRED,
        ("wandb_sync_state.json",),
    ),
    Broken(
        "curriculum_was_never_logged",
        _write("metrics.jsonl", b'{"step": 4, "eval_avg_test_pass_rate": 0.5}\n'),
        {"no_curriculum_logs": LOW},
    ),
    Broken(
        "torn_metrics",
        _torn_metrics,
        {"torn_metrics": LOW},
        REPAIRED,
        ("metrics.jsonl",),
    ),
    Broken(
        "a_damaged_line_of_metrics",
        lambda run: _write("metrics.jsonl", b'\0\0\0\n{"segment": 0, "sequence": 1, "time": 1, "step": 0}\n')(
            run
        ),
        {"corrupted_metrics": HIGH},
        REPAIRED,
        ("metrics.jsonl",),
    ),
    # leftovers
    Broken(
        "replaced_checkpoint",
        _replaced,
        {"leftover": LOW, "tracking_step_offset": LOW},
        REPAIRED,
        (C, f".replaced-{C}"),
    ),
    Broken("half_written_checkpoint", _half_written, {"leftover": LOW}, REPAIRED, (".partial-*",)),
    # the next run against the checkpoint
    Broken(
        "other_lengths",
        lambda run: None,
        {"length_config_mismatch": HIGH},
        overrides=("data.max_completion_length=8",),
    ),
    Broken(
        "lengths_do_not_add_up",
        lambda run: None,
        {"config_instantiation_error": HIGH},
        overrides=("data.max_completion_length=40",),
    ),
    Broken(
        "other_model", lambda run: None, {"model_config_mismatch": HIGH}, overrides=("model.family=llama",)
    ),
    Broken(
        "other_optimizer",
        lambda run: None,
        {"optimizer_config_mismatch": HIGH},
        overrides=("optimizer.learning_rate=0.5",),
    ),
    Broken(
        "other_tokenizer",
        lambda run: None,
        {"tokenizer_config_mismatch": HIGH},
        overrides=("tokenizer.path=elsewhere",),
    ),
    Broken(
        "other_objective",
        lambda run: None,
        {"objective_config_mismatch": HIGH},
        overrides=("trainer.epochs=2",),
    ),
    Broken("other_data", lambda run: None, {"data_config_mismatch": HIGH}, overrides=("task.level=2",)),
    Broken(
        "other_threads",
        lambda run: None,
        {"config_mismatch": HIGH, "environment_mismatch": MEDIUM},
        overrides=("threads=2",),
    ),
    Broken(
        "code_that_is_not_there",
        lambda run: None,
        {"config_import_error": HIGH, "model_config_mismatch": HIGH},
        overrides=("model.patch=no_such_module:function",),
    ),
    Broken("longer_run", lambda run: None, {"config_changed": LOW}, overrides=("max_steps=12",)),
    Broken("other_seed", lambda run: None, {"seed_mismatch": HIGH}, overrides=("seed=7",)),
    Broken("other_world_size", lambda run: None, {"world_size_mismatch": LOW}, overrides=("parallel.dp=2",)),
    Broken(
        "other_determinism_environment",
        lambda run: None,
        {"environment_mismatch": MEDIUM},
        overrides=("exp_name=prepared",),
        environ={"ATEN_CPU_CAPABILITY": "default"},
    ),
    Broken(
        "run_id_of_another_run",
        lambda run: None,
        {"stale_tracker_environment": MEDIUM},
        environ={"WANDB_RUN_ID": "somebody-elses", "WANDB_RESUME": "must"},
    ),
    Broken(
        "other_versions",
        lambda run: run.change(
            f"{C}/regress_state.json", lambda tree: tree["versions"].update(torch="1.0.0"), seal=True
        ),
        {"dependency_mismatch": MEDIUM},
    ),
    # of another trainer
    Broken("of_another_trainer", _foreign, {"foreign_checkpoint": LOW}),
]

HEALTHY = [
    Broken("healthy", lambda run: None, {}),
    Broken("healthy_adapter_without_config_json", lambda run: None, {}, lora=True),
    Broken("healthy_with_its_own_run_id", lambda run: None, {}, environ={"WANDB_RUN_ID": RUN_ID}),
]
