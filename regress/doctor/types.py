"""Table of all findings: name, usual severity, part of the run, and the rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regress.doctor.issue import Fix, Issue, Severity

HIGH, MEDIUM, LOW = Severity.HIGH, Severity.MEDIUM, Severity.LOW


@dataclass(frozen=True)
class Rule:
    """Severity, group, and the rule in a few words, for lists."""

    severity: Severity
    group: str
    meaning: str


RULES: dict[str, Rule] = {
    # files of the checkpoint
    "incomplete_checkpoint": Rule(
        HIGH, "files", "manifest.json, written last, is missing or says unfinished"
    ),
    "corrupted_manifest": Rule(HIGH, "files", "manifest.json cannot be read, so nothing can be verified"),
    "checksum_mismatch": Rule(HIGH, "files", "a file differs from its size or hash in manifest.json"),
    "missing_checkpoint_file": Rule(HIGH, "files", "a file that the checkpoint must hold is missing"),
    "corrupted_checkpoint_file": Rule(HIGH, "files", "a JSON file of the checkpoint cannot be parsed"),
    "unsafe_path": Rule(HIGH, "files", "a path leaves the tree, or is no ordinary file"),
    "unsupported_schema": Rule(HIGH, "files", "written by a later release"),
    "checkpoint_misnamed": Rule(MEDIUM, "files", "the folder's name tells another step than its state"),
    "unlisted_file": Rule(HIGH, "files", "manifest.json does not know a file that could be loaded"),
    "foreign_checkpoint": Rule(LOW, "files", "another trainer's: weights can be used, the run not continued"),
    "no_checkpoint": Rule(LOW, "files", "the output directory holds no checkpoint"),
    # weights
    "missing_model_weights": Rule(HIGH, "weights", "weights, an adapter or a shard of them is missing"),
    "corrupted_model_weights": Rule(HIGH, "weights", "the header does not fit the file"),
    "nonfinite_weights": Rule(HIGH, "weights", "a weight is NaN or infinite"),
    "pickled_weights": Rule(HIGH, "weights", "only pickled weights, which could run code, are there"),
    # trainer_state.json
    "incomplete_trainer_state": Rule(MEDIUM, "state", "trainer_state.json lacks keys"),
    "invalid_global_step": Rule(MEDIUM, "state", "global_step is not that of the checkpoint"),
    "trainer_state_read_error": Rule(HIGH, "state", "trainer_state.json is no JSON object"),
    # the configuration of the next run
    "config_import_error": Rule(HIGH, "configuration", "code that a key names cannot be imported"),
    "config_instantiation_error": Rule(HIGH, "configuration", "the configuration breaks a rule"),
    "length_config_mismatch": Rule(HIGH, "configuration", "lengths differ from the checkpoint's"),
    "model_config_mismatch": Rule(HIGH, "configuration", "model or adapter differ from the checkpoint's"),
    "tokenizer_config_mismatch": Rule(HIGH, "configuration", "another tokenizer"),
    "optimizer_config_mismatch": Rule(HIGH, "configuration", "optimizer settings differ"),
    "objective_config_mismatch": Rule(HIGH, "configuration", "algorithm or reference settings differ"),
    "data_config_mismatch": Rule(HIGH, "configuration", "task, data, rollout or curriculum settings differ"),
    "seed_mismatch": Rule(HIGH, "configuration", "another seed"),
    "config_mismatch": Rule(HIGH, "configuration", "another key that a resume may not change differs"),
    "world_size_mismatch": Rule(LOW, "configuration", "another layout of ranks, which a resume may change"),
    "config_changed": Rule(LOW, "configuration", "a key that a resume may change differs"),
    # curriculum
    "corrupted_curriculum_state": Rule(MEDIUM, "curriculum", "curriculum_state.json cannot be parsed"),
    "missing_field": Rule(MEDIUM, "curriculum", "curriculum_state.json lacks a field"),
    "invalid_stage_format": Rule(
        HIGH, "curriculum", "a stage is no JSON object, or the current one no index"
    ),
    "incomplete_stage_config": Rule(MEDIUM, "curriculum", "a stage lacks a field"),
    "step_mismatch": Rule(MEDIUM, "curriculum", "the curriculum's step is not that of its checkpoint"),
    "curriculum_mismatch": Rule(
        MEDIUM, "curriculum", "the run's own state does not go on from that of its newest checkpoint"
    ),
    "no_curriculum_logs": Rule(LOW, "curriculum", "a curriculum is on and nothing of it was logged"),
    # tracking and metrics
    "tracking_step_offset": Rule(LOW, "tracking", "the tracker was further than the checkpoint is"),
    "tracking_run_mismatch": Rule(MEDIUM, "tracking", "the run id differs from the checkpoint's"),
    "corrupted_tracking_state": Rule(MEDIUM, "tracking", "wandb_sync_state.json cannot be read"),
    "stale_tracker_environment": Rule(MEDIUM, "tracking", "WANDB_* variables belong to another run"),
    "wandb_not_installed": Rule(MEDIUM, "tracking", "wandb is asked for and not installed"),
    "wandb_no_credentials": Rule(MEDIUM, "tracking", "wandb is asked for online, without a login"),
    "no_wandb_runs": Rule(LOW, "tracking", "wandb is asked for and no earlier run lies in its folder"),
    "unsent_backups": Rule(LOW, "tracking", "points that a tracker did not take wait in wandb_backup"),
    "torn_metrics": Rule(LOW, "tracking", "the last line of metrics.jsonl is cut off"),
    "corrupted_metrics": Rule(
        HIGH, "tracking", "a line within metrics.jsonl is no row, so no reader accepts it"
    ),
    # surroundings
    "environment_mismatch": Rule(MEDIUM, "environment", "another determinism environment"),
    "dependency_mismatch": Rule(MEDIUM, "environment", "another version of a package that computes"),
    "missing_dependency": Rule(HIGH, "environment", "a package that the run needs is not installed"),
    "disk_full": Rule(HIGH, "disk", "less space than one checkpoint takes"),
    "disk_space": Rule(MEDIUM, "disk", "less space than the checkpoints of the run will take"),
    # leftovers
    "leftover": Rule(LOW, "leftovers", "a half-written file of a writer that is gone"),
    "unproven_leftover": Rule(LOW, "leftovers", "a half-written file whose writer may still be there"),
}


def issue(
    type: str,
    message: str,
    *,
    path: str | None = None,
    evidence: Mapping[str, Any] | None = None,
    command: str | None = None,
    fix: Fix | None = None,
) -> Issue:
    """Return a finding of this type with the severity and group of its rule."""
    rule = RULES[type]
    return Issue(type, rule.severity, rule.group, message, path, evidence or {}, command, fix)
