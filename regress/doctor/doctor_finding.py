"""Findings of the doctor: each names the culprit, the rule and the remedy, and how bad it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from regress.credential_redaction import redacted, redacted_tree
from regress.printable_text import printable

SCRUBBED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""Control characters of names and values in files, which a terminal would obey."""


class Severity(StrEnum):
    """High: the run cannot be continued, or not as the same run. Medium: it can, with wrong or lost records.
    Low: nothing has to be done.
    """

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True)
class Write:
    """Replace a file by other bytes, or create it.

    Attributes:
        seal: the file is in a checkpoint whose manifest must follow, because the bytes are not those that were written.
    """

    path: str
    data: bytes = field(repr=False)
    seal: bool = False


@dataclass(frozen=True)
class Move:
    """Rename a file or folder; `to` does not exist yet."""

    path: str
    to: str


@dataclass(frozen=True)
class Store:
    """Move a file or folder into the backup, from which `--restore` brings it back."""

    path: str


Action: TypeAlias = Write | Move | Store


@dataclass(frozen=True)
class Fix:
    """Automatic repair.

    Attributes:
        summary: half a sentence, beginning with a verb.
        actions: changes of files, by their path in the output directory.
    """

    summary: str
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Issue:
    """One finding.

    Attributes:
        type: name of the rule, see `regress.doctor.doctor_finding`.
        severity: see `Severity`.
        group: part of the run that it concerns.
        message: one sentence: culprit, rule, remedy.
        path: the file or folder, or None.
        evidence: values that prove it, as plain JSON.
        command: what to type where no repair is automatic.
        fix: the automatic repair, or None.
    """

    type: str
    severity: Severity
    group: str
    message: str
    path: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    fix: Fix | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data, without credentials."""
        return {
            "type": self.type,
            "severity": str(self.severity),
            "group": self.group,
            "message": self.message,
            "path": self.path,
            "evidence": redacted_tree(dict(self.evidence)),
            "fix": None if self.fix is None else self.fix.summary,
            "automatic": self.fix is not None,
            "fix_suggestion": self.command or (None if self.fix is None else AUTOMATIC),
        }


AUTOMATIC = "regress doctor --auto-fix"


def clean(text: str, limit: int = 120) -> str:
    """Return a text of a file or a variable fit for a sentence: no control characters, no credentials, not long."""
    text = printable(redacted(text).translate(SCRUBBED))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown(value: Any, limit: int = 80) -> str:
    """Return a value of a file as it may stand in a sentence."""
    return clean(repr(value), limit)


HIGH, MEDIUM, LOW = Severity.HIGH, Severity.MEDIUM, Severity.LOW


@dataclass(frozen=True)
class DoctorRule:
    """Severity, group, and the rule in a few words, for lists."""

    severity: Severity
    group: str
    meaning: str


RULES: dict[str, DoctorRule] = {
    # files of the checkpoint
    "incomplete_checkpoint": DoctorRule(
        HIGH, "files", "manifest.json, written last, is missing or says unfinished"
    ),
    "corrupted_manifest": DoctorRule(
        HIGH, "files", "manifest.json cannot be read, so nothing can be verified"
    ),
    "checksum_mismatch": DoctorRule(HIGH, "files", "a file differs from its size or hash in manifest.json"),
    "missing_checkpoint_file": DoctorRule(HIGH, "files", "a file that the checkpoint must hold is missing"),
    "corrupted_checkpoint_file": DoctorRule(HIGH, "files", "a JSON file of the checkpoint cannot be parsed"),
    "unsafe_path": DoctorRule(HIGH, "files", "a path leaves the tree, or is not an ordinary file"),
    "unsupported_schema": DoctorRule(HIGH, "files", "written by a later release"),
    "checkpoint_misnamed": DoctorRule(MEDIUM, "files", "the folder's name tells another step than its state"),
    "unlisted_file": DoctorRule(HIGH, "files", "manifest.json does not know a file that could be loaded"),
    "foreign_checkpoint": DoctorRule(
        LOW, "files", "another trainer's: weights can be used, the run not continued"
    ),
    "no_checkpoint": DoctorRule(LOW, "files", "the output directory holds no checkpoint"),
    # weights
    "missing_model_weights": DoctorRule(HIGH, "weights", "weights, an adapter or a shard of them is missing"),
    "corrupted_model_weights": DoctorRule(HIGH, "weights", "the header does not fit the file"),
    "nonfinite_weights": DoctorRule(HIGH, "weights", "a weight is NaN or infinite"),
    "pickled_weights": DoctorRule(HIGH, "weights", "only pickled weights, which could run code, are there"),
    # trainer_state.json
    "incomplete_trainer_state": DoctorRule(MEDIUM, "state", "trainer_state.json lacks keys"),
    "invalid_global_step": DoctorRule(MEDIUM, "state", "global_step is not that of the checkpoint"),
    "trainer_state_read_error": DoctorRule(HIGH, "state", "trainer_state.json is not a JSON object"),
    # the configuration of the next run
    "config_import_error": DoctorRule(HIGH, "configuration", "code that a key names cannot be imported"),
    "config_instantiation_error": DoctorRule(HIGH, "configuration", "the configuration breaks a rule"),
    "length_config_mismatch": DoctorRule(HIGH, "configuration", "lengths differ from the checkpoint's"),
    "model_config_mismatch": DoctorRule(
        HIGH, "configuration", "model or adapter differ from the checkpoint's"
    ),
    "tokenizer_config_mismatch": DoctorRule(HIGH, "configuration", "another tokenizer"),
    "optimizer_config_mismatch": DoctorRule(HIGH, "configuration", "optimizer settings differ"),
    "objective_config_mismatch": DoctorRule(HIGH, "configuration", "algorithm or reference settings differ"),
    "data_config_mismatch": DoctorRule(
        HIGH, "configuration", "task, data, rollout or curriculum settings differ"
    ),
    "seed_mismatch": DoctorRule(HIGH, "configuration", "another seed"),
    "config_mismatch": DoctorRule(HIGH, "configuration", "another key that a resume may not change differs"),
    "world_size_mismatch": DoctorRule(
        LOW, "configuration", "another layout of ranks, which a resume may change"
    ),
    "config_changed": DoctorRule(LOW, "configuration", "a key that a resume may change differs"),
    # curriculum
    "corrupted_curriculum_state": DoctorRule(MEDIUM, "curriculum", "curriculum_state.json cannot be parsed"),
    "missing_field": DoctorRule(MEDIUM, "curriculum", "curriculum_state.json lacks a field"),
    "invalid_stage_format": DoctorRule(
        HIGH, "curriculum", "a stage is not a JSON object, or the current one is not an index"
    ),
    "incomplete_stage_config": DoctorRule(MEDIUM, "curriculum", "a stage lacks a field"),
    "step_mismatch": DoctorRule(MEDIUM, "curriculum", "the curriculum's step is not that of its checkpoint"),
    "curriculum_mismatch": DoctorRule(
        MEDIUM, "curriculum", "the run's own state does not go on from that of its newest checkpoint"
    ),
    "no_curriculum_logs": DoctorRule(LOW, "curriculum", "a curriculum is on and nothing of it was logged"),
    # tracking and metrics
    "tracking_step_offset": DoctorRule(LOW, "tracking", "the tracker was further than the checkpoint is"),
    "tracking_run_mismatch": DoctorRule(MEDIUM, "tracking", "the run id differs from the checkpoint's"),
    "corrupted_tracking_state": DoctorRule(MEDIUM, "tracking", "wandb_sync_state.json cannot be read"),
    "stale_tracker_environment": DoctorRule(MEDIUM, "tracking", "WANDB_* variables belong to another run"),
    "wandb_not_installed": DoctorRule(MEDIUM, "tracking", "wandb is asked for and not installed"),
    "wandb_no_credentials": DoctorRule(MEDIUM, "tracking", "wandb is asked for online, without a login"),
    "no_wandb_runs": DoctorRule(LOW, "tracking", "wandb is asked for and no earlier run lies in its folder"),
    "unsent_backups": DoctorRule(LOW, "tracking", "points that a tracker did not take wait in wandb_backup"),
    "torn_metrics": DoctorRule(LOW, "tracking", "the last line of metrics.jsonl is cut off"),
    "corrupted_metrics": DoctorRule(
        HIGH, "tracking", "a line within metrics.jsonl is not a row, so no reader accepts it"
    ),
    # surroundings
    "environment_mismatch": DoctorRule(MEDIUM, "environment", "another determinism environment"),
    "dependency_mismatch": DoctorRule(MEDIUM, "environment", "another version of a package that computes"),
    "missing_dependency": DoctorRule(HIGH, "environment", "a package that the run needs is not installed"),
    "disk_full": DoctorRule(HIGH, "disk", "less space than one checkpoint takes"),
    "disk_space": DoctorRule(MEDIUM, "disk", "less space than the checkpoints of the run will take"),
    # leftovers
    "leftover": DoctorRule(LOW, "leftovers", "a half-written file of a writer that is gone"),
    "unproven_leftover": DoctorRule(LOW, "leftovers", "a half-written file whose writer may still be there"),
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
