"""Report of an examination: for machines, for a terminal, and as an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from regress import __version__
from regress.doctor.check_context import CheckContext
from regress.doctor.doctor_finding import AUTOMATIC, Issue, Severity, clean

SCHEMA_VERSION = 1
CLEAN, FOUND = 0, 1
_STYLES = {Severity.HIGH: "bold red", Severity.MEDIUM: "yellow", Severity.LOW: "dim"}


@dataclass
class Report:
    """Findings of one run of the doctor.

    Attributes:
        context: what was examined.
        issues: findings, the worst first.
        applied: repairs that were made; None where none was asked for.
        journal: backup from which `--restore` brings the old files back.
    """

    context: CheckContext
    issues: Sequence[Issue]
    applied: Sequence[str] | None = None
    journal: str | None = None
    before: Sequence[Issue] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        """Return 1 if anything of medium or high severity was found and is left, else 0."""
        return FOUND if any(issue.severity is not Severity.LOW for issue in self.issues) else CLEAN

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        context = self.context
        checkpoint = context.target.checkpoint
        found: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "regress_version": __version__,
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "project_root": str(context.project_root),
            "output_dir": context.target.shown_root,
            "checkpoint_path": None if checkpoint is None else context.target.shown,
            "step": context.step,
            "update": context.update,
            "counts": counts(self.issues),
            "exit_code": self.exit_code,
            "issues": [issue.to_json() for issue in self.issues],
            "recommendations": recommendations(self.issues),
            "unchecked": list(context.unchecked),
        }
        if self.applied is not None:
            left = [issue for issue in self.issues if issue.severity is not Severity.LOW]
            found |= {
                "applied_fixes": list(self.applied),
                "failed_fixes": [issue.type for issue in left if issue.fix is not None],
                "manual_fixes_needed": [issue.message for issue in left if issue.fix is None],
                "journal": self.journal,
                "issues_before": [issue.to_json() for issue in self.before],
            }
        return found


def counts(issues: Sequence[Issue]) -> dict[str, int]:
    """Return the number of findings of each severity."""
    return {str(kind): sum(issue.severity is kind for issue in issues) for kind in reversed(Severity)}


def recommendations(issues: Sequence[Issue]) -> list[str]:
    """Return what to type, the worst finding first, each once."""
    commands = [issue.command or (AUTOMATIC if issue.fix is not None else None) for issue in issues]
    return list(dict.fromkeys(command for command in commands if command is not None))


def show(report: Report, console: Console, *, plan: bool = True, detail: bool = False) -> None:
    """Print a report for people.

    Args:
        plan: say what a repair would do.
        detail: print what proves each finding, too.
    """
    context = report.context
    step = "" if context.step is None else f" (step {context.step}, update {context.update})"
    console.print(Text(clean(f"examined {context.target.shown}", 400) + step))
    if report.applied is not None:
        _show_applied(report, console)
    if report.issues:
        console.print(_table(report.issues, plan=plan, detail=detail))
    for sentence in context.unchecked:
        console.print(Text(f"not checked: {sentence}", style="dim"))
    console.print(Text(summary(report)))


def _show_applied(report: Report, console: Console) -> None:
    for sentence in report.applied or ():
        console.print(Text(f"done: {sentence}"))
    if report.journal is not None:
        console.print(
            Text(f"the old files are in {report.journal}; regress doctor --restore brings them back")
        )
    elif not report.applied:
        console.print(Text("nothing to repair"))


def summary(report: Report) -> str:
    """Return the last line of a report."""
    if not report.issues:
        return "nothing found"
    totals = ", ".join(f"{number} {kind}" for kind, number in counts(report.issues).items() if number)
    automatic = sum(issue.fix is not None for issue in report.issues)
    more = f"; {automatic} can be repaired with --auto-fix" if automatic and report.applied is None else ""
    return f"found: {totals}{more}"


def _table(issues: Sequence[Issue], *, plan: bool, detail: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for issue in issues:
        table.add_row(Text(str(issue.severity), style=_STYLES[issue.severity]), _cell(issue, plan, detail))
    return table


def _cell(issue: Issue, plan: bool, detail: bool) -> RenderableType:
    parts: list[RenderableType] = [Text(issue.type, style="bold"), Text(issue.message)]
    if detail and issue.evidence:
        evidence = _evidence(issue.to_json()["evidence"])
        parts.append(Padding(Text("\n".join(evidence), style="dim"), (0, 0, 0, 2)))
    if plan and issue.fix is not None:
        parts.append(Text(f"repair: {issue.fix.summary}", style="green"))
    elif plan and issue.command is not None:
        parts.append(Text(f"to type: {issue.command}", style="green"))
    return Group(*parts)


def _evidence(evidence: Mapping[str, Any]) -> list[str]:
    return [f"{clean(str(name))}: {clean(str(value), 300)}" for name, value in evidence.items()]
