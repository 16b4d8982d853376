"""All checks in their order: for a command, and before every resume, which they may stop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from rich.console import Console

from regress.doctor.check_context import CheckContext, Next
from regress.doctor.checks.checkpoint_files_check import (
    check_commit,
    check_contents,
    check_foreign,
    check_others,
    check_required,
    check_schema,
    check_trainer_state,
)
from regress.doctor.checks.configuration_check import check_configuration
from regress.doctor.checks.curriculum_check import check_curriculum
from regress.doctor.checks.leftover_files import check_leftovers
from regress.doctor.checks.machine_check import check_dependencies, check_disk, check_environment
from regress.doctor.checks.tracker_check import check_metrics, check_tracking, check_variables, check_wandb
from regress.doctor.checks.weights_check import check_weights
from regress.doctor.doctor_finding import Issue, Severity, issue
from regress.doctor.doctor_report import Report, show
from regress.doctor.examined_checkpoint import find_target
from regress.doctor.file_restore import retired
from regress.engine.checkpoint.checkpoint_names import LATEST
from regress.engine.config.config_schema import Config
from regress.errors import CheckpointError, DoctorError, DumpError

QUIET = ("config_changed", "world_size_mismatch", "tracking_step_offset", "unlisted_file")
"""Findings of low severity that are the wish of whoever resumes."""


def before_resume(config: Config, console: Console, allowed: Collection[str] = ()) -> None:
    """Examine the checkpoint that a run goes on from, and print what is found; only sizes are compared here, because
    the resume itself compares hashes. With several ranks the first one does so for all.

    Args:
        allowed: keys whose change is accepted.

    Raises:
        CheckpointError: for a finding of high severity.
    """
    asked = config.trainer.resume_from_checkpoint
    place = config.trainer.checkpoint_dir if asked == LATEST else asked
    if place is None:
        return
    try:
        target = find_target(place, None, ".", whole=False)
    except (DoctorError, DumpError):
        return  # the resume says what is wrong with the path, or starts at the beginning
    if target.checkpoint is None:
        return
    context = CheckContext(target, Next(config, allowed=frozenset(allowed)), deep=False)
    found = [issue for issue in examine(context) if _matters(issue, config)]
    high = [issue for issue in found if issue.severity is Severity.HIGH]
    if found:
        context.unchecked.clear()
        show(Report(context, found), console, plan=False)
    if context.foreign:
        return  # the resume refuses it
    if high:
        more = f" ({len(high) - 1} more findings like it)" if len(high) > 1 else ""
        where = target.shown if target.named else target.shown_root
        raise CheckpointError(
            f"{high[0].message}{more}: nothing was changed, see regress doctor {where} --diagnose"
        )


def _matters(issue: Issue, config: Config) -> bool:
    if issue.type in QUIET and issue.severity is Severity.LOW:
        return False
    saves = config.trainer.save_steps is not None or config.trainer.save_updates is not None
    return saves or issue.group != "disk"


Check = Callable[[CheckContext], Iterator[Issue]]

OF_CHECKPOINT: tuple[Check, ...] = (
    *(check_commit, check_foreign, check_required, check_schema, check_weights, check_trainer_state),
)
OF_RUN: tuple[Check, ...] = (
    *(check_curriculum, check_others, check_metrics, check_tracking, check_variables, check_wandb),
    *(check_configuration, check_environment, check_dependencies, check_disk, check_leftovers),
)
LAST: tuple[Check, ...] = (check_contents,)
"""Reads every file that no other check has told about."""

_ORDER = [Severity.HIGH, Severity.MEDIUM, Severity.LOW]


def examine(context: CheckContext) -> list[Issue]:
    """Return all findings, the worst first; nothing is changed."""
    checks = OF_RUN
    _note_other_folder(context)
    found: list[Issue] = []
    if context.target.checkpoint is None:
        found.append(_without_checkpoint(context))
    else:
        checks = (*OF_CHECKPOINT, *OF_RUN, *LAST)
    for check in checks:
        found += check(context)
    found = _of_store(context, found) if context.target.store is not None else retired(context, found)
    return sorted(found, key=lambda one: _ORDER.index(one.severity))


def _of_store(context: CheckContext, found: list[Issue]) -> list[Issue]:
    """Return the findings on a run in a store, without repairs and without what its copy cannot tell."""
    context.unchecked.append("free space, leftovers and folders of trackers: the run lies in a store")
    return [
        replace(one, fix=None)
        for one in found
        if one.group not in ("disk", "leftovers") and one.type != "no_wandb_runs"
    ]


def _note_other_folder(context: CheckContext) -> None:
    """Say so where the run keeps its metrics in another folder than its checkpoints."""
    if context.next.config is not None:
        config = context.next.config
        folders = (config.output_dir, config.trainer.checkpoint_dir)
    else:
        folders = (str(context.saved.get("output_dir")), str(context.saved.get("trainer.checkpoint_dir")))
    if folders[0] != folders[1]:
        context.unchecked.append(
            f"metrics, curriculum and tracking: the run keeps them in {folders[0]}; see regress doctor {folders[0]}"
        )


def cleanup(context: CheckContext) -> list[Issue]:
    """Return the findings that `--clean-only` is about: leftovers of this tool."""
    return [*check_leftovers(context)]


def _without_checkpoint(context: CheckContext) -> Issue:
    context.unchecked.append(f"a checkpoint: {context.target.shown_root} holds none")
    return issue(
        "no_checkpoint",
        f"{context.target.shown_root} holds no checkpoint-<step>, so there is nothing to resume from; a run writes "
        "some with trainer.save_steps=N",
    )
