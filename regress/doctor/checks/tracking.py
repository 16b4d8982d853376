"""State of trackers: run id and step against the checkpoint, the caller's WANDB_* variables, logins, backups."""

from __future__ import annotations

import json
import netrc
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from regress.doctor.issue import Fix, Issue, Write, shown
from regress.doctor.scene import TRACKING, Scene, whole
from regress.doctor.tree import Unreadable, Unsafe
from regress.doctor.types import issue

OF_RUN = ("WANDB_RUN_ID", "WANDB_RESUME")
"""Variables that tie a process to one run of wandb; a shell keeps them after the run."""
OFFLINE = ("offline", "disabled", "dryrun")


def check_tracking(scene: Scene) -> Iterator[Issue]:
    """Check the state of trackers beside the checkpoints against the checkpoint's."""
    state: Mapping[str, Any] = {}
    if scene.tree.exists(TRACKING):
        try:
            state = scene.tree.object(TRACKING)
        except Unreadable as error:
            yield _damaged(scene, error)
    yield from _check_step(scene, state)
    yield from _check_run_id(scene, state)
    waiting = [name for name in scene.tree.names("wandb_backup") if name.endswith(".json")]
    if waiting:
        yield issue(
            "unsent_backups",
            f"wandb_backup holds {len(waiting)} steps that a tracker did not take; send them with "
            "regress track replay",
            path="wandb_backup",
            evidence={"first": waiting[0], "last": waiting[-1], "files": len(waiting)},
        )


def _damaged(scene: Scene, error: Unreadable) -> Issue:
    fix = None
    remedy = "delete it, a resume writes another"
    kept = scene.part("tracking")
    if kept:
        data = (json.dumps(dict(kept), indent=1) + "\n").encode()
        fix = Fix(f"write the state of {scene.target.checkpoint} to {TRACKING}", (Write(TRACKING, data),))
        remedy = "it can be made again of the checkpoint"
    type = "unsafe_path" if isinstance(error, Unsafe) else "corrupted_tracking_state"
    return issue(type, f"{TRACKING} {error}; {remedy}", path=TRACKING, fix=fix)


def tracked_step(state: Mapping[str, Any]) -> int | None:
    """Return the last step that trackers were given, by a state of tracking."""
    return whole(state.get("step"))


def _check_step(scene: Scene, state: Mapping[str, Any]) -> Iterator[Issue]:
    tracker, trainer = tracked_step(state), scene.step
    if trainer is None:
        trainer = whole(scene.trainer_state.get("global_step"))
    if tracker is None or trainer is None or tracker <= trainer:
        return
    offset = tracker - trainer
    yield issue(
        "tracking_step_offset",
        f"WandB={tracker}, Trainer={trainer}, offset {offset}: the run went on for {offset} steps after this "
        "checkpoint; nothing has to be done, a resume starts a new segment and each step counts once",
        path=TRACKING,
        evidence={"tracker_step": tracker, "trainer_step": trainer, "offset": offset},
    )


def _check_run_id(scene: Scene, state: Mapping[str, Any]) -> Iterator[Issue]:
    kept = run_id(scene.part("tracking"))
    newest = run_id(state)
    if kept is not None and newest is not None and kept != newest:
        yield issue(
            "tracking_run_mismatch",
            f"{TRACKING} names the run {shown(newest)} and {scene.target.checkpoint} was tracked as {shown(kept)}; "
            f"say which one continues with tracking.run_id={kept}",
            path=TRACKING,
            evidence={"checkpoint": kept, "newest": newest},
        )


def run_id(state: Mapping[str, Any]) -> str | None:
    """Return the id of the tracked run, by a state of tracking."""
    found = state.get("run_id")
    return found if isinstance(found, str) and found else None


def check_variables(scene: Scene) -> Iterator[Issue]:
    """Check whether variables of the caller's shell tie the next run to another run of a tracker."""
    told = {name: scene.environ[name] for name in OF_RUN if scene.environ.get(name)}
    kept = run_id(scene.part("tracking"))
    if not told or (kept is not None and told.get("WANDB_RUN_ID") == kept):
        return
    named = ", ".join(f"{name}={shown(value)}" for name, value in told.items())
    known = "which run it continues is unknown" if kept is None else f"the checkpoint was tracked as {kept!r}"
    yield issue(
        "stale_tracker_environment",
        f"{named} is set in this shell, and {known}, so points would go to another run; "
        f"{unset_line(told)} (regress doctor --shell prints it)",
        evidence={**told, "checkpoint_run_id": kept},
        command=unset_line(told),
    )


def unset_line(names: Mapping[str, str]) -> str:
    """Return the line of a shell that removes variables."""
    return f"unset {' '.join(names)}"


def check_wandb(scene: Scene) -> Iterator[Issue]:
    """Check that wandb can be used where the run asks for it."""
    if not _wants_wandb(scene):
        return
    if find_spec("wandb") is None:
        yield issue(
            "wandb_not_installed",
            "tracking.trackers asks for wandb, which is not installed; run pip install 'grpo-regress[wandb]', or name "
            "another tracker",
        )
        return
    if scene.environ.get("WANDB_MODE", "online") in OFFLINE:
        return
    if not _logged_in(scene):
        yield issue(
            "wandb_no_credentials",
            "tracking.trackers asks for wandb, and neither WANDB_API_KEY nor ~/.netrc holds a login; run wandb login, "
            "or set WANDB_MODE=offline",
            command="wandb login",
        )
    if scene.step and not _earlier_runs(scene):
        yield issue(
            "no_wandb_runs",
            f"no wandb/run-* or wandb/offline-run-* lies below {scene.target.root}, so points of earlier segments are "
            "on the server or in metrics.jsonl only; nothing has to be done",
        )


def _wants_wandb(scene: Scene) -> bool:
    if scene.next.config is not None:
        return "wandb" in (scene.next.config.tracking.trackers or [])
    return "wandb" in str(scene.saved.get("tracking.trackers", ""))


def _logged_in(scene: Scene) -> bool:
    if scene.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(scene.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or "api.wandb.ai"
    home = Path(scene.environ.get("NETRC") or Path(scene.environ.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return netrc.netrc(str(home)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False


def _earlier_runs(scene: Scene) -> bool:
    places = [
        scene.target.root,
        scene.project_root,
        Path(scene.environ.get("WANDB_DIR") or scene.target.root),
    ]
    return any(
        next(place.glob(f"wandb/{kind}-*"), None) for place in places for kind in ("run", "offline-run")
    )
