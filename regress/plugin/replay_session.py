"""Hooks of a session that replays golden cases: state shared by its processes, and its end."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regress.errors import ConfigError, RegressError
from regress.plugin.quantity_selection import chosen, misspelt, parts_of
from regress.plugin.replay_parts import ReplayPart
from regress.plugin.replay_suite import REPLAYS, STAGED, Suite
from regress.plugin.replay_tests import DETAILS, MARKER, SUITE, parametrize
from regress.plugin.session_settings import SETTINGS
from regress.plugin.session_state import SESSION
from regress.plugin.update_summary import SUMMARY
from regress.replay.temporary_workspace import Workspace

if TYPE_CHECKING:
    from regress.plugin.golden_update import StagedValues
    from regress.replay.user_trainer import Adapter

_SHARED = "regress_shared"
_MADE = 200_000
"""New objects that trigger the garbage collector during collection: with the usual 700 a third of the time
goes to it.
"""
_ENDED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class ReplaySession:
    """Session state, registered when pytest is configured, in the controller of pytest-xdist and in each worker."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._own: Workspace | None = None
        self._crashed = False
        self._failed: set[str] = set()

    @property
    def shared(self) -> Path:
        """Directory that all processes of the session see; created when first asked for."""
        if self._worker is not None:
            return Path(self._worker[_SHARED])
        if self._own is None:
            self._own = Workspace()
        return self._own.path

    @property
    def replays(self) -> Path | None:
        """Directory of this session's replays, if it has any."""
        return None if self._own is None else self._own.path / REPLAYS

    def staged_values(self, item: pytest.Item) -> StagedValues:
        """Return the staging folder for the new goldens of one run of a test."""
        from regress.plugin.golden_update import StagedValues

        worker = "main" if self._worker is None else str(self._worker["workerid"])
        return StagedValues(self.shared / STAGED, worker, item.nodeid)

    def suite(self) -> Suite:
        """Return the cases and variants, opened on first use; raises `ConfigError` for bad ones."""
        if SUITE not in self._config.stash:
            from regress.compare.verdicts.tolerance_overrides import read_overrides
            from regress.replay.extra_settings import with_settings
            from regress.replay.variant_table import project_variants

            added = self._config.hook.pytest_regress_variants(config=self._config)
            if not all(isinstance(rows, Iterable) for rows in added):
                raise ConfigError(
                    f"pytest_regress_variants gave {added!r}; give a list of regress.replay.variant.Variant"
                )
            adapter = self._adapter()
            variants = project_variants(self._config.rootpath, [row for rows in added for row in rows])
            overrides = read_overrides(self._config.rootpath)
            settings, own = self._config.stash[SETTINGS], self._settings()
            variants = {name: with_settings(variant, own) for name, variant in variants.items()}
            self._config.stash[SUITE] = Suite(settings, self.shared, variants, overrides, adapter, own)
        return self._config.stash[SUITE]

    def _settings(self) -> dict[str, Any]:
        """Return the settings that options or the ini file apply to every variant.

        Raises:
            ConfigError: if one is not valid, or goldens are to be updated.
        """
        from regress.replay.extra_settings import settings_of_variants

        given = self._config.getoption("--regress-set")
        found = settings_of_variants(self._config.getini("regress_set") if given is None else given)
        if found and self._config.stash[SETTINGS].update is not None:
            raise ConfigError(f"""--update-golden makes golden what the configuration of the cases computes, and
            {min(found)} is set beside it; update without --regress-set and regress_set""")
        return found

    def _adapter(self) -> Adapter | None:
        """Return the function that replays cases in place of the engine: a hook, or one of pyproject.toml.

        Raises:
            ConfigError: if there are two, or goldens are to be updated.
        """
        from regress.replay.user_trainer import hook_adapter, project_adapter

        name = "pytest_regress_replay"
        hooks = [impl.function for impl in getattr(self._config.hook, name).get_hookimpls()]
        found = [hook_adapter(function, name) for function in hooks]
        found += [named] if (named := project_adapter(self._config.rootpath)) is not None else []
        if len(found) > 1:
            names = " and ".join(adapter.name for adapter in found)
            raise ConfigError(
                f"{names} both replay golden cases; keep one of {name} and [tool.regress] replay in pyproject.toml"
            )
        if found and self._config.stash[SETTINGS].update is not None:
            raise ConfigError(f"""--update-golden makes golden what the engine of this package computes, but
            {found[0].name} replays the cases; update without it, or compare without --update-golden""")
        return found[0] if found else None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Give a worker the place where the session shares its replays."""
        node.workerinput[_SHARED] = str(self.shared)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        """Make the garbage collector run less often while tests are made, as none of them is garbage."""
        before = gc.get_threshold()
        gc.set_threshold(max(before[0], _MADE), *before[1:])
        try:
            return (yield)
        finally:
            gc.set_threshold(*before)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Enumerate the golden cases for a test function that asks for them."""
        parametrize(metafunc, self.suite)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Fix the scope of an update: what the selected tests judge, whatever selected them."""
        parts = parts_of(session.items)
        if SUITE not in self._config.stash or not parts:
            return
        suite = self._config.stash[SUITE]
        if suite.adapter is None and not self._config.getoption("collectonly"):
            _warm_ranks(parts.values())
        if self._config.stash[SETTINGS].update is None:
            return
        chosen_quantities: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for node, part in parts.items():
            where = {update.place: update.where for update in part.replay.plan}
            for item in chosen(node, part):
                if (place := item.place.of_update) in where:
                    chosen_quantities[part.replay.case.name].add((where[place], item.quantity))
        suite.selection.update(chosen_quantities)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report of a failing quantity its details; a section of the test would be in all of its reports."""
        report = yield
        details = item.stash.get(DETAILS, None)
        if details is not None:
            report.sections.append(("Captured regress call", details))
            del item.stash[DETAILS]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the tests that failed in any phase, expectedly or not: their values become no golden."""
        if report.failed or (report.skipped and hasattr(report, "wasxfail")):
            self._failed.add(report.nodeid)

    def pytest_internalerror(self) -> None:
        """Record that a process of the session was interrupted."""
        self._crashed = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Record that a worker died: its share of an update may be missing."""
        self._crashed = self._crashed or error is not None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        """Write all staged values, or none if the session was interrupted."""
        settings = self._config.stash[SETTINGS]
        if self._worker is None and exitstatus in _ENDED and self._config.stash[SUMMARY].judged_nothing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._worker is None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            self._name_misspelt()
        if self._worker is not None or settings.update is None or self._own is None:
            return
        staged = self.shared / STAGED
        if not staged.is_dir():  # no test asked for a golden
            return
        summary = self._config.stash[SUMMARY]
        cut_short = session.shouldfail or session.shouldstop
        if exitstatus not in _ENDED or self._crashed or cut_short:
            summary.note("no golden was written, because the session was interrupted: run the update again")
            return
        from regress.plugin.golden_update import SessionFacts, apply_staged

        facts = SessionFacts([*summary.reported_updates()], self._failed)
        found = apply_staged(staged, settings.golden_dir, facts)
        summary.add(found.rows)
        for note in found.notes:
            summary.note(note)
        if found.problems:  # tests have passed against values that could not be written
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for problem in found.problems:
            summary.note(problem)

    def _name_misspelt(self) -> None:
        """Say which names of ``-k``, which has selected nothing, occur in the name of no golden test."""
        text = str(self._config.getoption("keyword") or "")
        try:
            suite = self.suite() if text else None
            if suite is None or not suite.names:
                return
            parts = [part for part in suite.parts("*", "*") if isinstance(part, ReplayPart)]
        except RegressError:  # the tests that ask for golden cases have said so
            return
        names = {f"[{case}/{variant}/" for case in suite.names for variant in suite.variants}
        names |= {f"[{item.id}]" for part in parts for item in part.items}
        for name, near in misspelt(text, names):  # without a near one it may be a name of any other test
            self._config.stash[SUMMARY].note(f"no golden test has {name!r} in its name; did you mean {near}?")

    def pytest_unconfigure(self) -> None:
        """Stop the ranks' forkserver, and remove the shared directory."""
        if "regress.replay.replay_pool" in sys.modules:
            from regress.replay.replay_pool import close_shared_pool

            close_shared_pool()
        if self._own is not None:
            self._own.remove()


def _warm_ranks(parts: Iterable[ReplayPart]) -> None:
    """Make the ranks' forkserver import the modules of replays while the first tests run."""
    if any(part.replay.world_size > 1 for part in parts):
        from regress.replay.replay_pool import shared_pool

        shared_pool().warm()


def register(config: pytest.Config) -> None:
    """Add the session's hooks and its marker."""
    config.addinivalue_line(
        "markers", f"{MARKER}(cases='*', variants='*'): golden cases and variants of a test that replays them"
    )
    session = config.stash[SESSION] = ReplaySession(config)
    config.pluginmanager.register(session, "regress-replays")
