"""Golden cases as tests: enumerated at collection, each replay run once a session, each test one verdict.

    def test_golden(regress_record):
        regress_record.check()

becomes one test for every case, variant, step, microbatch and quantity. ``@pytest.mark.regress(cases="dense*",
variants="packed*")`` narrows it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from regress.errors import RegressError
from regress.plugin.rows import FailedRow, ForeignRow, tell_calls, tell_failed, tell_foreign, tell_properties
from regress.plugin.state import owner
from regress.plugin.suite import Broken, Suite

if TYPE_CHECKING:
    from regress.replay.matrix import Item
    from regress.replay.outcome import ReplayOutcome

FIXTURE = "regress_record"
MARKER = "regress"
SUITE = pytest.StashKey[Suite]()


@pytest.fixture
def regress_record(request: pytest.FixtureRequest) -> RecordCheck:
    """Return one quantity at one place of one replay of a golden case."""
    return RecordCheck(request.param, request.config.stash[SUITE], request.node)


class RecordCheck:
    """Value of the fixture `regress_record`.

    Attributes:
        item: item under test; a `Broken` case fails every test.
    """

    def __init__(self, item: Item | Broken, suite: Suite, node: pytest.Item) -> None:
        self.item = item
        self._suite = suite
        self._node = node

    def check(self) -> None:
        """Fail unless every tensor of the quantity is within its tolerance of the golden values."""
        __tracebackhide__ = True
        item = self.item
        if isinstance(item, Broken):
            pytest.fail(item.problem, pytrace=False)
        found = self._suite.cache.outcome(item.replay)
        if found.error is not None:
            self._tell_failed()
            pytest.fail(f"{item.replay.name} cannot be replayed: {found.error}", pytrace=False)
        self._leave_out(item, found)
        if item.replay.variant.name == "base" and item.quantity == "coverage":
            for name, reason in self._suite.left_out.items():
                if name.startswith(f"{item.replay.case.name}/"):
                    tell_foreign(self._node, ForeignRow("", name, reason))
        outcome = found.outcomes.get((str(item.place), item.quantity))
        if outcome is None or not outcome.tensors:
            self._tell_failed()
            pytest.fail(
                f"nothing was compared: the replay recorded no {item.quantity} at {item.place} of {item.replay.name}; "
                "look at its dump with --regress-keep-dumps",
                pytrace=False,
            )
        told = outcome.calls(item.replay.name, str(item.replay.precision), owner(self._node))
        tell_properties(self._node, told[0], found)
        if self._suite.settings.report is not None:
            tell_calls(self._node, told)
        if outcome.failed:
            from regress.plugin.failures import explain_replay

            self._tell_failed()
            updates = self._suite.adapter is None
            headline, details = explain_replay(item, outcome, found, self._node, updates=updates)
            self._node.add_report_section("call", "regress", details)
            pytest.fail(headline, pytrace=False)

    def _tell_failed(self) -> None:
        assert not isinstance(self.item, Broken)
        tell_failed(self._node, FailedRow(self.item.replay.name, self.item.quantity))

    def _leave_out(self, item: Item, found: ReplayOutcome) -> None:
        """Skip, and count, what a user's own trainer, or a wire between trainer and service, does not support."""
        adapter, configured = self._suite.adapter, self._suite.configured
        if adapter is None and not configured:
            if found.unsupported is not None:
                tell_foreign(self._node, ForeignRow("", item.replay.name, found.unsupported))
                pytest.skip(f"{item.replay.name} is not possible: {found.unsupported}")
            return
        name = " and ".join(configured) if adapter is None else adapter.name
        replay, reason = item.replay.name, found.unsupported
        lacks = adapter is not None and reason is None and item.quantity not in found.quantities
        tell_foreign(self._node, ForeignRow(name, replay, reason, item.quantity if lacks else None))
        if reason is not None:
            pytest.skip(f"{name} does not support {replay}: {reason}")
        if lacks:
            pytest.skip(f"{name} did not record {item.quantity}")


def parametrize(metafunc: pytest.Metafunc, suite: Callable[[], Suite]) -> None:
    """Make one test for each item, if the test function asks for the fixture."""
    if FIXTURE not in metafunc.fixturenames:
        return
    stated = metafunc.definition.nodeid
    marker = metafunc.definition.get_closest_marker(MARKER)
    chosen: dict[str, Any] = {"cases": "*", "variants": "*", **(marker.kwargs if marker is not None else {})}
    texts = all(isinstance(value, str) for value in chosen.values())
    if set(chosen) != {"cases", "variants"} or not texts or (marker is not None and marker.args):
        raise pytest.Collector.CollectError(
            f"{stated}: the marker {MARKER} takes cases= and variants=, each a pattern or several with commas between "
            "them"
        )
    try:
        parameters = _parameters(metafunc, suite(), (chosen["cases"], chosen["variants"]))
    except RegressError as error:
        raise pytest.Collector.CollectError(f"{stated}: {error}") from None
    metafunc.parametrize(FIXTURE, parameters, ids=[parameter.id for parameter in parameters], indirect=True)


def _parameters(metafunc: pytest.Metafunc, suite: Suite, patterns: tuple[str, str]) -> list[Item | Broken]:
    """Return the tests that could be selected; if there are none, the first of all, for pytest to deselect."""
    from regress.plugin.narrowing import choices

    for wanted in choices(metafunc):
        found = list(suite.parameters(*patterns, wanted))
        if found:
            if wanted.narrowed and suite.adapter is None and not metafunc.config.getoption("collectonly"):
                _warm_ranks(found)
            return found
    return list(islice(suite.parameters(*patterns), 1))


def _warm_ranks(chosen: list[Item | Broken]) -> None:
    """Make the ranks' forkserver import the modules of replays while pytest collects further files."""
    if any(not isinstance(item, Broken) and item.replay.world_size > 1 for item in chosen):
        from regress.replay.pool import shared_pool

        shared_pool().warm()
