"""The hooks of a session that replays golden cases: what its processes share, and what is left at its end."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest

from regress.errors import RegressError
from regress.plugin.replays import FIXTURE, MARKER, SUITE, parametrize
from regress.plugin.settings import SETTINGS
from regress.plugin.suite import Broken, Suite
from regress.plugin.summary import SUMMARY

if TYPE_CHECKING:
    from regress.replay.matrix import Item

_SHARED = "regress_shared"


class ReplaySession:
    """Registered when pytest is configured, in the controller of pytest-xdist and in each worker."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._shared: Path | None = None if self._worker is None else Path(self._worker[_SHARED])
        self._deselected: list[pytest.Item] = []
        self._crashed = False

    @property
    def shared(self) -> Path:
        """Directory that all processes of the session see; made when it is first asked for."""
        if self._shared is None:
            self._shared = Path(mkdtemp(prefix="regress-"))
        return self._shared

    def suite(self) -> Suite:
        """The cases and variants, opened when a test first asks for them."""
        if SUITE not in self._config.stash:
            from regress.replay.table import project_variants

            added = self._config.hook.pytest_regress_variants(config=self._config)
            try:
                variants = project_variants(self._config.rootpath, [row for rows in added for row in rows])
            except RegressError as error:
                raise pytest.UsageError(str(error)) from None
            self._config.stash[SUITE] = Suite(self._config.stash[SETTINGS], self.shared, variants)
        return self._config.stash[SUITE]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where the session shares its replays."""
        node.workerinput[_SHARED] = str(self.shared)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Enumerate the golden cases for a test function that asks for them."""
        if FIXTURE not in metafunc.fixturenames:
            return
        try:
            parametrize(metafunc, self.suite())
        except pytest.UsageError as error:  # of the project, so no traceback through this package
            raise pytest.Collector.CollectError(str(error)) from None

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Remember what -k and its like leave out."""
        self._deselected += items

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Settle what an update may change: all of a case, or what the selected tests are about."""
        if self._config.stash[SETTINGS].update is None or SUITE not in self._config.stash:
            return
        suite = self._config.stash[SUITE]
        narrowed = {item.replay.case.name for item in _replayed(self._deselected)}
        wanted: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for item in _replayed(session.items):
            for update in item.replay.plan:
                if (update.step, update.update) == (item.place.step, item.place.update):
                    wanted[item.replay.case.name].add((update.where, item.quantity))
        suite.selection.update({case: found if case in narrowed else None for case, found in wanted.items()})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Remember that a worker died: its share of an update may be missing."""
        self._crashed = self._crashed or error is not None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int | pytest.ExitCode) -> None:
        """Write the updates that tests have prepared, unless the session broke off."""
        settings = self._config.stash[SETTINGS]
        if self._worker is not None or settings.update is None or self._shared is None:
            return
        if not (
            self.shared / "staged"
        ).is_dir():  # no test replayed a golden case, so torch is not needed here
            return
        broken_off = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        summary = self._config.stash[SUMMARY]
        if broken_off or self._crashed:
            summary.note("no golden case was written, because the session broke off: run the update again")
            return
        from regress.plugin.golden_update import apply_staged

        try:
            summary.add(
                apply_staged(self.shared / "staged", settings.golden_dir, review=settings.update.review)
            )
        except RegressError as error:
            raise pytest.UsageError(str(error)) from None

    def pytest_unconfigure(self) -> None:
        """Remove what the processes shared."""
        if self._worker is None and self._shared is not None:
            shutil.rmtree(self._shared, ignore_errors=True)


SESSION = pytest.StashKey[ReplaySession]()


def suite_of(config: pytest.Config) -> Suite:
    """The suite of a session; `pytest.UsageError` for variants that cannot be meant."""
    session: ReplaySession = config.stash[SESSION]
    return session.suite()


def _replayed(items: Iterable[pytest.Item]) -> Iterable[Item]:
    """What the tests of golden cases are about."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        found = parameters.get(FIXTURE)
        if found is not None and not isinstance(found, Broken):
            yield found


def register(config: pytest.Config) -> None:
    """Add the session's hooks and its marker."""
    config.addinivalue_line(
        "markers", f"{MARKER}(cases='*', variants='*'): golden cases and variants of a test that replays them"
    )
    config.stash[SESSION] = ReplaySession(config)
    config.pluginmanager.register(config.stash[SESSION], "regress-replays")
