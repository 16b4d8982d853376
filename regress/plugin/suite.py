"""The golden cases of a session, and the replays that its tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from regress.errors import ConfigError, RegressError

if TYPE_CHECKING:
    from regress.compare.verdicts.overrides import Overrides
    from regress.dump.reader import DumpReader
    from regress.golden.case import GoldenCase
    from regress.plugin.settings import Settings
    from regress.replay.adapter import Adapter
    from regress.replay.cache import ReplayCache
    from regress.replay.foreign import ForeignReplays
    from regress.replay.matrix import Item
    from regress.replay.staging import Selection, Staging
    from regress.replay.variants import Variant


REPLAYS = "replays"
"""Folder of a session's replays, below what its processes share."""
EXPORTS = "exports"
"""Folder of its exported cases."""


@dataclass(frozen=True)
class Broken:
    """A case or a replay that cannot be judged, as a test that fails and says why; ``case`` is its name, if known."""

    id: str
    problem: str
    case: str | None = None


@dataclass
class Suite:
    """What all tests of one process know.

    Attributes:
        settings: the options of this session.
        shared: directory that all processes of the session see.
        variants: the table, with the project's rows.
        overrides: tolerances that the project sets by hand.
        adapter: the function of somebody's own trainer that replays cases, in place of the engine.
        selection: of a case, the updates and quantities that the tests of this session are about; see `Staging`.
    """

    settings: Settings
    shared: Path
    variants: dict[str, Variant]
    overrides: Overrides
    adapter: Adapter | None = None
    selection: dict[str, Selection] = field(default_factory=dict)

    @cached_property
    def broken(self) -> list[Broken]:
        """Cases that cannot be opened, and the case that there is none."""
        return self._opened[1]

    @cached_property
    def cases(self) -> list[GoldenCase]:
        """Every case that can be opened."""
        return self._opened[0]

    @cached_property
    def _opened(self) -> tuple[list[GoldenCase], list[Broken]]:
        from regress.golden.store import GoldenStore

        store = GoldenStore(self.settings.golden_dir)
        found: list[GoldenCase] = []
        broken: list[Broken] = []
        for name in store.names():
            try:
                case = store.case(name)
                case.verify_inputs()
            except RegressError as error:
                broken.append(Broken(f"{name}/damaged", str(error), name))
                continue
            if case.manifest is None:
                advice = f"{case.folder} is not recorded yet: run regress golden record {name}"
                broken.append(Broken(f"{name}/unrecorded", advice, name))
            elif not case.manifest.tolerances:
                advice = f"{case.folder} has no measured tolerances yet: run regress calibrate {name}"
                broken.append(Broken(f"{name}/uncalibrated", advice, name))
            else:
                found.append(case)
        if not found and not broken:
            advice = "correct --golden-dir, or record a case with regress golden record"
            problem = (
                f"{self.settings.golden_dir} holds no golden case, so nothing would be compared: {advice}"
            )
            broken.append(Broken("no-cases", problem))
        return found, broken

    @cached_property
    def cache(self) -> ReplayCache:
        """The replays of this session, judged against the golden values or, in an update, those to be."""
        from regress.replay.cache import ReplayCache

        return ReplayCache(
            self.shared / REPLAYS,
            self.variants,
            scale=self.settings.tolerance_scale,
            overrides=self.overrides,
            keep=self.settings.keep_dumps,
            tokens=self.settings.report is not None,
            golden=self._golden,
            foreign=self._foreign,
        )

    @property
    def _foreign(self) -> ForeignReplays | None:
        from regress.replay.foreign import ForeignReplays

        return None if self.adapter is None else ForeignReplays(self.adapter, self.shared / EXPORTS)

    @cached_property
    def staging(self) -> Staging | None:
        """The updates of this session; None when nothing is updated."""
        from regress.replay.staging import Staging

        update = self.settings.update
        if update is None:
            return None
        return Staging(
            self.shared / "staged",
            everything=update.all,
            selection=self.selection.__getitem__,
            scale=self.settings.tolerance_scale,
            overrides=self.overrides,
        )

    def _golden(self, case: GoldenCase) -> GoldenCase:
        """The case whose values a replay is judged against."""
        if self.staging is None:
            return case
        staged = self.staging.staged(case)
        if staged.case is None:
            raise RegressError(f"the update is refused: {staged.error}")
        return staged.case

    def dump(self, case: str, variant: str, precision: str) -> DumpReader:
        """The dump of a replay, run unless any process of the session did."""
        from regress.golden.store import GoldenStore
        from regress.replay.matrix import Replay
        from regress.replay.variants import Precision

        if variant not in self.variants:
            raise ConfigError(f"there is no variant {variant!r}; choose one of {', '.join(self.variants)}")
        runnable = [str(choice) for choice in Precision if choice is not Precision.BITWISE]
        if precision not in runnable:
            raise ConfigError(f"there is no precision {precision!r}; choose one of {', '.join(runnable)}")
        opened = GoldenStore(self.settings.golden_dir).case(case)
        opened.verify_inputs()
        return self.cache.dump(Replay(opened, self.variants[variant], Precision(precision)))

    def parameters(
        self, cases: str, variants: str, named: Callable[[str], bool] = lambda _: True
    ) -> list[Item | Broken]:
        """The tests of the cases and variants that two lists of patterns name, in the tiers of this session.

        Args:
            named: of the name of a replay, whether its tests are asked for; planning one that is not takes time.

        Raises:
            ConfigError: if a pattern finds nothing, or none of the variants is replayed on any of the cases, or a
                tolerance is set for what nobody recorded.
        """
        from regress.replay.foreign import foreign_items
        from regress.replay.matrix import items, replays
        from regress.replay.variants import TIERS, Extent, select

        self.overrides.check(self.cases)
        extent = Extent(self.settings.matrix)
        known = sorted({broken.case for broken in self.broken if broken.case} | {c.name for c in self.cases})
        chosen = select(known, cases) if known else []
        table = {name: self.variants[name] for name in select(self.variants, variants)}
        if known and not any(
            variant.applies_to(case, extent) for variant in table.values() for case in chosen
        ):
            raise ConfigError(
                f"no variant of {variants!r} is replayed on a case of {cases!r}, so nothing would be compared; "
                f"{', '.join(table)} have cases of their own"
            )
        found: list[Item | Broken] = []
        wanted = [case for case in self.cases if case.name in chosen]
        for replay in replays(wanted, table, TIERS[self.settings.tier], extent):
            if not named(replay.name):
                continue
            try:
                found += items(replay) if self.adapter is None else foreign_items(replay)
            except RegressError as error:
                found.append(Broken(f"{replay.name}/unplanned", str(error), replay.case.name))
        return [*found, *(broken for broken in self.broken if broken.case in (None, *chosen))]
