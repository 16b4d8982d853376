"""Golden cases as tests: one for each rank and microbatch of a replay, whose quantities are subtests.

    def test_golden(regress_record):
        regress_record.check()

``@pytest.mark.regress(cases="dense*", variants="packed*")`` narrows it, and so does ``-k``, down to single quantities:
see `regress.plugin.quantity_selection`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from regress.credential_redaction import redacted
from regress.errors import RegressError
from regress.plugin.pytest_options import reproduce, said
from regress.plugin.quantity_selection import FIXTURE, asked, chosen, selector, starts_of
from regress.plugin.replay_parts import Broken, ReplayPart
from regress.plugin.replay_suite import Suite
from regress.plugin.session_settings import SETTINGS
from regress.plugin.session_state import owner
from regress.plugin.worker_rows import (
    NOTE,
    FailedRow,
    ForeignRow,
    send_calls,
    send_failed_row,
    send_foreign_row,
    send_judged_count,
    send_properties,
)

if TYPE_CHECKING:
    from regress.golden.golden_case import GoldenCase
    from regress.replay.replay_outcome import Outcome, ReplayOutcome
    from regress.replay.test_matrix import Item


MARKER = "regress"
SUITE = pytest.StashKey[Suite]()
DETAILS = pytest.StashKey[str]()
"""Details of the failing quantity that is reported next."""


@pytest.fixture
def regress_record(request: pytest.FixtureRequest, subtests: pytest.Subtests) -> Iterator[RecordCheck]:
    """Yield the quantities of one rank and microbatch of a replay of a golden case."""
    found = RecordCheck(request.param, request.config.stash[SUITE], request.node, subtests)
    yield found
    if not request.config.getoption("setuponly", False):
        send_judged_count(request.node, found.judged)


class RecordCheck:
    """Value of the fixture `regress_record`.

    Attributes:
        part: part of a replay under test; a `Broken` case fails.
        judged: number of quantities that were compared with golden values.
    """

    def __init__(
        self, part: ReplayPart | Broken, suite: Suite, node: pytest.Item, subtests: pytest.Subtests
    ) -> None:
        self.part = part
        self.judged = 0
        self._suite = suite
        self._node = node
        self._subtests = subtests

    def check(self) -> None:
        """Fail unless every tensor of every quantity is within its tolerance of the golden values."""
        if isinstance(self.part, Broken):
            pytest.fail(self.part.problem, pytrace=False)
        part, items = self.part, chosen(self._node, self.part)
        found = self._suite.cache.outcome(part.replay)
        if found.error is not None:
            self._tell_failed(part, items)
            pytest.fail(f"{part.replay.name} cannot be replayed: {found.error}", pytrace=False)
        self._node.user_properties += [(NOTE, note) for note in found.notes]
        items = self._recorded(part, items, found)
        self._tell_left_out(part, items)
        failed: list[Item] = []
        try:
            for item in items:
                outcome = found.outcomes.get((str(item.place), item.quantity))
                if outcome is None or not outcome.tensors:
                    failed.append(item)
                    self._fail(item, _nothing_compared(item))
                    continue
                self.judged += 1
                if outcome.failed:
                    failed.append(item)
                    self._fail(item, *self._explained(item, part, outcome, found))
                elif self._shows_passed:
                    with self._subtests.test(item.name):
                        pass
        finally:  # -x raises the first failure
            self._tell(part, items, found)
            if failed:
                self._tell_failed(part, failed)
        if failed and self._node.get_closest_marker("xfail") is not None:  # else pytest fails the test itself
            pytest.fail(f"{len(failed)} of {len(items)} quantities failed", pytrace=False)

    @property
    def _shows_passed(self) -> bool:
        """True if passing subtests are shown (``-v``); else they would only cost time."""
        return self._node.config.get_verbosity(pytest.Config.VERBOSITY_SUBTESTS) > 0

    def _fail(self, item: Item, headline: str, details: str | None = None) -> None:
        with self._subtests.test(item.name):
            if details is not None:
                self._node.stash[DETAILS] = details
            pytest.fail(headline, pytrace=False)

    def _explained(
        self, item: Item, part: ReplayPart, outcome: Outcome, found: ReplayOutcome
    ) -> tuple[str, str]:

        updates = self._suite.adapter is None
        return explain_replay(item, part, outcome, found, self._node, updates=updates)

    def _tell(self, part: ReplayPart, items: Sequence[Item], found: ReplayOutcome) -> None:
        """Send all verdicts to the report of the session, and the gravest or closest one to a JUnit file."""
        settings, test = self._suite.settings, owner(self._node)
        if settings.report is None and not self._node.config.getoption("xmlpath", None):
            return
        outcomes = (found.outcomes.get((str(item.place), item.quantity)) for item in items)
        where, precision = part.replay.name, str(part.replay.precision)
        calls = [call for one in outcomes if one is not None for call in one.calls(where, precision, test)]
        if calls:
            failed = (call for call in calls if not call.verdict.ok)
            closest = max(calls, key=lambda call: call.verdict.multiple)
            send_properties(self._node, next(failed, closest), found)
        if settings.report is not None:
            send_calls(self._node, calls)

    def _tell_failed(self, part: ReplayPart, items: Sequence[Item]) -> None:
        send_failed_row(
            self._node, FailedRow(part.replay.name, [selector(self._node, part, item) for item in items])
        )

    def _tell_left_out(self, part: ReplayPart, items: Sequence[Item]) -> None:
        """Count the replays of a case that were left out, with its first replay."""
        if part.replay.variant.name != "base" or all(item.quantity != "coverage" for item in items):
            return
        for name, reason in self._suite.left_out.items():
            if name.startswith(f"{part.replay.case.name}/") and asked(self._node, part, name):
                send_foreign_row(self._node, ForeignRow("", name, reason))

    def _recorded(self, part: ReplayPart, items: Sequence[Item], found: ReplayOutcome) -> Sequence[Item]:
        """Return what can be judged; skip, and count, what a user's own trainer, or a wire between trainer and
        service, does not support.
        """
        adapter, configured = self._suite.adapter, self._suite.configured
        name = " and ".join(configured) if adapter is None else adapter.name
        replay, reason = part.replay.name, found.unsupported
        if name or reason is not None:
            send_foreign_row(self._node, ForeignRow(name, replay, reason))
        if reason is not None:  # the session fails if nothing else was judged either
            pytest.skip(
                f"{name} does not support {replay}: {reason}"
                if name
                else f"{replay} is not possible: {reason}"
            )
        if adapter is None:
            return items
        lacking = dict.fromkeys(item.quantity for item in items if item.quantity not in found.quantities)
        for quantity in lacking:
            send_foreign_row(self._node, ForeignRow(name, replay, None, quantity))
        left = [item for item in items if item.quantity not in lacking]
        if not left:  # the end of the session tells it, and fails if nothing was judged
            pytest.skip(f"{name} did not record {', '.join(lacking)}")
        return left


def _nothing_compared(item: Item) -> str:
    return (
        f"nothing was compared: the replay recorded no {item.quantity} at {item.place} of {item.replay.name}; "
        "look at its dump with --regress-keep-dumps"
    )


def parametrize(metafunc: pytest.Metafunc, suite: Callable[[], Suite]) -> None:
    """Make one test for each part of each replay, if the test function asks for the fixture."""
    if FIXTURE not in metafunc.fixturenames:
        return
    stated = metafunc.definition.nodeid
    marker = metafunc.definition.get_closest_marker(MARKER)
    patterns: dict[str, Any] = {
        "cases": "*",
        "variants": "*",
        **(marker.kwargs if marker is not None else {}),
    }
    texts = all(isinstance(value, str) for value in patterns.values())
    if set(patterns) != {"cases", "variants"} or not texts or (marker is not None and marker.args):
        raise pytest.Collector.CollectError(
            f"{stated}: the marker {MARKER} takes cases= and variants=, each a pattern or several with commas between "
            "them"
        )
    try:
        named, asked = (patterns["cases"], patterns["variants"]), _asked(metafunc.config)
        found = [*suite().parts(*named, asked)] or [
            *suite().parts(*named)
        ]  # pytest tells of ids that do not exist
    except RegressError as error:
        raise pytest.Collector.CollectError(f"{stated}: {error}") from None
    metafunc.parametrize(FIXTURE, found, ids=[part.id for part in found], indirect=True)


def _asked(config: pytest.Config) -> Callable[[str], bool]:
    """Return the predicate of a text: False if no test whose id begins so is asked for, by its id or by ``-k``."""
    ids = [argument.partition("[")[2] for argument in config.args]
    starts = starts_of(config)

    def asked(text: str) -> bool:
        begins = all(start.startswith(text.lower()) or text.lower().startswith(start) for start in starts)
        return begins and (not all(ids) or any(text in id for id in ids))

    return asked


_ENVIRONMENT = pytest.StashKey[dict[str, list[str]]]()


def explain_replay(
    item: Item,
    part: ReplayPart,
    outcome: Outcome,
    replay: ReplayOutcome,
    node: pytest.Item,
    *,
    updates: bool = True,
) -> tuple[str, str]:
    """Return the first line and the details of a failing quantity of a test.

    Args:
        updates: False for values of a user's own trainer, which cannot become golden. Those that break an invariant
            cannot either: no update is advised that would be refused.
    """
    from regress.report.verdict_text import explain, headline

    updates = updates and not any(verdict.quantity == "invariants" for verdict in replay.failed)
    details = explain(
        outcome.failed,
        where=item.id,
        divergence=replay.divergence,
        diagnoses=replay.diagnoses,
        environment=environment_differences(item.replay.case, node.config),
        commands=commands(item, part, node, updates=updates) | _report(item, outcome, node),
    )
    return headline(outcome.failed[0], item.replay.name), details


def _report(item: Item, outcome: Outcome, node: pytest.Item) -> dict[str, str]:
    """Return the link to this test in the report of the session."""
    from regress.report.verdict_entries import link

    folder = node.config.stash[SETTINGS].report
    return {} if folder is None else {"report": link(folder, item.replay.name, outcome.failed[0])}


def environment_differences(case: GoldenCase, config: pytest.Config) -> list[str]:
    """Return the differences from the environment of the recording; computed once per case, as git takes its time."""
    found = config.stash.setdefault(_ENVIRONMENT, {})
    if case.name not in found:
        from regress.golden.golden_provenance import differences
        from regress.replay.case_truth import provenance_of

        now = provenance_of(case)
        found[case.name] = [] if case.manifest is None else differences(case.manifest.provenance, now)
    return found[case.name]


def commands(item: Item, part: ReplayPart, node: pytest.Item, *, updates: bool = True) -> dict[str, str]:
    """Return the commands that repeat this test, keep its dump, and accept new values if an update can."""
    here = selector(node, part, item)
    again = reproduce(node.config, node.nodeid, here)
    found = {"reproduce": again, "keep the dump": f"{again} --regress-keep-dumps"}
    if updates and item.quantity != "trajectory" and item.replay.precision != "bitwise":
        run = redacted(shlex.join(["pytest", *said(node.config)]))
        quantity = here.rpartition("/")[2]
        found["update"] = f"{run} --update-golden -k {shlex.quote(f'[{item.replay.name}/ and /{quantity}')}"
    return found
