"""All checks in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from regress.doctor.check_context import CheckContext
from regress.doctor.checks.configuration import check_configuration
from regress.doctor.checks.curriculum import check_curriculum
from regress.doctor.checks.files import (
    check_commit,
    check_contents,
    check_foreign,
    check_others,
    check_required,
    check_schema,
)
from regress.doctor.checks.leftovers import check_leftovers
from regress.doctor.checks.machine import check_dependencies, check_disk, check_environment
from regress.doctor.checks.metrics import check_metrics
from regress.doctor.checks.tracking import check_tracking, check_variables, check_wandb
from regress.doctor.checks.trainer_state import check_trainer_state
from regress.doctor.checks.weights import check_weights
from regress.doctor.issue import Issue, Severity
from regress.doctor.retire import retired
from regress.doctor.types import issue

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
