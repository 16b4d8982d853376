"""List of prepared broken checkpoints: the defect, what the doctor must say, and what a repair must leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import save_file

from tests.unit.doctor.builder import RUN_ID, Run
from tests.unit.doctor.damages import (
    MANIFEST,
    TRAINER,
    C,
    flip_a_bit,
    foreign,
    half_written,
    link_out,
    lose_a_shard,
    named_pipe,
    not_finite,
    pickled,
    remove,
    replaced,
    tear,
    torn_metrics,
    traverse,
    waiting,
    write,
)

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


REBUILT = (MANIFEST, TRAINER)

BROKEN = [
    # the commit
    Broken(
        "no_manifest",
        remove(MANIFEST),
        {"incomplete_checkpoint": MEDIUM, "tracking_step_offset": LOW},
        ASIDE,
    ),
    Broken("torn_manifest", tear(MANIFEST), {"corrupted_manifest": HIGH}, ASIDE),
    Broken(
        "manifest_of_an_unfinished_write",
        lambda run: run.write_manifest(run.checkpoint(), {"complete": False}),
        {"incomplete_checkpoint": HIGH},
        ASIDE,
    ),
    Broken("manifest_points_outside", traverse, {"unsafe_path": HIGH}, ASIDE),
    # weights
    Broken("no_weights", remove(f"{C}/model.safetensors"), {"missing_model_weights": HIGH}, ASIDE),
    Broken("torn_weights", tear(f"{C}/model.safetensors"), {"corrupted_model_weights": HIGH}, ASIDE),
    Broken("one_bit_of_the_weights", flip_a_bit, {"checksum_mismatch": HIGH}, ASIDE),
    Broken(
        "header_of_an_exabyte",
        write(f"{C}/model.safetensors", (1 << 60).to_bytes(8, "little") + b"{}"),
        {"corrupted_model_weights": HIGH},
        ASIDE,
    ),
    Broken("weights_not_finite", not_finite, {"nonfinite_weights": HIGH}, ASIDE),
    Broken("pickled_weights", pickled, {"pickled_weights": HIGH}, ASIDE),
    Broken("a_shard_is_missing", lose_a_shard, {"missing_model_weights": HIGH}, ASIDE),
    Broken("weights_are_a_pipe", named_pipe, {"unsafe_path": HIGH}, ASIDE),
    # trainer_state.json, which is made again of what the checkpoint knows
    Broken("no_trainer_state", remove(TRAINER), {"missing_checkpoint_file": HIGH}, REPAIRED, (TRAINER,)),
    Broken("torn_trainer_state", tear(TRAINER), {"corrupted_checkpoint_file": HIGH}, REPAIRED, (TRAINER,)),
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
        write(TRAINER, b"[]", seal=True),
        {"trainer_state_read_error": HIGH},
        REPAIRED,
        REBUILT,
    ),
    Broken(
        "trainer_state_nested_deeply",
        write(TRAINER, b"[" * 200_000),
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
    Broken("notes_of_the_user", write(f"{C}/notes.txt", b"my notes"), {"unlisted_file": LOW}),
    # files that other checkpoints of the run hold too
    Broken(
        "no_config",
        remove(f"{C}/config.json"),
        {"missing_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/config.json",),
    ),
    Broken(
        "torn_config",
        tear(f"{C}/config.json"),
        {"corrupted_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/config.json",),
    ),
    Broken("config_is_a_link_outside", link_out, {"unsafe_path": HIGH}, REPAIRED, (f"{C}/config.json",)),
    Broken(
        "no_tokenizer",
        remove(f"{C}/tokenizer.json"),
        {"missing_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/tokenizer.json",),
    ),
    Broken(
        "no_adapter_config",
        remove(f"{C}/adapter_config.json"),
        {"missing_checkpoint_file": HIGH},
        REPAIRED,
        (f"{C}/adapter_config.json",),
        lora=True,
    ),
    Broken(
        "no_adapter",
        remove(f"{C}/adapter_model.safetensors"),
        {"missing_model_weights": HIGH},
        ASIDE,
        lora=True,
    ),
    # the state that cannot be derived
    Broken("no_state", remove(f"{C}/regress_state.json"), {"missing_checkpoint_file": HIGH}, ASIDE),
    Broken(
        "state_of_a_later_release",
        lambda run: run.change(
            f"{C}/regress_state.json", lambda tree: tree.update(schema_version=99), seal=True
        ),
        {"unsupported_schema": HIGH},
        LEFT,
    ),
    Broken(
        "no_optimizer_state", remove(f"{C}/optimizer.safetensors"), {"missing_checkpoint_file": HIGH}, ASIDE
    ),
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
        tear("curriculum_state.json"),
        {"corrupted_curriculum_state": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
    ),
    Broken(
        "no_curriculum_state_in_the_checkpoint",
        remove(f"{C}/curriculum_state.json"),
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
        "curriculum_behind_its_checkpoint",
        lambda run: run.change(
            "curriculum_state.json", lambda tree: tree.update(last_update_step=0, performance_history=[])
        ),
        {"step_mismatch": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
    ),
    Broken(
        "curriculum_of_another_run",
        lambda run: run.change(
            "curriculum_state.json", lambda tree: tree["performance_history"][0].update(performance=0.1)
        ),
        {"curriculum_mismatch": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
    ),
    Broken(
        "curriculum_at_another_stage",
        lambda run: run.change("curriculum_state.json", lambda tree: tree.update(current_stage=0)),
        {"curriculum_mismatch": MEDIUM},
        REPAIRED,
        ("curriculum_state.json",),
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
    Broken("rows_wait_for_a_tracker", waiting, {"unsent_backups": LOW}),
    Broken(
        "tracker_is_ahead",
        lambda run: run.write_json("wandb_sync_state.json", run.tracking(150)),
        {"tracking_step_offset": LOW},
    ),
    Broken(
        "torn_tracking_state",
        tear("wandb_sync_state.json"),
        {"corrupted_tracking_state": MEDIUM},
        REPAIRED,
        ("wandb_sync_state.json",),
    ),
    Broken(
        "curriculum_was_never_logged",
        write("metrics.jsonl", b'{"step": 4, "eval_avg_test_pass_rate": 0.5}\n'),
        {"no_curriculum_logs": LOW},
    ),
    Broken(
        "torn_metrics",
        torn_metrics,
        {"torn_metrics": LOW},
        REPAIRED,
        ("metrics.jsonl",),
    ),
    Broken(
        "a_damaged_line_of_metrics",
        write("metrics.jsonl", b'\0\0\0\n{"segment": 0, "sequence": 1, "time": 1, "step": 0}\n'),
        {"corrupted_metrics": HIGH},
        REPAIRED,
        ("metrics.jsonl",),
    ),
    # leftovers
    Broken(
        "replaced_checkpoint",
        replaced,
        {"leftover": LOW, "tracking_step_offset": LOW},
        REPAIRED,
        (C, f".replaced-{C}"),
    ),
    Broken("half_written_checkpoint", half_written, {"leftover": LOW}, REPAIRED, (".partial-*",)),
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
    Broken("of_another_trainer", foreign, {"foreign_checkpoint": LOW}),
]

HEALTHY = [
    Broken("healthy", lambda run: None, {}),
    Broken("healthy_adapter_without_config_json", lambda run: None, {}, lora=True),
    Broken("healthy_with_its_own_run_id", lambda run: None, {}, environ={"WANDB_RUN_ID": RUN_ID}),
]
