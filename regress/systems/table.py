"""The conformance table for a terminal and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from regress.errors import SystemsError
from regress.systems.row import Result, Row

FORMAT = 1
RED = (Result.WRONG, Result.UNDECLARED, Result.ERROR)
"""Results that are no pass."""


def line_of(row: Row) -> str:
    """Return a row in one line: ``trainer 5.23.0 fsdp2/sft/dense: exact (gradient 3.1e-07, 0.2 x tolerance)``."""
    name = f"{row.system} {row.version}".strip()
    plant = f" with {row.plant}" if row.plant else ""
    return f"{name} {row.cell.name}{plant}: {row.result}{_detail(row)}"


def _detail(row: Row) -> str:
    worst = row.worst
    if row.result in (Result.EXACT, Result.DECLARED) and worst is not None:
        quantity, error = worst
        relative = "" if error.relative is None else f" {error.relative:.1e},"
        multiple = "" if error.multiple is None else f" {error.multiple:.2g} x tolerance"
        note = f"; {row.told}" if row.told else ""
        return f" ({quantity}{relative}{multiple}{note})"
    return f": {row.told}" if row.told else ""


def text_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table line by line, and a sum."""
    for row in rows:
        yield line_of(row)
        if row.cause:
            yield f"  probably: {row.cause}"
    count = Counter(str(row.result) for row in rows)
    yield f"{len(rows)} cells: {', '.join(f'{number} {name}' for name, number in count.items())}"


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 if all cells are exact or as declared, 1 if one is not, 2 if one could not be judged."""
    results = {row.result for row in rows}
    if results & {Result.WRONG, Result.UNDECLARED}:
        return 1
    return 2 if Result.ERROR in results or not rows else 0


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON."""
    data: dict[str, Any] = {"format": FORMAT, "rows": [row.to_json() for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, allow_nan=False, default=str) + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Read rows from JSON.

    Raises:
        SystemsError: for a file that holds none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise SystemsError(
                f"{path} has format {data['format']}, but {FORMAT} is known: run the table again"
            )
        return [Row.from_json(row) for row in data["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemsError(
            f"{path} holds no rows of a conformance table ({error}): write one with regress systems run --json {path}"
        ) from error
