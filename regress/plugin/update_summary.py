"""End of a session: the results of an update, gathered from all tests and workers.

Variants and quantities that a user's own trainer lacks are counted and named.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

from regress.plugin.session_settings import SETTINGS
from regress.plugin.session_state import SESSION
from regress.plugin.worker_rows import (
    CALL,
    FOREIGN,
    JUDGED,
    KEPT,
    NOTE,
    UPDATE,
    ForeignRow,
    UpdateRow,
    foreign_row,
    received_call,
    update_row,
)

if TYPE_CHECKING:
    from regress.report.report_model import Report
    from regress.report.verdict_entries import Call


_SHOWN = 5


def foreign_lines(rows: Iterable[ForeignRow]) -> Iterator[str]:
    """Yield sentences on replays that were left out, by reason, and on quantities that were not recorded."""
    every = list(rows)
    yield from _not_possible(row for row in every if not row.adapter)
    adapted = [row for row in every if row.adapter]
    if not adapted:
        return
    adapter = adapted[0].adapter
    replays = dict.fromkeys(row.replay for row in adapted)
    reasons = _reasons(adapted)
    left_out = sum(len(names) for names in reasons.values())
    if left_out:
        yield f"{adapter} does not support {left_out} of {len(replays)} replays:"
        for reason, names in reasons.items():
            yield f"  {_named(names)}: {reason}"
    missing = dict.fromkeys(row.not_recorded for row in adapted if row.not_recorded is not None)
    if missing:
        yield f"{adapter} did not record {', '.join(str(name) for name in missing)}"
    if left_out == len(replays):
        yield f"nothing was compared: {adapter} supports none of the replays, so the session fails"


def _not_possible(rows: Iterable[ForeignRow]) -> Iterator[str]:
    """Yield sentences on replays that the engine of this package left out, by reason."""
    for reason, names in _reasons(rows).items():
        yield f"not possible, and left out: {_named(names)}: {reason}"


def _reasons(rows: Iterable[ForeignRow]) -> dict[str, dict[str, None]]:
    """Return the replays that were left out, in order, by reason."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.unsupported is not None:
            reasons.setdefault(row.unsupported, {})[row.replay] = None
    return reasons


