"""Files beside the checkpoints that are no ordinary ones."""

from __future__ import annotations

from dataclasses import replace

from regress.doctor.check_context import CheckContext
from regress.doctor.issue import Issue, Severity, clean
from regress.doctor.tree import Unsafe
from regress.doctor.types import issue


def unsafe(context: CheckContext, name: str, error: Unsafe) -> Issue:
    """Return the finding for a file of the run; a run can go on with a link, but not with a pipe."""
    found = issue(
        "unsafe_path",
        f"{clean(name)} {error}, so it is not read here; put the file itself there, or move it away",
        path=name,
    )
    link = (context.tree.root / name).is_symlink()
    return replace(found, severity=Severity.MEDIUM) if link else found
