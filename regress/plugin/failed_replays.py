"""The last screen of a red session: failing replays in groups, each with its first divergence and its cause."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from regress.plugin.options import said
from regress.plugin.rows import FAILED, FailedRow, failed_row
from regress.plugin.state import SESSION
from regress.plugin.summary import SUMMARY
from regress.redaction import redacted

if TYPE_CHECKING:
    from regress.report.groups import Group

_IN_FULL = 2
"""Verbosity from which all failures are printed in full, as pytest prints long differences."""
_ANNOTATED = 10
"""Annotations of one kind that GitHub shows of a step."""


class FailedReplays:
    """Prints the groups behind pytest's own list of failing tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lines: dict[str, tuple[str, int]] = {}
        self._repetition = _Repetition()
        config.pluginmanager.register(self._repetition, "regress-repetition")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep where a failing test stands."""
        if report.failed:
            file, line, _ = report.location
            self._lines[report.nodeid] = (file, (line or 0) + 1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
        """Print the groups last: what stands above is a line for each test, which names no cause."""
        failed = [] if hasattr(self._config, "workerinput") else self._failed()
        if not failed:
            return (yield)
        groups = self._groups(failed)
        tests = [_test(failed, group) for group in groups]
        repeats = _repeats(failed, groups, tests) if self._config.get_verbosity() < _IN_FULL else set()
        self._repetition.leave_out(terminalreporter, repeats)
        yield
        self._tell(terminalreporter, failed, groups, tests)
        if repeats:
            from regress.report.numbers import plural

            count = plural(len(repeats), "failed test")
            terminalreporter.line(f"{count} repeat these; -vv prints each of them in full")
        return None

    def _failed(self) -> list[tuple[str, FailedRow]]:
        """Return the failing tests of golden cases."""
        properties = self._config.stash[SUMMARY].properties(FAILED)
        return [(nodeid, failed_row(text)) for nodeid, text in properties if nodeid in self._lines]

    def _groups(self, failed: list[tuple[str, FailedRow]]) -> list[Group]:
        from regress.replay.outcome import read_outcomes
        from regress.report.groups import grouped

        quantities = _quantities(failed)
        replays = self._config.stash[SESSION].replays
        outcomes = {} if replays is None else read_outcomes(replays, quantities)
        return grouped(
            quantities,
            {where: found.divergence for where, found in outcomes.items() if found.divergence is not None},
            {where: found.diagnoses for where, found in outcomes.items()},
            {where: found.error for where, found in outcomes.items() if found.error is not None},
        )

    def _tell(
        self,
        terminal: pytest.TerminalReporter,
        failed: list[tuple[str, FailedRow]],
        groups: list[Group],
        tests: list[str],
    ) -> None:
        from regress.printed import printable
        from regress.report.github import annotated, annotation
        from regress.report.groups import GROUPS
        from regress.report.numbers import plural

        terminal.section("golden replays")
        count = plural(len(failed), "failed test")
        terminal.line(
            f"{count} in {plural(len(_quantities(failed)), 'replay')}: {plural(len(groups), 'first divergence')}"
        )
        run = redacted(shlex.join(["pytest", *said(self._config)]))
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


class _Repetition:
    """Failures that pytest leaves out of its section of failures, and only of that."""

    def __init__(self) -> None:
        self._all: list[Any] | None = None

    def leave_out(self, terminal: pytest.TerminalReporter, tests: Container[str]) -> None:
        """Leave out tests from now until pytest has printed the section."""
        self._all = terminal.stats.get("failed", [])
        terminal.stats["failed"] = [report for report in self._all if report.nodeid not in tests]

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Bring them back; pytest has printed the section, and its list of failing tests comes after this."""
        if self._all is not None:
            terminalreporter.stats["failed"], self._all = self._all, None


def _quantities(failed: list[tuple[str, FailedRow]]) -> dict[str, list[str]]:
    """Return the quantities of the failing tests, by replay."""
    found: dict[str, list[str]] = {}
    for _, row in failed:
        found.setdefault(row.replay, []).append(row.quantity)
    return found


def _repeats(failed: list[tuple[str, FailedRow]], groups: list[Group], tests: list[str]) -> set[str]:
    """Return the ids of failing tests that add nothing to the first one of their group: what follows from it, or fails
    as another one does that is independent of it.
    """
    found: set[str] = set()
    for group, first in zip(groups, tests, strict=True):
        told: set[str] = set()
        for nodeid, row in failed:
            if row.replay not in group.replays or nodeid == first:
                continue
            if row.quantity in group.apart and row.quantity not in told:
                told.add(row.quantity)
            else:
                found.add(nodeid)
    return found


def _test(failed: list[tuple[str, FailedRow]], group: Group) -> str:
    """Return the id of the first failing test of a group: of the quantity that broke first, if one of that failed."""
    ids = {row.quantity: nodeid for nodeid, row in reversed(failed) if row.replay == group.replays[0]}
    wanted = "" if group.first is None else group.first.quantity
    return ids.get(wanted) or next(reversed(ids.values()))
