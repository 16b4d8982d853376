"""curriculum_state.json, in the checkpoint and beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regress.doctor.check_context import CheckContext, whole
from regress.doctor.doctor_finding import Fix, Issue, Severity, Write, clean, issue, shown
from regress.doctor.file_restore import restored
from regress.doctor.safe_tree import Missing, Unreadable, Unsafe
from regress.dump.metrics_file import METRICS
from regress.engine.checkpoint.checkpoint_names import CURRICULUM_STATE
from regress.engine.checkpoint.trainer_state import json_bytes

FIELDS = (
    *("current_stage", "current_round", "stage_start_step", "stage_count", "stages"),
    *("performance_history", "stage_advancement_log", "last_update_step", "schema_version"),
)
STAGE_FIELDS = ("name", "dataset_levels", "complexity_range", "performance_threshold")


def check_curriculum(context: CheckContext) -> Iterator[Issue]:
    """Check the state of the curriculum: the checkpoint's, which a resume reads, and the newest one."""
    inside = (
        None
        if context.target.checkpoint is None or context.foreign
        else context.target.file(CURRICULUM_STATE)
    )
    if inside is not None and context.commit is not None and context.has(CURRICULUM_STATE):
        yield from _check_file(context, inside, within=True)
    if context.tree.exists(CURRICULUM_STATE):
        yield from _check_file(context, CURRICULUM_STATE, within=False)
    yield from _check_logs(context)


def _check_file(context: CheckContext, path: str, *, within: bool) -> Iterator[Issue]:
    try:
        state = context.tree.object(path)
    except Unreadable as error:
        context.claimed.add(path)
        type = "unsafe_path" if isinstance(error, Unsafe) else "corrupted_curriculum_state"
        if isinstance(error, Missing):
            type = "missing_checkpoint_file"
        yield _finding(context, type, f"{path} {error}", path)
        return
    fault = content_fault(state) or (_step_fault if within else _run_fault)(context, state)
    if fault is not None:
        context.claimed.add(path)
        yield _finding(context, fault.type, f"{path} {fault.text}", path, **fault.evidence)


@dataclass(frozen=True)
class Fault:
    """Yield each defect of a state: type of the finding, the rest of a sentence, and what proves it."""

    type: str
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


def content_fault(state: Mapping[str, Any]) -> Fault | None:
    """Return the first thing that is wrong with the content of a curriculum's state, or None."""
    missing = [name for name in FIELDS if name not in state]
    if missing:
        return Fault("missing_field", f"lacks {', '.join(missing)}", {"missing": missing})
    stages = state["stages"]
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        return Fault("invalid_stage_format", "describes stages that are no JSON objects")
    for index, stage in enumerate(stages):
        lacks = [name for name in STAGE_FIELDS if name not in stage]
        if lacks:
            text = f"describes stage {index} without {', '.join(lacks)}"
            return Fault("incomplete_stage_config", text, {"stage": index, "missing": lacks})
    current = whole(state["current_stage"])
    if current is None or current >= len(stages) or state["stage_count"] != len(stages):
        position = f"stage {shown(state['current_stage'])} of {shown(state['stage_count'])}"
        return Fault("invalid_stage_format", f"says {position} and describes {len(stages)} stages")
    return None


def _step_fault(context: CheckContext, state: Mapping[str, Any]) -> Fault | None:
    """Compare the state in the checkpoint with the checkpoint: it is written at evaluations, never after it."""
    updated, step = state.get("last_update_step"), context.step
    known = whole(updated)
    recorded = whole(context.part("curriculum").get("last_update_step"))
    if step is None or updated is None or (known is not None and known <= step and recorded in (None, known)):
        return None
    text = f"was last updated at step {shown(updated)}, and its checkpoint was made after {step} steps"
    if known is not None and known <= step:
        text = f"was last updated at step {known}, and regress_state.json says step {recorded}"
    return Fault(
        "step_mismatch", text, {"last_update_step": updated, "step": step, "recorded_step": recorded}
    )


