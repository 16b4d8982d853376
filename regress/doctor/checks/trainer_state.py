"""trainer_state.json: what users of Hugging Face's Trainer read. It is made again of what the checkpoint knows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from regress.doctor.issue import Fix, Issue, Write, shown
from regress.doctor.scene import TRAINER_STATE, Scene, whole
from regress.doctor.tree import Missing, Unreadable, Unsafe
from regress.doctor.types import issue

KEYS = ("global_step", "epoch", "max_steps", "log_history", "best_metric", "best_model_checkpoint")


def check_trainer_state(scene: Scene) -> Iterator[Issue]:
    """Check that trainer_state.json is there, complete, and of the checkpoint's step."""
    if scene.commit is None and not scene.foreign:
        return
    path = scene.target.file(TRAINER_STATE)
    try:
        content = scene.tree.json(path)
    except Unreadable as error:
        scene.claimed.add(path)
        type = "corrupted_checkpoint_file"
        if isinstance(error, Missing):
            type = "missing_checkpoint_file"
        elif isinstance(error, Unsafe):
            type = "unsafe_path"
        yield _finding(scene, type, f"{path} {error}", {})
        return
    if not isinstance(content, dict):
        scene.claimed.add(path)
        yield _finding(scene, "trainer_state_read_error", f"{path} holds no JSON object", {})
        return
    missing = [key for key in KEYS if key not in content]
    if missing:
        scene.claimed.add(path)
        yield _finding(
            scene, "incomplete_trainer_state", f"{path} lacks {', '.join(missing)}", {"missing": missing}
        )
    if "global_step" in content:
        yield from _check_step(scene, path, content)


def _check_step(scene: Scene, path: str, content: Mapping[str, Any]) -> Iterator[Issue]:
    told = content["global_step"]
    known = whole(told)
    evidence = {"global_step": told, "update": scene.update, "step": content.get("step")}
    if known is None or (known == 0 and scene.update != 0):
        text = (
            f"{path} says global_step {shown(told)}, which no checkpoint of a run that has trained can have"
        )
    elif scene.update is not None and known != scene.update:
        text = f"{path} says global_step {known}, and regress_state.json counts {scene.update} updates"
    elif scene.step is not None and content.get("step", scene.step) != scene.step:
        text = f"{path} says step {shown(content['step'])}, and regress_state.json counts {scene.step} steps"
    else:
        return
    scene.claimed.add(path)
    yield _finding(scene, "invalid_global_step", text, evidence)


def _finding(scene: Scene, type: str, text: str, evidence: Mapping[str, Any]) -> Issue:
    path = scene.target.file(TRAINER_STATE)
    fix = None
    remedy = "copy the checkpoint again"
    if scene.step is not None and scene.update is not None and scene.commit is not None:
        data = rebuilt(scene)
        fix = Fix(f"make {path} again of regress_state.json", (Write(path, data, seal=True),))
        remedy = "it can be made again of regress_state.json"
    return issue(type, f"{text}; {remedy}", path=path, evidence=evidence, fix=fix)


def rebuilt(scene: Scene) -> bytes:
    """Return a trainer_state.json of what is certain; what can still be read of the old one is kept."""
    old = scene.trainer_state
    per_step = _updates_per_step(scene)
    limit = whole(scene.saved.get("max_steps"))
    tree: dict[str, Any] = {
        "best_metric": None,
        "best_model_checkpoint": None,
        "epoch": float(scene.step or 0),
        "log_history": [],
        "max_steps": None if limit is None or per_step is None else limit * per_step,
        "save_steps": scene.saved.get("trainer.save_steps"),
        **old,
        "global_step": scene.update,
        "step": scene.step,
    }
    if not isinstance(tree["log_history"], list):
        tree["log_history"] = []
    return (json.dumps(tree, sort_keys=True, indent=2) + "\n").encode()


def _updates_per_step(scene: Scene) -> int | None:
    within = whole(scene.state.get("updates_in_step", 0))
    done = None if scene.update is None or within is None else scene.update - within
    if not done or not scene.step or done % scene.step:
        return None
    return done // scene.step
