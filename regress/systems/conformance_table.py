"""The conformance table for a terminal and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from regress.dump.command_outputs import Output, save_output
from regress.dump.dump_location import Location, read_bytes
from regress.errors import SystemsError
from regress.json_schema import conform
from regress.systems.conformance_row import ConformanceRow, Result
from regress.systems.known_findings import finding_named, gone
from regress.untrusted_files import parse_json

FORMAT = 1


def line_of(row: ConformanceRow) -> str:
    """Return a row in one line: ``trainer 5.23.0 fsdp2/sft/dense: exact (gradient 3.1e-07, 0.2 x tolerance)``."""
    name = f"{row.system} {row.version}".strip()
    plant = f" with {row.plant}" if row.plant else ""
    known = f", known finding {row.finding}" if row.known else ""
    return f"{name} {row.cell.name}{plant}: {row.result}{known}{_detail(row)}"


def _detail(row: ConformanceRow) -> str:
    worst = row.worst
    if row.result in (Result.EXACT, Result.DECLARED) and worst is not None:
        quantity, error = worst
        relative = "" if error.relative is None else f" {error.relative:.1e},"
        multiple = "" if error.multiple is None else f" {error.multiple:.2g} x tolerance"
        note = f"; {row.told}" if row.told else ""
        return f" ({quantity}{relative}{multiple}{note})"
    return f": {row.told}" if row.told else ""


def text_of(rows: Sequence[ConformanceRow]) -> Iterator[str]:
    """Yield the table line by line, and a sum."""
    for row in rows:
        yield line_of(row)
        if row.cause:
            yield f"  probably: {row.cause}"
        if row.fixed and (finding := finding_named(row.finding)) is not None:
            yield f"  {gone(finding)}"
    count = Counter(kind_of(row) for row in rows)
    yield f"{len(rows)} cells: {', '.join(f'{number} {name}' for name, number in count.items())}"


def kind_of(row: ConformanceRow) -> str:
    """Return what a row counts as: its result, or what a known finding makes of it."""
    if row.fixed:
        return "finding gone"
    return f"{row.result} as known" if row.known else str(row.result)


def exit_code(rows: Sequence[ConformanceRow]) -> int:
    """Return the exit code of a run.

    0 if exactly the cells of known findings are red, and all others exact or as declared; 1 if another one is wrong,
    or a finding or a declared difference is gone; 2 if one could not be judged.
    """
    results = {row.result for row in rows if not row.known}
    if results & {Result.WRONG, Result.UNDECLARED} or any(row.fixed for row in rows):
        return 1
    return 2 if Result.ERROR in results or not rows else 0


def write_rows(path: Output, rows: Sequence[ConformanceRow]) -> None:
    """Write rows as JSON, in place of those that the file holds; a reader sees the old or the new ones."""
    data: dict[str, Any] = {"format": FORMAT, "rows": [row.to_json() for row in rows]}
    save_output(path, json.dumps(data, indent=1, allow_nan=False, default=str) + "\n")


def together(rows: Iterable[ConformanceRow]) -> list[ConformanceRow]:
    """Return the last row of each cell of each system, in the order in which cells were first told."""
    found = {(row.system, row.cell.name): row for row in rows}
    return list(found.values())


def read_rows(path: Location) -> list[ConformanceRow]:
    """Read rows from JSON.

    Raises:
        SystemsError: for a file that holds none.
    """
    try:
        data = parse_json(read_bytes(path), finite=False)
        if data["format"] != FORMAT:
            raise SystemsError(
                f"{path} has format {data['format']}, but {FORMAT} is known: run the table again"
            )
        return [ConformanceRow.from_json(conform(row, ConformanceRow, "a row")) for row in data["rows"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemsError(
            f"{path} holds no rows of a conformance table ({error}): write one with regress systems run --json {path}"
        ) from error
