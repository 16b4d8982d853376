"""Message of a failing check."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from regress.compare.verdicts.verdict import Verdict
from regress.report.verdict_entries import link
from regress.report.verdict_text import explain, headline


def explain_check(
    failed: Sequence[Verdict],
    test: str,
    environment: Sequence[str],
    *,
    of_golden: bool,
    report: Path | None = None,
) -> tuple[str, str]:
    """Return the first line and the details of a failing comparison: `of_golden`, or of two values of the test.

    Args:
        report: folder of the report of the session.
    """
    quoted = shlex.quote(test)
    commands = {"reproduce": f"pytest {quoted}"}
    if of_golden:
        commands["update"] = f"pytest --update-golden {quoted}"
    if report is not None:
        commands["report"] = link(report, test, failed[0])
    return headline(failed[0], test), explain(failed, where=test, environment=environment, commands=commands)
