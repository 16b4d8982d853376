"""The last screen of a red session: failing replays in groups, each with its first divergence and its cause."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from regress.plugin.options import said
from regress.plugin.rows import FAILED, FailedRow, failed_row
from regress.plugin.state import SESSION
from regress.plugin.summary import SUMMARY
from regress.redaction import redacted

if TYPE_CHECKING:
    from regress.report.groups import Group

_ANNOTATED = 10
"""Annotations of one kind that GitHub shows of a step."""


class FailedReplays:
    """Prints the groups behind pytest's own list of failing tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lines: dict[str, tuple[str, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep where a failing test stands."""
        if report.failed:
            file, line, _ = report.location
            self._lines[report.nodeid] = (file, (line or 0) + 1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Print the groups last: what stands above is a line for each test, which names no cause."""
        yield
        if hasattr(self._config, "workerinput"):
            return
        properties = self._config.stash[SUMMARY].properties(FAILED)
        failed = [(nodeid, failed_row(text)) for nodeid, text in properties if nodeid in self._lines]
        if failed:
            self._tell(terminalreporter, failed)

    def _tell(self, terminal: pytest.TerminalReporter, failed: list[tuple[str, FailedRow]]) -> None:
        from regress.printed import printable
        from regress.replay.outcome import read_outcomes
        from regress.report.github import annotated, annotation
        from regress.report.groups import GROUPS, grouped
        from regress.report.numbers import plural

        quantities: dict[str, list[str]] = {}
        for _, row in failed:
            quantities.setdefault(row.replay, []).append(row.quantity)
        replays = self._config.stash[SESSION].replays
        outcomes = {} if replays is None else read_outcomes(replays, quantities)
        groups = grouped(
            quantities,
            {where: found.divergence for where, found in outcomes.items() if found.divergence is not None},
            {where: found.diagnoses for where, found in outcomes.items()},
            {where: found.error for where, found in outcomes.items() if found.error is not None},
        )
        terminal.section("golden replays")
        count = plural(len(failed), "failed test")
        terminal.line(
            f"{count} in {plural(len(quantities), 'replay')}: {plural(len(groups), 'first divergence')}"
        )
        run = redacted(shlex.join(["pytest", *said(self._config)]))
        tests = [_test(failed, group) for group in groups]
        told = [
            [*group.lines("test", f"{run} {shlex.quote(test)}")]
            for group, test in zip(groups, tests, strict=True)
        ]
        for lines in told[:GROUPS]:
            for line in lines:
                terminal.line(printable(line))
        if len(groups) > GROUPS:
            terminal.line(f"and {len(groups) - GROUPS} more; --regress-report writes all of them")
        for (title, *rest), test in zip(told[:_ANNOTATED] if annotated() else (), tests, strict=False):
            terminal.line(annotation(*self._lines[test], title, "\n".join(rest)))


def _test(failed: list[tuple[str, FailedRow]], group: Group) -> str:
    """Return the id of the first failing test of a group: of the quantity that broke first, if one of that failed."""
    ids = {row.quantity: nodeid for nodeid, row in reversed(failed) if row.replay == group.replays[0]}
    wanted = "" if group.first is None else group.first.quantity
    return ids.get(wanted) or next(reversed(ids.values()))
