"""Data files as tasks: a JSON array, JSON lines, or parquet, recognized by their content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regress.errors import TaskError, reason
from regress.optional_packages import install
from regress.tasks.data_rows import RowFields, problem_of
from regress.tasks.portable_draws import distinct, generator
from regress.tasks.problem import Problem
from regress.untrusted_files import parse_json, read_bytes, refuse_growth

NAME = "dataset"
"""Name of the task of every file: a problem keeps its task_id where the file is moved."""

_PARQUET = b"PAR1"
_KEY = "task.dataset_path"


@dataclass(frozen=True)
class FileTask:
    """Problems of a file, drawn in an order that the seed decides."""

    problems: tuple[Problem, ...]
    seed: int
    name: str = NAME
    level: int | None = None

    @property
    def size(self) -> int | None:
        """Number of problems."""
        return len(self.problems)

    def draw(self, count: int) -> list[Problem]:
        """Implement `Task.draw`."""
        order = list(distinct(generator("dataset", self.seed), len(self.problems)))
        return [self.problems[index] for index in order[:count]]


def read_task(path: Path, fields: RowFields, seed: int = 0) -> FileTask:
    """Read a data file.

    Raises:
        TaskError: naming file and line (of parquet: row), if it cannot be read, is damaged, holds no rows, a row that
            is not a problem, or a prompt twice.
    """
    problems: list[Problem] = []
    places: dict[tuple[str, object], str] = {}
    for place, row in _rows(path):
        problem = problem_of(row, fields, NAME, f"{_KEY}: {path} {place}")
        first = places.setdefault((problem.prompt, problem.tokens), place)
        if first is not place:
            raise TaskError(f"""{_KEY}: {path} {place} repeats the prompt of {first}, so that it could be trained on and
            evaluated with; keep one of them""")
        problems.append(problem)
    if not problems:
        raise TaskError(f"{_KEY}: {path} holds no rows; give a file with prompts and answers")
    return FileTask(tuple(problems), seed)


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yield every row with its place in the file."""
    try:
        data = read_bytes(path)
    except OSError as error:
        raise TaskError(
            f"{_KEY}: {path} cannot be read ({reason(error)}); give a JSON array, JSON lines or a parquet file"
        ) from error
    if data.startswith(_PARQUET):
        yield from _parquet_rows(path)
        return
    text = _decoded(path, data)
    if text.lstrip().startswith("["):
        yield from _array_rows(path, text)
    else:
        yield from _line_rows(path, text)


def _decoded(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TaskError(f"""{_KEY}: {path} line {line} is not text in UTF-8, and the file is not a parquet file either;
        convert it to JSON lines in UTF-8""") from error


def _array_rows(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """Yield the members of a JSON array with the lines they begin in."""
    try:
        refuse_growth(text.encode())
    except ValueError as error:
        raise _damaged(path, 1, _why(error)) from error
    decoder, end = json.JSONDecoder(), text.index("[") + 1
    closed, line, counted = False, 1, 0
    first = True
    while not closed:
        start = _skipped(text, end)
        if text[start : start + 1] == "]":
            closed, end = True, start + 1
            break
        if not first:
            if text[start : start + 1] != ",":
                raise _damaged(path, text.count("\n", 0, start) + 1, "a comma or ] is missing")
            start = _skipped(text, start + 1)
        line, counted = line + text.count("\n", counted, start), start
        try:
            row, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, getattr(error, "lineno", line), _why(error)) from error
        yield f"line {line}", row
        first = False
    if text[_skipped(text, end) :]:
        raise _damaged(path, text.count("\n", 0, _skipped(text, end)) + 1, "something follows the array")


def _skipped(text: str, start: int) -> int:
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


def _line_rows(path: Path, text: str) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, finite=False, wide=True)
        except ValueError as error:
            raise _damaged(path, number, _why(error)) from error
        yield f"line {number}", row


def _why(error: Exception) -> str:
    return str(getattr(error, "msg", "")) or reason(error)


def _damaged(path: Path, line: int, why: str) -> TaskError:
    return TaskError(f"""{_KEY}: {path} line {line} is not valid JSON ({why}); mend the line, or write one object
    a line, or one array of objects""")


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise TaskError(f"""{_KEY}: {path} is a parquet file, which needs the optional package pyarrow, but {error}; run
        {install("parquet")}""") from error
    number = 0
    try:
        file: Any = parquet.ParquetFile(path)
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (ArrowException, OSError, ValueError) as error:
        raise TaskError(f"""{_KEY}: {path} is damaged after row {number} ({reason(error)}); write it again, or convert
        it to JSON lines""") from error
