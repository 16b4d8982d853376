"""The examination before every resume: it changes nothing, and stops what could only go wrong later."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Console

from regress.doctor.check_context import CheckContext, Next
from regress.doctor.examine import examine
from regress.doctor.issue import Issue, Severity
from regress.doctor.report import Report, show
from regress.doctor.target import find_target
from regress.engine.checkpoint.names import LATEST
from regress.engine.config.schema import Config
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
