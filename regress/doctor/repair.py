"""Changes that the doctor makes where it is asked to: repairs, cleaning up, a fresh curriculum, backups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from regress.doctor.check_context import CheckContext
from regress.doctor.checks.curriculum import content_fault, curriculum_of, text_of
from regress.doctor.examine import cleanup, examine
from regress.doctor.issue import Issue, Write, clean
from regress.doctor.journal import apply
from regress.doctor.plan import planned
from regress.doctor.report import Report
from regress.doctor.target import find_target
from regress.doctor.tree import parsed
from regress.engine.checkpoint.names import CURRICULUM_STATE
from regress.errors import DoctorError

ROUNDS = 8
"""Repairs that make others possible, at most."""


def repair(context: CheckContext) -> Report:
    """Repair what can be repaired, and examine again, until nothing is left to repair."""
    report = _applied(context, examine(context), "auto-fix")
    found, first = report.issues, report
    for _ in range(ROUNDS):
        if report.journal is None:
            break
        context = again(context)
        found = examine(context)
        report = _applied(context, found, "auto-fix", Path(report.journal))
        first.applied = [*(first.applied or ()), *(report.applied or ())]
    return replace(first, context=context, issues=found)


def clean_up(context: CheckContext) -> Report:
    """Move leftovers into the journal; nothing else is looked at or changed."""
    report = _applied(context, cleanup(context), "clean-only")
    return replace(report, issues=cleanup(again(context)))


def _applied(
    context: CheckContext, found: Sequence[Issue], reason: str, continues: Path | None = None
) -> Report:
    journal = apply(context.tree, planned(context.tree, found), reason, continues)
    done = dict.fromkeys(issue.fix.summary for issue in found if issue.fix is not None)
    return Report(
        context, found, list(done) if journal else [], None if journal is None else str(journal), found
    )


def again(context: CheckContext) -> CheckContext:
    """Return the context as it is on disk now."""
    target = context.target
    root = target.root
    named = root / (target.checkpoint or "")
    path = str(named if target.named and named.exists() else root)
    found = find_target(path, None, str(context.project_root))
    return replace(context, target=found, claimed=set(), unchecked=[])


def fresh(context: CheckContext) -> tuple[bytes, str]:
    """Return the state of the curriculum that `create_fresh` writes, and its stage in words.

    It is the one in the checkpoint's regress_state.json, else the one in its curriculum_state.json.

    Raises:
        DoctorError: if the checkpoint does not know its stage.
    """
    data = curriculum_of(context)
    if data is None and content_fault(found := context.object_of(CURRICULUM_STATE)) is None:
        data = text_of(found)
    if data is None:
        raise DoctorError(
            f"{context.target.checkpoint or context.target.root} holds no state of a curriculum, so its stage is "
            "unknown, and starting at the first would be a guess; give a checkpoint of a run with "
            "curriculum.enable=true"
        )
    state = parsed(data)
    name = state["stages"][state["current_stage"]].get("name")
    return data, f"stage {state['current_stage']} ({clean(str(name))}), that of {context.target.checkpoint}"


def create_fresh(context: CheckContext) -> Report:
    """Write the curriculum's state of the checkpoint beside the checkpoints, and examine.

    Raises:
        DoctorError: if the checkpoint does not know its stage.
    """
    data, stage = fresh(context)
    journal = apply(context.tree, [Write(CURRICULUM_STATE, data)], "create-fresh")
    done = [f"wrote {context.target.root / CURRICULUM_STATE} at {stage}"]
    report = Report(context, (), done if journal else [], None if journal is None else str(journal))
    report.context = again(context)
    report.issues = examine(report.context)
    return report