def _named(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"{', '.join(known[:_SHOWN])}{more}"


_NARROWEST = 120  # columns below which folded cells are harder to read than lines that the terminal wraps
_UNFOLDED = 1000  # logs are searched, so nothing in them is folded


class Summary:
    """Collects rows and prints the table of an update; `config.stash[SUMMARY]` holds it.

    The rows of written goldens are passed to `add` before the session is over.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._added: list[UpdateRow] = []
        self._notes: list[str] = []
        self._properties: dict[str, list[tuple[str, object]]] = {}

    def add(self, rows: Iterable[UpdateRow]) -> None:
        """Add further rows to print."""
        self._added += rows

    def note(self, text: str) -> None:
        """Add a sentence to print at the end."""
        self._notes.append(text)

    def properties(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield ids of tests, and the values each sent under a property name."""
        for nodeid, found in self._properties.items():
            yield from ((nodeid, str(value)) for key, value in found if key == name)

    def reported_updates(self) -> Iterator[tuple[str, UpdateRow]]:
        """Return ids of tests, and the rows each has staged (`rows.tell_update`, on any worker)."""
        return ((nodeid, update_row(text)) for nodeid, text in self.properties(UPDATE))

    def updates(self) -> list[UpdateRow]:
        """Return all rows of the update table, in an order independent of workers."""
        return sorted(self._added, key=lambda row: (row.owner, row.name))

    def calls(self) -> list[Call]:
        """Return all verdicts that tests sent; none unless a report was asked for."""
        return [received_call(text) for _, text in self.properties(CALL)]

    def judged(self) -> list[int]:
        """Return the number of quantities that each test of a golden case judged."""
        return [int(count) for _, count in self.properties(JUDGED)]

    def judged_nothing(self) -> bool:
        """Return True if tests of golden cases ran and none of them judged anything."""
        return bool(found := self.judged()) and not any(found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the properties of a test; each of its reports repeats those of the one before."""
        found = [(key, value) for key, value in report.user_properties if key in KEPT]
        if found:
            self._properties[report.nodeid] = found

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the report, and print the table of the update and the notes."""
        if hasattr(self._config, "workerinput"):  # a worker of pytest-xdist, which knows its own tests only
            return
        self._write_report(terminalreporter)
        for line in foreign_lines(foreign_row(text) for _, text in self.properties(FOREIGN)):
            terminalreporter.line(f"regress: {line}")
        if found := self.judged():
            from regress.report.number_format import plural

            fails = ", so the session fails" if self.judged_nothing() else ""
            judged = f"{plural(sum(found), 'quantity')} judged in {plural(len(found), 'test')}"
            terminalreporter.line(f"regress: {judged}{fails}")
        for note in [*self._notes, *dict.fromkeys(note for _, note in self.properties(NOTE))]:
            terminalreporter.line(f"regress: {note}")
        rows = self.updates()
        if not rows:
            if self._config.stash[SETTINGS].update is not None and not self._notes:
                terminalreporter.line("regress: no golden had to be written")
            return
        terminalreporter.section("golden update")
        terminalreporter.write(_table(rows, self._width(terminalreporter)))
        terminalreporter.line(f"{len(rows)} written: git diff shows them, git restore takes them back")

    def _write_report(self, terminalreporter: pytest.TerminalReporter) -> None:
        folder = self._config.stash[SETTINGS].report
        if folder is None:
            return
        from regress.report.report_files import in_order, write_report
        from regress.report.terminal_report import HEIGHT, colourful, screen

        report = self._report(in_order(self.calls()))
        writer = terminalreporter._tw
        colour = writer.hasmarkup or (self._config.option.color == "auto" and colourful(terminal=False))
        terminalreporter.section("regress")
        height = HEIGHT - 4 if terminalreporter.isatty else _UNFOLDED
        terminalreporter.write(
            screen(report, width=self._report_width(terminalreporter), height=height, colour=colour)
        )
        for path in write_report(folder, report):
            terminalreporter.line(f"written: {path}")

    def _report_width(self, terminalreporter: pytest.TerminalReporter) -> int:
        """Return the width of the screen, or that of a log, in which nothing is cut off."""
        width: int = terminalreporter._tw.fullwidth
        return width if terminalreporter.isatty else _UNFOLDED

    def _report(self, calls: list[Call]) -> Report:
        """Return the report on all verdicts that tests sent, and on the replays they shared."""
        from regress.golden.golden_provenance import environment_lines
        from regress.golden.hub_goldens import hub_address
        from regress.plugin.check_provenance import provenance_of
        from regress.replay.replay_outcome import read_outcomes
        from regress.replay.token_value_tables import chosen_tables
        from regress.report.report_model import Report

        replays = self._config.stash[SESSION].replays
        command = shlex.join(["pytest", *self._config.invocation_params.args])
        address = hub_address(self._config.stash[SETTINGS].golden_dir)
        golden = {} if address is None else {"golden": address}
        environment = {"command": command, **golden, **environment_lines(provenance_of(self._config))}
        if replays is None:
            return Report("pytest", calls, environment=environment)
        failed = dict.fromkeys(call.where for call in calls if not call.verdict.ok)
        outcomes = read_outcomes(replays, failed)
        return Report(
            "pytest",
            calls,
            divergences={
                where: found.divergence for where, found in outcomes.items() if found.divergence is not None
            },
            diagnoses={where: found.diagnoses for where, found in outcomes.items() if found.diagnoses},
            tokens=chosen_tables(replays, calls),
            environment=environment,
        )

    def _width(self, terminalreporter: pytest.TerminalReporter) -> int:
        width = terminalreporter._tw.fullwidth
        return width if terminalreporter.isatty and width >= _NARROWEST else _UNFOLDED


SUMMARY = pytest.StashKey[Summary]()


def _table(rows: list[UpdateRow], width: int) -> str:
    """Return the rows as text: old and new value of each golden where it changed most."""
    from regress.report.terminal_report import printed
    from regress.report.text_table import Table

    words = ("golden of", "name", "status")
    titles = (*words, "changed", "max change", "x tolerance", "old", "new")
    table = Table(titles, [_cells(row) for row in rows], words=words, folded=words)
    return printed(table.only(titles).rich(), width, False)


def _cells(row: UpdateRow) -> tuple[str, ...]:
    multiple = "-" if math.isinf(row.multiple) else f"{row.multiple:.3g}"  # nothing is tolerated
    shown = (
        ("", "", "", row.new) if row.status == "new" else (f"{row.max_error:.3g}", multiple, row.old, row.new)
    )
    return row.owner, row.name, row.status, f"{row.changed} of {row.total}", *shown