def _run_fault(context: CheckContext, state: Mapping[str, Any]) -> Fault | None:
    """Compare the run's own state with the checkpoint's: a run knows all that its newest checkpoint knows."""
    saved = context.part("curriculum")
    if not saved or content_fault(saved) is not None:
        return None
    updated, known = (whole(each["last_update_step"]) for each in (state, saved))
    evidence = {"last_update_step": state["last_update_step"], "recorded_step": saved["last_update_step"]}
    name = context.target.checkpoint
    if known is None or updated is None or updated < known:
        text = f"was last updated at step {shown(updated)}, and {name} holds the state of step {shown(known)}"
        return Fault("step_mismatch", text, evidence)
    if not all(
        _agree(state[key], saved[key], known) for key in ("performance_history", "stage_advancement_log")
    ):
        text = f"tells of other evaluations or stages than {name}, so another run wrote it"
        return Fault("curriculum_mismatch", text, evidence)
    moved = state["stage_advancement_log"] != saved["stage_advancement_log"]
    if not moved and _place(state) != _place(saved):
        text = f"is at {_place(state)}, and {name} at {_place(saved)} after the same evaluations"
        return Fault("curriculum_mismatch", text, evidence)
    return None


def _agree(own: Any, saved: Any, known: int) -> bool:
    """Return True if two lists of what happened at which step are the same from the first own entry to ``known``."""
    if not isinstance(own, list) or not isinstance(saved, list) or not own:
        return bool(own == saved)
    try:
        first = own[0]["step"]
        earlier = [entry for entry in own if entry["step"] <= known]
        return bool(earlier == [entry for entry in saved if entry["step"] >= first])
    except (TypeError, KeyError, IndexError):
        return False


def _place(state: Mapping[str, Any]) -> str:
    """Return the place of a sound state in its curriculum; stages may have been renumbered, but keep their names."""
    stage = shown(state["stages"][int(state["current_stage"])]["name"])
    return (
        f"stage {stage}, round {shown(state['current_round'])}, since step {shown(state['stage_start_step'])}"
    )


def _finding(context: CheckContext, type: str, text: str, path: str, **evidence: Any) -> Issue:
    fix = restored(context, path) or _from_checkpoint(context, path)
    remedy = "it can be made again of the checkpoint"
    if fix is None:
        remedy = "regress doctor --create-fresh makes one at the first stage"
    found = issue(type, f"{clean(text, 300)}; {remedy}", path=path, evidence=evidence, fix=fix)
    if path == CURRICULUM_STATE:  # a resume reads the checkpoint's
        return replace(found, severity=Severity.MEDIUM)
    return found


def _from_checkpoint(context: CheckContext, path: str) -> Fix | None:
    """Return the repair that writes the state which the checkpoint carries in regress_state.json."""
    data = curriculum_of(context)
    if data is None:
        return None
    inside = path != CURRICULUM_STATE
    return Fix(f"write the state of {context.target.checkpoint} to {path}", (Write(path, data, seal=inside),))


def curriculum_of(context: CheckContext) -> bytes | None:
    """Return the curriculum's state at the checkpoint as a file, or None where it has none that is sound."""
    state = context.part("curriculum")
    if not state:
        return None
    return None if content_fault(state) is not None else text_of(state)


def text_of(state: Mapping[str, Any]) -> bytes:
    """Return the text of a curriculum's state, as the curriculum writes it."""
    return json_bytes(dict(state))


def _check_logs(context: CheckContext) -> Iterator[Issue]:
    if not context.part("curriculum") or not context.tree.is_file(METRICS):
        return
    evaluated = False
    try:
        with context.tree.opened(METRICS) as file:
            for line in file:
                evaluated |= b'"eval_' in line
                if b'"curriculum/' in line:
                    return
    except Unreadable:
        return
    if evaluated:
        yield issue(
            "no_curriculum_logs",
            f"{METRICS} tells of evaluations and nothing of the curriculum, although one is on; nothing has to be "
            "done, its state is in the checkpoint",
            path=METRICS,
        )
