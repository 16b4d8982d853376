"""What a failing check says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from regress.compare.verdict import Verdict
from regress.report.text import explain, headline

if TYPE_CHECKING:
    from pathlib import Path

    from regress.golden.checks import StoredCheck


def explain_check(
    failed: Sequence[Verdict], test: str, environment: Sequence[str], *, of_golden: bool
) -> tuple[str, str]:
    """The first line and the details of a failing comparison: `of_golden`, or of two values of the test."""
    quoted = shlex.quote(test)
    commands = {"reproduce": f"pytest {quoted}"}
    if of_golden:
        commands["update"] = f"pytest --update-golden {quoted}"
    return headline(failed[0], test), explain(failed, where=test, environment=environment, commands=commands)


def environment_of(golden: StoredCheck, root: Path, golden_dir: Path) -> list[str]:
    """What of the environment can have changed the value since it became golden."""
    from regress.golden.provenance import differences
    from regress.plugin.updating import provenance

    return differences(golden.provenance, provenance(root, golden_dir))
