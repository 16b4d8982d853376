"""The last screen of a red session: failing replays in groups, each with its first divergence and its cause."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from regress.plugin.pytest_options import reproduce
from regress.plugin.session_state import SESSION
from regress.plugin.update_summary import SUMMARY
from regress.plugin.worker_rows import FAILED, failed_row

if TYPE_CHECKING:
    from regress.report.failure_groups import Group

_IN_FULL = 2
"""Verbosity from which all failures are printed in full, as pytest prints long differences."""
_ANNOTATED = 10
"""Annotations of one kind that GitHub shows of a step."""


class Failure(NamedTuple):
    """A failing quantity of a test; ``selector`` is what ``-k`` selects it by."""

    test: str
    replay: str
    selector: str

    @property
    def name(self) -> str:
        """Name of its subtest."""
        return self.selector.removeprefix("/").removesuffix("]")

    @property
    def quantity(self) -> str:
        """Quantity alone, without its place."""
        return self.name.rpartition("/")[2]


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
        firsts = [_first(failed, group) for group in groups]
        repeats: set[Failure] = set()
        if self._config.get_verbosity() < _IN_FULL:
            repeats = _repeats(failed, groups, firsts)
            self._repetition.leave_out(terminalreporter, failed, repeats)
        yield
        self._tell(terminalreporter, failed, groups, firsts)
        if repeats:
            from regress.report.number_format import plural

            count = plural(len(repeats), "failed quantity")
            terminalreporter.line(f"{count} repeat these; -vv prints each of them in full")
        return None

    def _failed(self) -> list[Failure]:
        """Return the failing quantities of tests of golden cases."""
        properties = self._config.stash[SUMMARY].properties(FAILED)
        rows = [(test, failed_row(text)) for test, text in properties if test in self._lines]
        return [Failure(test, row.replay, selector) for test, row in rows for selector in row.quantities]

    def _groups(self, failed: list[Failure]) -> list[Group]:
        from regress.replay.replay_outcome import read_outcomes
        from regress.report.failure_groups import grouped

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
        failed: list[Failure],
        groups: list[Group],
        firsts: list[Failure],
    ) -> None:
        from regress.printable_text import printable
        from regress.report.failure_groups import GROUPS
        from regress.report.github_summary import annotated, annotation
        from regress.report.number_format import plural

        terminal.section("golden replays")
        count = plural(len(failed), "failed quantity")
        terminal.line(
            f"{count} in {plural(len(_quantities(failed)), 'replay')}: {plural(len(groups), 'first divergence')}"
        )
        texts = [
            [*group.lines("quantity", reproduce(self._config, first.test, first.selector))]
            for group, first in zip(groups, firsts, strict=True)
        ]
        for lines in texts[:GROUPS]:
            for line in lines:
                terminal.line(printable(line))
        if len(groups) > GROUPS:
            terminal.line(f"and {len(groups) - GROUPS} more; --regress-report writes all of them")
        for (title, *rest), first in zip(texts[:_ANNOTATED] if annotated() else (), firsts, strict=False):
            terminal.line(annotation(*self._lines[first.test], title, "\n".join(rest)))


class _Repetition:
    """Failures that pytest leaves out of its section of failures, and only of that."""

    def __init__(self) -> None:
        self._all: list[Any] | None = None

    def leave_out(
        self, terminal: pytest.TerminalReporter, failed: Collection[Failure], repeats: Collection[Failure]
    ) -> None:
        """Leave out some failures from now until pytest has printed the section, and what only counts them."""
        self._all = reports = terminal.stats.get("failed", [])
        left = {(one.test, one.name) for one in repeats}
        tests, shown = {one.test for one in failed}, {one.test for one in failed if one not in repeats}
        shown |= {report.nodeid for report in reports if _subtest(report) is not None}

        def is_left_out(report: Any) -> bool:
            name = _subtest(report)
            if name is not None:
                return (report.nodeid, name) in left
            counts = isinstance(
                report.longrepr, str
            )  # "contains 3 failed subtests", in place of an exception
            return report.nodeid in tests and (counts or report.nodeid not in shown)

        terminal.stats["failed"] = [report for report in reports if not is_left_out(report)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Bring them back; pytest has printed the section, and its list of failing tests comes after this."""
        if self._all is not None:
            terminalreporter.stats["failed"], self._all = self._all, None


def _subtest(report: Any) -> str | None:
    """Return the name of the subtest that a report is about; None if it is about the whole test."""
    return report.context.msg or "" if isinstance(report, pytest.SubtestReport) else None


def _quantities(failed: list[Failure]) -> dict[str, list[str]]:
    """Return the failing quantities, by replay."""
    found: dict[str, list[str]] = {}
    for one in failed:
        found.setdefault(one.replay, []).append(one.quantity)
    return found


def _repeats(failed: list[Failure], groups: list[Group], firsts: list[Failure]) -> set[Failure]:
    """Return the failures that add nothing to the first one of their group: what follows from it, or fails as another
    one does that is independent of it.
    """
    found: set[Failure] = set()
    for group, first in zip(groups, firsts, strict=True):
        shown: set[str] = set()
        for one in failed:
            if one.replay not in group.replays or one == first:
                continue
            if one.quantity in group.apart and one.quantity not in shown:
                shown.add(one.quantity)
            else:
                found.add(one)
    return found


def _first(failed: list[Failure], group: Group) -> Failure:
    """Return the first failure of a group: of the quantity that broke first, if one of that failed."""
    own = [one for one in failed if one.replay == group.replays[0]]
    quantity = "" if group.first is None else group.first.quantity
    return next((one for one in own if one.quantity == quantity), own[0])
