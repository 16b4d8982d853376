"""Functions that ranks run: a replay or unit tests with a mutant, or noting which lines they reach."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from mutation.checks import Cases
from mutation.force import in_force
from mutation.mutants import ROOT, Mutant
from mutation.unit_tests import Ran, Test, ran
from regress.dump.dump_reader import DumpReader
from regress.engine.config.config_schema import Config
from regress.errors import lost_connection
from regress.replay.case_run import run_steps

Lines = dict[str, list[int]]
"""Lines of each file, from the root of the repository."""


@dataclass(frozen=True)
class Raised:
    """Error that a rank's replay ended with.

    Attributes:
        error: class and text.
        place: file, line and function that raised it.
        inside: it passed through the mutated function.
        started: the mutated function had run.
        connection: it says that another rank was lost.
    """

    error: str
    place: str
    inside: bool
    started: bool
    connection: bool


def run_mutated(config: Config, mutant: Mutant, folder: Path) -> bool:
    """Run all steps on a rank with a mutant, and tell whether the mutated function has run.

    An error of the steps, and no other, is told in a file of the folder, too; see `raised_in`.
    """
    with in_force(mutant) as force:
        try:
            run_steps(config)
        except BaseException as error:
            told = Raised(
                f"{type(error).__name__}: {str(error)[:300]}",
                _place(error.__traceback__),
                force.raised(error),
                force.started,
                lost_connection(error),
            )
            path = folder / f"raised{os.environ['RANK']}.json"
            path.write_text(json.dumps(asdict(told)), encoding="utf-8")
            raise
        return force.started


def judge_mutated(case: str, variant: str, dump: Path, mutant: Mutant) -> tuple[str, str, str] | None:
    """Judge a dump with a mutant of code that engine and judge share, as a judge of the same version would.

    Returns:
        Quantity, tensor and place of the first failing verdict, or None.
    """
    with in_force(mutant):
        failed = Cases().prepared(case, variant).first_failing(DumpReader(dump))
    return None if failed is None else (failed.quantity, failed.name, str(failed.place))


def raised_in(folder: Path) -> list[Raised]:
    """Return the errors that ranks told in a folder, those that are not a lost connection first."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.glob("raised*.json")))
    return sorted((Raised(**json.loads(text)) for text in texts), key=lambda raised: raised.connection)


def run_traced(config: Config, paths: Collection[str]) -> Lines:
    """Run all steps on a rank and return the lines that it reached."""
    with _traced(paths) as lines:
        run_steps(config)
    return {path: sorted(found) for path, found in lines.items() if found}


def run_tests(names: Sequence[str], mutant: Mutant, folder: Path) -> Ran:
    """Run unit tests with a mutant until one fails."""
    with in_force(mutant):
        return next((result for result in ran(names, folder) if result.why), Ran("", "", 0.0))


def trace_tests(names: Sequence[str], paths: Collection[str], folder: Path) -> list[Test]:
    """Run unit tests and return those that pass, with what they reach."""
    found = []
    with _traced(paths) as lines:
        for result in ran(names, folder):
            reached = {path: sorted(numbers) for path, numbers in lines.items() if numbers}
            for numbers in lines.values():
                numbers.clear()
            if not result.why:
                found.append(Test(result.name, result.seconds, reached))
    return found


@contextmanager
def _traced(paths: Collection[str]) -> Iterator[dict[str, set[int]]]:
    files = {str(ROOT / path): path for path in paths}
    lines: dict[str, set[int]] = {path: set() for path in paths}

    def inside(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            lines[files[frame.f_code.co_filename]].add(frame.f_lineno)
        return inside

    def enter(frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        return inside if frame.f_code.co_filename in files else None

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield lines
    finally:
        sys.settrace(None)
        threading.settrace(None)


def _place(trace: TracebackType | None) -> str:
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_qualname}"
        trace = trace.tb_next
    return place
