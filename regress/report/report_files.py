"""Report in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from regress.compare.diagnosis.dataflow import dataflow_key
from regress.dump.command_outputs import Output, write_output, write_outputs
from regress.dump.dump_location import Location
from regress.report.github_summary import append_step_summary
from regress.report.html_report import to_html
from regress.report.report_model import Report
from regress.report.terminal_report import whole
from regress.report.verdict_entries import PAGE, Call

JSON_NAME, TEXT_NAME = "report.json", "report.txt"


def write_report(folder: Location, report: Report) -> list[Location]:
    """Write ``index.html``, ``report.json`` and ``report.txt`` into a folder, each whole or not at all.

    The bytes depend on the judged values, and not on the order in which workers reported them. If GitHub
    Actions names a summary file for the step, the report is appended to it, too.

    Returns:
        The paths of the files.
    """
    ordered = replace(report, calls=in_order(report.calls))
    texts = {
        PAGE: to_html(ordered),
        JSON_NAME: ordered.dumps(),
        TEXT_NAME: whole(ordered),
    }
    written = write_outputs(folder, texts)
    append_step_summary(ordered)
    return written


def write_report_files(report: Report, failed: Output | None, every: Output | None) -> None:
    """Write the JSON of a report where it was asked for: with what failed alone, and with every verdict."""
    if failed is not None:
        write_output(failed, report.dumps(every=False))
    if every is not None:
        write_output(every, report.dumps())


def in_order(calls: Sequence[Call]) -> list[Call]:
    """Return the calls by replay, then in the order of computation."""
    return sorted(calls, key=_order)


def _order(call: Call) -> tuple[Any, ...]:
    verdict = call.verdict
    return (call.where, call.precision, *dataflow_key(verdict), verdict.quantity, verdict.name, call.test)
