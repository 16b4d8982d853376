"""State of trackers: run id and step against the checkpoint, the caller's WANDB_* variables, logins, backups.

And the lines of ``metrics.jsonl``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import Any

from regress.doctor.check_context import CheckContext, unsafe, whole
from regress.doctor.doctor_finding import Fix, Issue, Store, Write, issue, shown
from regress.doctor.safe_tree import Unreadable, Unsafe, parsed
from regress.dump.metrics_file import METRICS
from regress.engine.tracking.tracker_backup import FOLDER
from regress.engine.tracking.tracker_login import has_wandb_login
from regress.engine.tracking.tracker_state import STATE as TRACKING
from regress.optional_packages import install

LINE_LIMIT = 4 * 2**20
"""Bytes of the longest line that is parsed."""
REPAIR_LIMIT = 2**28
"""Bytes of the largest file that is repaired automatically."""


def check_metrics(context: CheckContext) -> Iterator[Issue]:
    """Check each line of the records beside the checkpoints."""
    for name in (METRICS, "eval_samples.jsonl"):
        if context.tree.exists(name):
            yield from _check(context, name)


def _check(context: CheckContext, name: str) -> Iterator[Issue]:
    bad: list[int] = []
    count, torn = 0, False
    try:
        with context.tree.opened(name) as file:
            while line := file.readline(LINE_LIMIT):
                count += 1
                ended = line.endswith(b"\n") or _skip(file)
                if line.strip() and not _is_row(line):
                    bad += [count] if ended else []
                    torn = not ended
    except Unsafe as error:
        yield unsafe(context, name, error)
        return
    except Unreadable as error:
        yield issue("corrupted_metrics", f"{name} {error}; move it away, a resume starts another", path=name)
        return
    if bad:
        yield _corrupted(context, name, bad)
    elif torn:
        yield _torn(context, name, count)


def _skip(file: BufferedReader) -> bool:
    """Read to the end of a line that is too long to be a row; False if the file ends before."""
    while part := file.readline(LINE_LIMIT):
        if part.endswith(b"\n"):
            return True
    return False


def _is_row(line: bytes) -> bool:
    """Return True for what `regress.dump.metrics_file` reads as a row."""
    try:
        row = parsed(line)
    except Unreadable:
        return False
    return isinstance(row, dict) and isinstance(row.get("step"), int)


def _torn(context: CheckContext, name: str, line: int) -> Issue:
    return issue(
        "torn_metrics",
        f"{name}: line {line}, the last, is cut off, as a kill leaves it; readers drop it, and so does a repair",
        path=name,
        evidence={"line": line},
        fix=_kept(context, name, f"drop the cut off line {line} of {name}"),
    )


def _corrupted(context: CheckContext, name: str, bad: list[int]) -> Issue:
    several = f"{len(bad)} lines that are not rows" if len(bad) > 1 else "a line that is not a row"
    return issue(
        "corrupted_metrics",
        f"{name} holds {several} of metrics, first line {bad[0]}, which no kill explains and no reader accepts; "
        "a repair drops what is none and keeps the old file in its backup",
        path=name,
        evidence={"lines": bad[:50]},
        fix=_kept(context, name, f"drop what is not a row of {name} ({len(bad)} of its lines)"),
    )


def _kept(context: CheckContext, name: str, summary: str) -> Fix | None:
    """Return the repair that keeps the lines which are rows."""
    try:
        data = context.tree.read(name, REPAIR_LIMIT)
    except Unreadable:
        return None
    *lines, last = data.split(b"\n")
    rows = [line + b"\n" for line in lines if not line.strip() or _is_row(line)]
    rows += [last] if _is_row(last) else []
    return Fix(summary, (Write(name, b"".join(rows)),))


OF_RUN = ("WANDB_RUN_ID", "WANDB_RESUME")
"""Variables that tie a process to one run of wandb; a shell keeps them after the run."""


def check_tracking(context: CheckContext) -> Iterator[Issue]:
    """Check the state of trackers beside the checkpoints against the checkpoint's."""
    state: Mapping[str, Any] = {}
    if context.tree.exists(TRACKING):
        try:
            state = context.tree.object(TRACKING)
            if not isinstance(state.get("trackers"), dict):
                raise Unreadable("tells of no trackers")
        except Unreadable as error:
            state = {}
            yield unsafe(context, TRACKING, error) if isinstance(error, Unsafe) else _damaged(error)
    yield from _check_step(context, state)
    yield from _check_run_id(context, state)
    waiting = [name for name in context.tree.names(FOLDER) if name.endswith(".json")]
    if waiting:
        yield issue(
            "unsent_backups",
            f"{FOLDER} holds {len(waiting)} steps that a tracker did not take; send them with "
            "regress track replay",
            path=FOLDER,
            evidence={"first": waiting[0], "last": waiting[-1], "files": len(waiting)},
        )


