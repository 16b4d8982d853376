"""Golden cases as tests: enumerated at collection, each replay run once per session, each test one verdict.

    def test_golden(regress_record):
        regress_record.check()

becomes one test for every case, variant, step, microbatch and quantity. ``@pytest.mark.regress(cases="dense*",
variants="packed*")`` narrows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regress.errors import RegressError

if TYPE_CHECKING:
    from regress.golden.case import GoldenCase
    from regress.plugin.options import Settings
    from regress.replay.cache import ReplayCache
    from regress.replay.matrix import Item, Replay
    from regress.replay.variants import Variant

FIXTURE = "regress_record"
MARKER = "regress"


@dataclass(frozen=True)
class Broken:
    """A case that cannot be replayed, as a test that fails and says why."""

    id: str
    problem: str


@dataclass
class Suite:
    """The golden cases of a session and the replays that its tests share.

    Attributes:
        settings: the options of this session.
        shared: directory that all processes of the session see.
        variants: the table, with the user's rows.
    """

    settings: Settings
    shared: Path
    variants: dict[str, Variant]
    broken: list[Broken] = field(default_factory=list)

    @cached_property
    def cases(self) -> list[GoldenCase]:
        """Every case that can be opened; the others are in ``broken``."""
        from regress.golden.store import GoldenStore

        store = GoldenStore(self.settings.golden_dir)
        found = []
        for name in store.names():
            try:
                case = store.case(name)
                if case.manifest is None:
                    self.broken.append(
                        Broken(
                            f"{name}/unrecorded",
                            f"{case.folder} is not recorded yet: run regress golden record {name}",
                        )
                    )
                else:
                    found.append(case)
            except RegressError as error:
                self.broken.append(Broken(f"{name}/damaged", str(error)))
        if not found and not self.broken:
            self.broken.append(
                Broken(
                    "no-cases",
                    f"{self.settings.golden_dir} holds no golden case, so nothing would be compared: correct --golden-dir, "
                    "or record a case with regress golden record",
                )
            )
        return found

    @cached_property
    def cache(self) -> ReplayCache:
        """The replays of this session."""
        from regress.replay.cache import ReplayCache

        return ReplayCache(
            self.shared, self.variants, self.settings.tolerance_scale, self.settings.keep_dumps is not None
        )

    def replays(self, cases: str, variants: str) -> Iterator[Replay]:
        """The replays that two lists of patterns name, in the tiers of this session."""
        from regress.replay.matrix import replays
        from regress.replay.variants import TIERS, select

        chosen = select([case.name for case in self.cases], cases) if self.cases else []
        table = {name: self.variants[name] for name in select(self.variants, variants)}
        wanted = [case for case in self.cases if case.name in chosen]
        yield from replays(wanted, table, TIERS[self.settings.tier])

    def parameters(self, cases: str, variants: str) -> list[Item | Broken]:
        """The tests of the replays that two lists of patterns name."""
        from regress.replay.matrix import items

        found: list[Item | Broken] = []
        for replay in self.replays(cases, variants):
            try:
                found += items(replay)
            except RegressError as error:
                found.append(Broken(f"{replay.name}/unplanned", str(error)))
        return [*found, *self.broken]


class RecordCheck:
    """What a test function gets: one quantity at one place of one replay."""

    def __init__(self, item: Item | Broken, suite: Suite, request: pytest.FixtureRequest) -> None:
        self.item = item
        self._suite = suite
        self._request = request

    def check(self) -> None:
        """Fail unless every tensor of the quantity is within its tolerance of the golden values."""
        __tracebackhide__ = True
        from regress.plugin.failures import explain_replay

        item = self.item
        if isinstance(item, Broken):
            pytest.fail(item.problem, pytrace=False)
        found = self._suite.cache.outcome(item.replay)
        if found.error is not None:
            pytest.fail(f"{item.replay.name} cannot be replayed: {found.error}", pytrace=False)
        outcome = found.outcomes.get((str(item.place), item.quantity))
        if outcome is None or not outcome.tensors:
            pytest.fail(
                f"{item.id}: nothing was compared; the replay recorded no {item.quantity} there, look at its dump with "
                "--regress-keep-dumps",
                pytrace=False,
            )
        if outcome.failed:
            headline, details = explain_replay(item, outcome, found, self._request)
            self._request.node.add_report_section("call", "regress", details)
            pytest.fail(headline, pytrace=False)
        if outcome.closest is not None and self._suite.settings.report is not None:
            self._request.node.user_properties.append(
                ("regress_verdict", _row(item, outcome.closest.to_json()))
            )


def _row(item: Item, verdict: dict[str, Any]) -> dict[str, Any]:
    """The closest call of a passing test, as plain values that survive a worker."""
    replay = item.replay
    names = {"case": replay.case.name, "variant": replay.variant.name, "precision": str(replay.precision)}
    return {
        **names,
        "place": str(item.place),
        **{key: verdict[key] for key in ("quantity", "name", "multiple", "relative")},
    }


def parametrize(metafunc: pytest.Metafunc, suite: Suite) -> None:
    """One test for each item, if the test function asks for the fixture ``regress_record``."""
    if FIXTURE not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker(MARKER)
    chosen: dict[str, Any] = {"cases": "*", "variants": "*", **(marker.kwargs if marker is not None else {})}
    if set(chosen) != {"cases", "variants"} or (marker is not None and marker.args):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: the marker regress takes cases= and variants=, each a pattern or several "
            "with commas between them"
        )
    try:
        parameters = suite.parameters(chosen["cases"], chosen["variants"])
    except RegressError as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from None
    metafunc.parametrize(FIXTURE, parameters, ids=[parameter.id for parameter in parameters], indirect=True)
