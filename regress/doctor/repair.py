"""Changes that the doctor makes where it is asked to: repairs, cleaning up, a fresh curriculum, backups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regress.doctor.checks.curriculum import content_fault, curriculum_of, text_of
from regress.doctor.examine import cleanup, examine
from regress.doctor.issue import Issue, Write, clean
from regress.doctor.journal import apply
from regress.doctor.plan import planned
from regress.doctor.report import Report
from regress.doctor.scene import Scene
from regress.doctor.target import find_target
from regress.doctor.tree import parsed
from regress.engine.checkpoint.names import CURRICULUM_STATE
from regress.errors import DoctorError


def repair(scene: Scene) -> Report:
    """Repair what can be repaired, and examine again."""
    return _repaired(scene, examine(scene), "auto-fix")


def clean_up(scene: Scene) -> Report:
    """Move leftovers into the journal; nothing else is looked at or changed."""
    found = cleanup(scene)
    report = _applied(scene, found, "clean-only")
    report.issues = cleanup(again(scene))
    return report


def _repaired(scene: Scene, found: Sequence[Issue], reason: str) -> Report:
    report = _applied(scene, found, reason)
    if report.journal is not None:
        report.scene = again(scene)
        report.issues = examine(report.scene)
    return report


def _applied(scene: Scene, found: Sequence[Issue], reason: str) -> Report:
    actions = planned(scene.tree, found)
    journal = apply(scene.tree, actions, reason)
    done = dict.fromkeys(issue.fix.summary for issue in found if issue.fix is not None)
    return Report(
        scene, found, list(done) if journal else [], None if journal is None else str(journal), found
    )


def again(scene: Scene) -> Scene:
    """Return the scene as it is on disk now."""
    target = scene.target
    root = target.root
    named = root / (target.checkpoint or "")
    path = str(named if target.named and named.exists() else root)
    found = find_target(path, None, str(scene.project_root))
    return replace(scene, target=found, claimed=set(), unchecked=[])


def fresh(scene: Scene) -> tuple[bytes, str]:
    """Return the state of the curriculum that `create_fresh` writes, and its stage in words.

    It is the one in the checkpoint's regress_state.json, else the one in its curriculum_state.json.

    Raises:
        DoctorError: if the checkpoint does not know its stage.
    """
    data = curriculum_of(scene)
    if data is None and content_fault(found := scene.object_of(CURRICULUM_STATE)) is None:
        data = text_of(found)
    if data is None:
        raise DoctorError(
            f"{scene.target.checkpoint or scene.target.root} holds no state of a curriculum, so its stage is unknown, "
            "and starting at the first would be a guess; give a checkpoint of a run with curriculum.enable=true"
        )
    state = parsed(data)
    name = state["stages"][state["current_stage"]].get("name")
    return data, f"stage {state['current_stage']} ({clean(str(name))}), that of {scene.target.checkpoint}"


def create_fresh(scene: Scene) -> Report:
    """Write the curriculum's state of the checkpoint beside the checkpoints, and examine.

    Raises:
        DoctorError: if the checkpoint does not know its stage.
    """
    data, stage = fresh(scene)
    journal = apply(scene.tree, [Write(CURRICULUM_STATE, data)], "create-fresh")
    done = [f"wrote {scene.target.root / CURRICULUM_STATE} at {stage}"]
    report = Report(scene, (), done if journal else [], None if journal is None else str(journal))
    report.scene = again(scene)
    report.issues = examine(report.scene)
    return report
