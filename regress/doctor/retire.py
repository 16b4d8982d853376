"""A checkpoint that cannot be repaired makes room for an earlier one, so that a resume from `latest` works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from regress.doctor.check_context import CheckContext
from regress.doctor.commit import intact
from regress.doctor.issue import Fix, Issue, Move, Severity
from regress.doctor.tree import Tree

GROUPS = ("files", "weights", "state")
TOO_NEW = "unsupported_schema"
"""A checkpoint of a later release is not broken."""


def retired(context: CheckContext, issues: Iterable[Issue]) -> list[Issue]:
    """Return the findings, with the repair of moving the checkpoint aside where nothing else helps.

    It is not moved where it was named, or where no other checkpoint of the run is complete and unchanged.
    """
    found = list(issues)
    checkpoint = context.target.checkpoint
    hopeless = [issue for issue in found if _hopeless(issue, checkpoint)]
    if checkpoint is None or not hopeless or any(issue.type == TOO_NEW for issue in found):
        return found
    other = next((name for name in context.target.others if intact(context.tree, name)), None)
    if other is None:
        return found
    if context.target.named:
        return [_advised(issue, other) if issue in hopeless else issue for issue in found]
    move = Move(checkpoint, free_name(context.tree, f"broken-{checkpoint}"))
    fix = Fix(f"move {checkpoint} to {move.to}, so that a resume takes {other}", (move,))
    prefix = f"{checkpoint}/"
    of_it = [issue in hopeless or str(issue.path).startswith(prefix) for issue in found]
    return [replace(issue, fix=fix) if own else issue for issue, own in zip(found, of_it, strict=True)]


def _hopeless(issue: Issue, checkpoint: str | None) -> bool:
    path = str(issue.path)
    inside = path == checkpoint or path.startswith(f"{checkpoint}/")
    return inside and issue.severity is Severity.HIGH and issue.group in GROUPS and issue.fix is None


def _advised(issue: Issue, other: str) -> Issue:
    return replace(issue, command=issue.command or f"trainer.resume_from_checkpoint={other}")


def free_name(tree: Tree, name: str) -> str:
    """Return a name that nothing has: this one, or this one with a number."""
    number, free = 2, name
    while tree.exists(free):
        number, free = number + 1, f"{name}-{number}"
    return free
