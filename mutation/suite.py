"""Lines that replays and unit tests reach: noted once, kept by the contents of tests, cases and the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from mutation.checks import Check, content_of
from mutation.mutants import ROOT
from mutation.unit_tests import Test, collected, files
from mutation.worker import Worker
from regress.errors import RankError

SECONDS = 400.0
"""Seconds that the tests of one file may take."""
T = TypeVar("T")
R = TypeVar("R")


class Reached:
    """Lines of some files that checks reach.

    Args:
        paths: files whose lines are noted.
        folder: keeps what was noted.
        workers: that share the work.
    """

    def __init__(self, paths: Collection[str], folder: Path, workers: Sequence[Worker]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._paths, self._folder, self._workers = tuple(sorted(paths)), folder, workers
        content = b"".join((ROOT / path).read_bytes() for path in self._paths)
        self._sources = hashlib.sha256(content).hexdigest()[:12]

    def replays(self, names: Iterable[tuple[str, str]], done: Callable[[], None]) -> list[Check]:
        """Return the checks of some cases and variants.

        Raises:
            ToolError: if a replay fails without a mutant.
        """

        def check(worker: Worker, name: tuple[str, str]) -> Check:
            case, variant = name
            content = content_of(case)
            kept = self._folder / f"{case}-{variant}-{content}-{self._sources}.json"
            if not kept.exists():
                seconds, lines = worker.traced(case, variant, self._paths)
                _keep(kept, asdict(Check(case, variant, seconds, lines, content)))
            done()
            return Check(**json.loads(kept.read_text(encoding="utf-8")))

        return self._shared(check, list(names))

    def tests(self, done: Callable[[], None]) -> tuple[list[Test], list[str]]:
        """Return the unit tests, and the files of those that took too long to be of use."""
        found, left_out = list[Test](), list[str]()

        def tests(worker: Worker, file: tuple[str, str]) -> None:
            path, content = file
            kept = self._folder / f"tests-{path.replace('/', '-')}-{content}-{self._sources}.json"
            if not kept.exists():
                names = worker.called(collected, file=path)
                try:
                    reached = worker.traced_tests(names, self._paths, SECONDS)
                except RankError as error:
                    left_out.append(f"{path} ({error})")
                    reached = []
                _keep(kept, [asdict(replace(test, content=content)) for test in reached])
            found.extend(Test(**entry) for entry in json.loads(kept.read_text(encoding="utf-8")))
            done()

        self._shared(tests, list(files().items()))
        return found, left_out

    def _shared(self, work: Callable[[Worker, T], R], parts: Sequence[T]) -> list[R]:
        free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            free.put(worker)

        def one(part: T) -> R:
            worker = free.get()
            try:
                return work(worker, part)
            finally:
                free.put(worker)

        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(one, parts))


def _keep(path: Path, content: object) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)
