"""Report in the summary of a GitHub Actions step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from regress.printable_text import printable
from regress.report.headroom import COLUMNS
from regress.report.report_model import Report
from regress.report.verdict_text import headline

VARIABLE = "GITHUB_STEP_SUMMARY"
"""Environment variable that names the summary file; appended text appears on the page of the run."""
LIMIT = 1024 * 1024
"""Maximum bytes of a step's summary; GitHub shows nothing of a larger one."""
LISTED = 200

_CUT = "\n\nThere is more, but GitHub shows one MiB; the files of the report hold all of it.\n"


def append_step_summary(report: Report) -> Path | None:
    """Append the report to the file that the environment names, within GitHub's limit; return the file, if
    there is one.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    path = Path(name)
    room = LIMIT - (path.stat().st_size if path.exists() else 0)
    with path.open("ab") as file:
        file.write(_within(step_summary(report), room))
    return path


def annotation(file: str, line: int, title: str, text: str) -> str:
    """Return the command by which GitHub Actions shows an error at a line of a file, where it reads a log.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    place = f"file={_escaped(file, ',:')},line={line},title={_escaped(title, ',:')}"
    return printable(f"::error {place}::{_escaped(text)}")


def annotated() -> bool:
    """Return True if GitHub Actions reads the log of this process."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _escaped(text: str, further: str = "") -> str:
    for sign in ("%", "\r", "\n", *further):
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def _within(text: str, room: int) -> bytes:
    data = printable(text).encode()
    if len(data) <= room:
        return data
    cut = _CUT.encode()
    kept = data[: max(room - len(cut), 0)]
    whole = kept[: kept.rfind(b"\n") + 1]  # half a table row is not a row, and half a character no text
    return whole + cut if len(whole) + len(cut) <= room else b""


def step_summary(report: Report) -> str:
    """Return the report in GitHub's Markdown."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    sign = {"✓": "✅", "✗": "❌", "!": "⚠️"}[report.sign]
    yield f"### {sign} {_plain(report.title)}: {_plain(report.summary)}"
    if report.errors:
        yield ""
        yield from _table(("not judged", "why"), [*report.errors.items()])
    for where, first, causes in report.findings:
        text = "\n".join([*first, *causes])
        yield f"\n**{_plain(where)}**\n\n<pre>{_plain(text)}</pre>"
    if report.failed:
        rows = [(headline(call.verdict, call.where),) for call in report.failed[:LISTED]]
        yield ""
        yield from _table(("failed",), rows)
        if len(report.failed) > LISTED:
            yield f"\nand {len(report.failed) - LISTED} more"
    yield "\n<details><summary>Headroom</summary>\n"
    yield from _table(COLUMNS, [row.cells() for row in report.closest])
    yield "\n</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(_plain(cell) for cell in row)} |"


def _plain(text: str) -> str:
    """Return the text without markup, safe in a table cell."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    for sign in "|*_`[]":
        escaped = escaped.replace(sign, f"\\{sign}")
    return escaped.replace("\n", "<br>")
