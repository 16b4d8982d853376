"""trainer_state.json: what users of Hugging Face's Trainer read. It is made again of what the checkpoint knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regress.doctor.check_context import CheckContext, whole
from regress.doctor.issue import Fix, Issue, Write, shown
from regress.doctor.saved import saved_config
from regress.doctor.tree import Missing, Unreadable, Unsafe
from regress.doctor.types import issue
from regress.dump.files import stamp_of
from regress.engine.checkpoint.names import TRAINER_STATE
from regress.engine.checkpoint.state import parse_state
from regress.engine.checkpoint.trainer_state import json_bytes, trainer_state
from regress.errors import RegressError

KEYS = ("global_step", "epoch", "max_steps", "log_history", "best_metric", "best_model_checkpoint")


def check_trainer_state(context: CheckContext) -> Iterator[Issue]:
    """Check that trainer_state.json is there, complete, and of the checkpoint's step."""
    if context.commit is None and not context.foreign:
        return
    path = context.target.file(TRAINER_STATE)
    try:
        content = context.tree.json(path)
    except Unreadable as error:
        context.claimed.add(path)
        type = "corrupted_checkpoint_file"
        if isinstance(error, Missing):
            type = "missing_checkpoint_file"
        elif isinstance(error, Unsafe):
            type = "unsafe_path"
        yield _finding(context, type, f"{path} {error}", {})
        return
    if not isinstance(content, dict):
        context.claimed.add(path)
        yield _finding(context, "trainer_state_read_error", f"{path} holds no JSON object", {})
        return
    missing = [key for key in KEYS if key not in content]
    if missing:
        context.claimed.add(path)
        yield _finding(
            context, "incomplete_trainer_state", f"{path} lacks {', '.join(missing)}", {"missing": missing}
        )
    if "global_step" in content:
        yield from _check_step(context, path, content)


def _check_step(context: CheckContext, path: str, content: Mapping[str, Any]) -> Iterator[Issue]:
    told = content["global_step"]
    known = whole(told)
    evidence = {"global_step": told, "update": context.update, "step": content.get("step")}
    if known is None or (known == 0 and context.update != 0):
        text = (
            f"{path} says global_step {shown(told)}, which no checkpoint of a run that has trained can have"
        )
    elif context.update is not None and known != context.update:
        text = f"{path} says global_step {known}, and regress_state.json counts {context.update} updates"
    elif context.step is not None and content.get("step", context.step) != context.step:
        text = (
            f"{path} says step {shown(content['step'])}, and regress_state.json counts {context.step} steps"
        )
    else:
        return
    context.claimed.add(path)
    yield _finding(context, "invalid_global_step", text, evidence)


def _finding(context: CheckContext, type: str, text: str, evidence: Mapping[str, Any]) -> Issue:
    path = context.target.file(TRAINER_STATE)
    fix = None
    remedy = "copy the checkpoint again"
    data = rebuilt(context)
    if data is not None:
        fix = Fix(f"make {path} again of regress_state.json", (Write(path, data, seal=True),))
        remedy = "it can be made again of regress_state.json"
    return issue(type, f"{text}; {remedy}", path=path, evidence=evidence, fix=fix)


def rebuilt(context: CheckContext) -> bytes | None:
    """Return trainer_state.json as the run wrote it, or None where its state cannot be read.

    The manifest tells whether the number of problems in an epoch, which no other file holds, was guessed well.
    """
    if context.commit is None or context.target.checkpoint is None or not context.state:
        return None
    try:
        state = parse_state(context.tree.root / context.target.checkpoint)
        config = saved_config(state.config)
        own = [] if config.task.dataset_path is not None else [config.task.train_size]
        guesses = [*_problems(context, config.data.prompts_per_step), *own, None]
        found = [json_bytes(trainer_state(config, state, problems)) for problems in guesses]
    except (RegressError, ValueError, TypeError, ArithmeticError):
        return None
    stamp = context.commit.files.get(TRAINER_STATE)
    return next((data for data in found if stamp_of(data) == stamp), found[0])


def _problems(context: CheckContext, prompts_per_step: int) -> Iterator[int]:
    """Return the problems in an epoch as other checkpoints of the run imply them."""
    for name in context.target.others:
        try:
            other = context.tree.object(f"{name}/{TRAINER_STATE}")
        except Unreadable:
            continue
        step, epoch = other.get("step"), other.get("epoch")
        if isinstance(step, int) and isinstance(epoch, float) and 0 < epoch < 1e9 and step > 0:
            yield max(1, round(step * prompts_per_step / epoch))
