"""Unit tests of the engine in this process: collected once, run in processes that are forked from it."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from time import perf_counter

import pytest
from _pytest.config import _prepareconfig
from _pytest.main import Session
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from mutation.mutants import ROOT, Mutant

FOLDERS = ("tests/unit/grpo", "tests/unit/layout", "tests/unit/engine", "tests/unit/parallel")
"""Folders of tests that can show a mutant in their own process."""


@dataclass(frozen=True)
class Test:
    """Unit test that passes.

    Attributes:
        name: node id.
        seconds: that it takes.
        lines: of each file that it reaches.
        content: hash of its file and of what that may import.
    """

    __test__ = False

    name: str
    seconds: float
    lines: dict[str, list[int]]
    content: str = ""

    @property
    def key(self) -> str:
        """Name and content: a test that was changed is another."""
        return f"{self.name}@{self.content}"

    def reaches(self, mutant: Mutant) -> bool:
        """Tell whether the test runs the mutant's line."""
        return mutant.reached(self.lines.get(mutant.path, ()))


@dataclass(frozen=True)
class Ran:
    """Result of a test: why it failed, an empty text if it passed, and the seconds that it took."""

    name: str
    why: str
    seconds: float


def files() -> dict[str, str]:
    """Return the hash of each test file and of what it may import, by its path from the root of the repository."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
    helpers = hashlib.sha256((ROOT / "tests/unit/conftest.py").read_bytes())
    for path in paths:
        if not path.name.startswith("test_"):
            helpers.update(path.read_bytes())
    found = {}
    for path in paths:
        if path.name.startswith("test_"):
            content = helpers.copy()
            content.update(path.read_bytes())
            found[str(path.relative_to(ROOT))] = content.hexdigest()[:12]
    return found


QUIET = "ignore::pytest.PytestAssertRewriteWarning"
"""The engine is imported before pytest, and what it asserts is not a test."""

_items: dict[str, pytest.Item] = {}


def collect() -> None:
    """Collect the tests of `FOLDERS`; their examples are the same in each process, and none is kept."""
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
    )
    settings.load_profile("mutants")
    before = Path.cwd()
    os.chdir(ROOT)
    filters = warnings.catch_warnings()  # that make errors of warnings: for tests, and no replay
    filters.__enter__()
    try:
        without = ("cacheprovider", "xdist", "randomly")
        options = [part for name in without for part in ("-p", f"no:{name}")]
        config = _prepareconfig([*FOLDERS, "--capture=no", "-q", "-W", QUIET, *options])
        config._do_configure()
        session = Session.from_config(config)
        config.hook.pytest_sessionstart(session=session)
        config.hook.pytest_collection(session=session)
        _items.update({item.nodeid: item for item in session.items})
    finally:
        filters.__exit__(None, None, None)
        os.chdir(before)


def collected(file: str) -> list[str]:
    """Return the node ids of a file, in a process in which `collect` was called."""
    return [name for name in _items if name.partition("::")[0] == file]


def ran(names: Sequence[str], folder: Path) -> Iterator[Ran]:
    """Run collected tests one after another, with their temporary folders in a folder.

    Raises:
        LookupError: if there is no such test.
    """
    missing = [name for name in names if name not in _items]
    if missing:
        raise LookupError(f"test {missing[0]} was not collected")
    items, subtests = [_items[name] for name in names], _Subtests()
    if items:
        items[0].config.pluginmanager.register(subtests)
        factory = items[0].config._tmp_path_factory  # type: ignore[attr-defined]  # pytest's own
        factory._basetemp, factory._given_basetemp = None, folder / "tests"
    os.chdir(ROOT)
    try:
        for item, following in zip_longest(items, items[1:]):
            start = perf_counter()
            subtests.failed.clear()
            reports = runtestprotocol(item, nextitem=following, log=False)
            failed = [*subtests.failed, *(report for report in reports if report.failed)]
            why = _why(failed[0]) if failed else ""
            yield Ran(item.nodeid, why, perf_counter() - start)
    finally:
        if items:
            items[0].config.pluginmanager.unregister(subtests)
            with suppress(Exception):  # what a mutant left behind
                items[0].session._setupstate.teardown_exact(None)


class _Subtests:
    """Collects the subtests that failed: their reports are logged alone, and the whole test is said to have passed."""

    def __init__(self) -> None:
        self.failed: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report)


def _why(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message).strip().split("\n")[0][:300] or "failed"