def _damaged(error: Unreadable) -> Issue:
    return issue(
        "corrupted_tracking_state",
        f"{TRACKING} {error}, so rows that trackers had not taken are not sent again; a repair moves it away, and the "
        "next run writes another (regress track replay sends metrics.jsonl anew)",
        path=TRACKING,
        fix=Fix(f"move {TRACKING} into a backup", (Store(TRACKING),)),
    )


def tracked_step(state: Mapping[str, Any]) -> int | None:
    """Return the last step that trackers were given, by a state of tracking."""
    return whole(state.get("step"))


def _check_step(context: CheckContext, state: Mapping[str, Any]) -> Iterator[Issue]:
    tracker, trainer = tracked_step(state), context.step
    if trainer is None:
        trainer = whole(context.trainer_state.get("global_step"))
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


def _check_run_id(context: CheckContext, state: Mapping[str, Any]) -> Iterator[Issue]:
    kept = run_id(context.part("tracking"))
    newest = run_id(state)
    if kept is not None and newest is not None and kept != newest:
        yield issue(
            "tracking_run_mismatch",
            f"{TRACKING} names the run {shown(newest)} and {context.target.checkpoint} was tracked as {shown(kept)}; "
            f"say which one continues with tracking.run_id={kept}",
            path=TRACKING,
            evidence={"checkpoint": kept, "newest": newest},
        )


def run_id(state: Mapping[str, Any]) -> str | None:
    """Return the id of the tracked run, by a state of tracking."""
    found = state.get("run_id")
    return found if isinstance(found, str) and found else None


def check_variables(context: CheckContext) -> Iterator[Issue]:
    """Check whether variables of the caller's shell tie the next run to another run of a tracker."""
    variables = {name: context.environ[name] for name in OF_RUN if context.environ.get(name)}
    kept = run_id(context.part("tracking"))
    if not variables or _harmless(variables, kept) or _overruled(context):
        return
    named = ", ".join(f"{name}={shown(value)}" for name, value in variables.items())
    known = "which run it continues is unknown" if kept is None else f"the checkpoint was tracked as {kept!r}"
    yield issue(
        "stale_tracker_environment",
        f"{named} is set in this shell, and {known}, so points would go to another run; "
        f"{unset_line(variables)} (regress doctor --shell prints it)",
        evidence={**variables, "checkpoint_run_id": kept},
        command=unset_line(variables),
    )


def _harmless(variables: Mapping[str, str], kept: str | None) -> bool:
    """Return True for variables that lead to the run of the checkpoint."""
    mode = variables.get("WANDB_RESUME", "allow").lower()
    return kept is not None and variables.get("WANDB_RUN_ID", kept) == kept and mode != "never"


def _overruled(context: CheckContext) -> bool:
    """Return True if the configuration names the run, which counts more than variables."""
    config = context.next.config
    return config is not None and (config.tracking.force_new_run or config.tracking.run_id is not None)


def unset_line(names: Mapping[str, str]) -> str:
    """Return the line of a shell that removes variables."""
    return f"unset {' '.join(names)}"


def check_wandb(context: CheckContext) -> Iterator[Issue]:
    """Check that wandb can be used where the run asks for it."""
    if not _wants_wandb(context):
        return
    if find_spec("wandb") is None:
        yield issue(
            "wandb_not_installed",
            f"tracking.trackers asks for wandb, which is not installed; run {install('wandb')}, or name another",
        )
        return
    if not has_wandb_login(context.environ):
        yield issue(
            "wandb_no_credentials",
            "tracking.trackers asks for wandb, and neither WANDB_API_KEY nor ~/.netrc holds a login; run wandb login, "
            "or set WANDB_MODE=offline",
            command="wandb login",
        )
    if context.step and not _earlier_runs(context):
        yield issue(
            "no_wandb_runs",
            f"no wandb/run-* or wandb/offline-run-* lies below {context.target.root}, so points of earlier segments "
            "are on the server or in metrics.jsonl only; nothing has to be done",
        )


def _wants_wandb(context: CheckContext) -> bool:
    if context.next.config is not None:
        return "wandb" in (context.next.config.tracking.trackers or [])
    return "wandb" in str(context.saved.get("tracking.trackers", ""))


def _earlier_runs(context: CheckContext) -> bool:
    places = [
        context.target.root,
        context.project_root,
        Path(context.environ.get("WANDB_DIR") or context.target.root),
    ]
    return any(
        next(place.glob(f"wandb/{kind}-*"), None) for place in places for kind in ("run", "offline-run")
    )
