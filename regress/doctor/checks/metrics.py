"""metrics.jsonl and eval_samples.jsonl: append-only records, whose last line a kill may have cut off."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader

from regress.doctor.check_context import CheckContext
from regress.doctor.checks.unsafe import unsafe
from regress.doctor.issue import Fix, Issue, Write
from regress.doctor.tree import Unreadable, Unsafe, parsed
from regress.doctor.types import issue
from regress.dump.metrics_file import METRICS

LINE_LIMIT = 4 * 2**20
"""Bytes of the longest line that is parsed."""
REPAIR_LIMIT = 2**28
"""Bytes of the largest file that is repaired automatically."""


def check_metrics(context: CheckContext) -> Iterator[Issue]:
    """Check each line of the records beside the checkpoints."""
    for name in (METRICS, "eval_samples.jsonl"):
        if context.tree.exists(name):
            yield from _check(context, name)


def _check(context: CheckContext, name: str) -> Iterator[Issue]:
    bad: list[int] = []
    count, torn = 0, False
    try:
        with context.tree.opened(name) as file:
            while line := file.readline(LINE_LIMIT):
                count += 1
                ended = line.endswith(b"\n") or _skip(file)
                if line.strip() and not _is_row(line):
                    bad += [count] if ended else []
                    torn = not ended
    except Unsafe as error:
        yield unsafe(context, name, error)
        return
    except Unreadable as error:
        yield issue("corrupted_metrics", f"{name} {error}; move it away, a resume starts another", path=name)
        return
    if bad:
        yield _corrupted(context, name, bad)
    elif torn:
        yield _torn(context, name, count)


def _skip(file: BufferedReader) -> bool:
    """Read to the end of a line that is too long to be a row; False if the file ends before."""
    while part := file.readline(LINE_LIMIT):
        if part.endswith(b"\n"):
            return True
    return False


def _is_row(line: bytes) -> bool:
    """Return True for what `regress.dump.metrics_file` reads as a row."""
    try:
        row = parsed(line)
    except Unreadable:
        return False
    return isinstance(row, dict) and isinstance(row.get("step"), int)


def _torn(context: CheckContext, name: str, line: int) -> Issue:
    return issue(
        "torn_metrics",
        f"{name}: line {line}, the last, is cut off, as a kill leaves it; readers drop it, and so does a repair",
        path=name,
        evidence={"line": line},
        fix=_kept(context, name, f"drop the cut off line {line} of {name}"),
    )


def _corrupted(context: CheckContext, name: str, bad: list[int]) -> Issue:
    several = f"{len(bad)} lines that are no rows" if len(bad) > 1 else "a line that is no row"
    return issue(
        "corrupted_metrics",
        f"{name} holds {several} of metrics, first line {bad[0]}, which no kill explains and no reader accepts; "
        "a repair drops what is none and keeps the old file in its backup",
        path=name,
        evidence={"lines": bad[:50]},
        fix=_kept(context, name, f"drop what is no row of {name} ({len(bad)} of its lines)"),
    )


def _kept(context: CheckContext, name: str, summary: str) -> Fix | None:
    """Return the repair that keeps the lines which are rows."""
    try:
        data = context.tree.read(name, REPAIR_LIMIT)
    except Unreadable:
        return None
    *lines, last = data.split(b"\n")
    rows = [line + b"\n" for line in lines if not line.strip() or _is_row(line)]
    rows += [last] if _is_row(last) else []
    return Fix(summary, (Write(name, b"".join(rows)),))
