"""Stored checks that no longer belong to any test.

A check is an orphan when its test was not collected, or passed without asking for it. That is only known
after a full run: otherwise the summary states why there was no search. Orphans are listed for `regress golden
prune`; nothing here deletes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest

from regress.errors import RegressError
from regress.plugin.session_settings import SETTINGS
from regress.plugin.session_state import owner
from regress.plugin.update_summary import Summary
from regress.plugin.worker_rows import ASKED

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

CACHED = "regress/orphans"
"""Key in pytest's cache: paths within the golden directory."""

_SENT = "regress_partial"  # key of a worker's findings for its controller
_OPTIONS = {
    "keyword": "-k",
    "markexpr": "-m",
    "maxfail": "-x or --maxfail",
    "lf": "--lf",
    "stepwise": "--sw",
    "deselect": "--deselect",
    "ignore": "--ignore",
    "ignore_glob": "--ignore-glob",
    "collectonly": "--collect-only",
}


class Orphans:
    """Watches a session, on workers and on their controller.

    Attributes:
        reasons: reasons why the run is incomplete; a dict for its order.
        collected: ids of all tests.
        passed, troubled: ids of tests that passed, and of those that failed or were skipped in some phase.
    """

    def __init__(self, config: pytest.Config, summary: Summary) -> None:
        self._config, self._summary = config, summary
        self.reasons: dict[str, None] = dict.fromkeys(_narrowing(config))
        self.collected: set[str] = set()
        self.passed: set[str] = set()
        self.troubled: set[str] = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Notice tests that are deselected."""
        before = len(items)
        yield
        if len(items) < before:
            self.reasons["tests were deselected"] = None
        self.collected |= {owner(item) for item in items}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notice modules whose tests are unknown."""
        if not report.passed:
            what = "skipped" if report.skipped else "broken"
            self.reasons[f"{report.nodeid or 'the session'} is {what} at collection"] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notice tests that asked for all of their checks."""
        if not report.passed or hasattr(report, "wasxfail"):
            self.troubled.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Receive the collected tests from a worker."""
        self.collected |= set(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        """Receive from a worker the reasons its collection is incomplete, or notice that it crashed."""
        if error:
            self.reasons["a worker crashed"] = None
        sent: dict[str, list[str]] = getattr(node, "workeroutput", None) or {}
        self.reasons |= dict.fromkeys(sent.get(_SENT, ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Notice a run that was cut short; send this worker's findings to the controller."""
        finished = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if exitstatus not in finished or session.shouldfail or session.shouldstop:
            self.reasons["the run was cut short"] = None
        output: dict[str, object] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_SENT] = list(self.reasons)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List orphans, or say why they were not looked for."""
        asked = {path for _, path in self._summary.properties(ASKED)}
        if not (self._config.stash[SETTINGS].golden_dir / "checks").is_dir():
            return
        if self.reasons:
            if asked:
                terminalreporter.line(f"orphaned checks: not looked for ({'; '.join(self.reasons)})")
            return
        found = [*self._unasked(asked)]
        orphans = [row for row in found if row.why is not None]
        cache: pytest.Cache | None = getattr(self._config, "cache", None)
        if cache is not None:
            cache.set(CACHED, [row.path for row in orphans])
        if found:
            _print(found, terminalreporter, kept=cache is not None)

    def _unasked(self, asked: set[str]) -> Iterator[Unasked]:
        """Yield the stored checks that no test asked for, except those of tests that failed or were skipped."""
        from regress.golden.golden_directory import GoldenStore
        from regress.golden.stored_checks import read_check, stored_checks, without_suffix

        try:
            root = GoldenStore(self._config.stash[SETTINGS].golden_dir).root
        except RegressError as error:
            yield Unasked("", None, str(error))
            return
        for path in stored_checks(root):
            if without_suffix(path) in asked:
                continue
            try:
                check = read_check(root, path)
            except RegressError as error:
                yield Unasked(path, None, str(error))
                continue
            assert check is not None
            if check.test not in self.collected:
                yield Unasked(path, "there is no such test", f"{check.name!r} of {check.test}")
            elif check.test in self.passed - self.troubled:
                yield Unasked(
                    path, "the test passed without asking for it", f"{check.name!r} of {check.test}"
                )


class Unasked(NamedTuple):
    """A stored check that no test asked for: the reason it is an orphan (None: it is damaged), and its test."""

    path: str
    why: str | None
    what: str


def _narrowing(config: pytest.Config) -> Iterator[str]:
    """Yield the options on the command line that make a run incomplete."""
    yield from (name for option, name in _OPTIONS.items() if config.getoption(option, None))
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        yield "paths on the command line"
    elif config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR and not _at_root(config):
        yield f"pytest was called in a folder below {config.rootpath}"


def _at_root(config: pytest.Config) -> bool:
    return config.invocation_params.dir == config.rootpath


def _print(found: list[Unasked], terminalreporter: pytest.TerminalReporter, *, kept: bool) -> None:
    terminalreporter.section("orphaned checks")
    for row in found:
        terminalreporter.line(f"{row.what}: {row.why} ({row.path})" if row.why else f"damaged: {row.what}")
    count = sum(row.why is not None for row in found)
    if not count:
        return
    remedy = (
        "remove with regress golden prune" if kept else "not listed for prune, which needs pytest's cache"
    )
    terminalreporter.line(f"{count} orphaned: {remedy}")
