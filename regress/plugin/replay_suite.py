"""Golden cases of a session, and the replays that its tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regress.errors import ConfigError, RegressError
from regress.plugin.replay_parts import Broken, ReplayPart, parts

if TYPE_CHECKING:
    from regress.compare.verdicts.tolerance_overrides import Overrides
    from regress.dump.dump_reader import DumpReader
    from regress.golden.golden_case import GoldenCase
    from regress.golden.golden_directory import GoldenStore
    from regress.plugin.session_settings import Settings
    from regress.replay.drift_update import Selection, Staging
    from regress.replay.replay_cache import ReplayCache
    from regress.replay.replayer_registry import Replayers
    from regress.replay.test_matrix import Replay
    from regress.replay.user_trainer import Adapter
    from regress.replay.variant import Extent, Variant


EVERY_VARIANT = "*"

REPLAYS = "replays"
"""Folder of a session's replays, below the shared directory."""
STAGED = "staged"
"""Folder of staged goldens, beside it."""
EXPORTS = "exports"
"""Folder of exported cases, beside it."""


@dataclass
class Suite:
    """State shared by all tests of one process.

    Attributes:
        settings: the options of this session.
        shared: directory that all processes of the session see.
        variants: the table, with the project's rows.
        overrides: tolerances that the project sets by hand.
        configured: settings applied to every variant, which the variants already include.
        adapter: function of a user's own trainer that replays cases in place of the engine.
        selection: updates and quantities of a case that the tests of this session cover; see `Staging`.
        left_out: replay -> why it is not possible.
    """

    settings: Settings
    shared: Path
    variants: dict[str, Variant]
    overrides: Overrides
    adapter: Adapter | None = None
    configured: Mapping[str, Any] = field(default_factory=dict)
    selection: dict[str, Selection] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    _opened: dict[str, GoldenCase | Broken] = field(default_factory=dict)

    @cached_property
    def names(self) -> list[str]:
        """Names of all cases."""
        return self._store.names()

    @cached_property
    def cases(self) -> list[GoldenCase]:
        """Every case that can be opened."""
        opened = (self.opened(name) for name in self.names)
        return [case for case in opened if not isinstance(case, Broken)]

    def opened(self, name: str) -> GoldenCase | Broken:
        """Return a case, verified when it is first asked for."""
        if name not in self._opened:
            self._opened[name] = self._open(name)
        return self._opened[name]

    @property
    def _store(self) -> GoldenStore:
        from regress.golden.golden_directory import GoldenStore

        return GoldenStore(self.settings.golden_dir)

    def _open(self, name: str) -> GoldenCase | Broken:
        try:
            case = self._store.case(name)
            case.verify_inputs()
        except RegressError as error:
            return Broken(f"{name}/damaged", str(error), name)
        if case.manifest is None:
            advice = f"{case.folder} is not recorded yet: run regress golden record {name}"
            return Broken(f"{name}/unrecorded", advice, name)
        if not case.manifest.tolerances:
            advice = f"{case.folder} has no measured tolerances yet: run regress golden calibrate {name}"
            return Broken(f"{name}/uncalibrated", advice, name)
        return case

    @cached_property
    def cache(self) -> ReplayCache:
        """Replays of this session, judged against the golden values or, in an update, the staged ones."""
        from regress.replay.replay_cache import ReplayCache
        from regress.replay.replayer_registry import Judging

        tokens = self.settings.report is not None
        return ReplayCache(
            self.shared / REPLAYS,
            self.variants,
            self.replayers,
            Judging(self.settings.tolerance_scale, self.overrides, self._golden, tokens),
            keep=self.settings.keep_dumps,
            settings=self.configured,
        )

    @cached_property
    def replayers(self) -> Replayers:
        """Ways to compute and judge the replays: the registered ones, or a user's own trainer."""
        from regress.replay.replayer_registry import Replayers

        if self.adapter is None:
            return Replayers()
        from regress.replay.user_trainer_replays import ForeignReplayer

        return Replayers(own=ForeignReplayer(self.adapter, self.shared / EXPORTS))

    @cached_property
    def staging(self) -> Staging | None:
        """Updates of this session; None when nothing is updated."""
        from regress.replay.drift_update import Staging

        update = self.settings.update
        if update is None:
            return None
        return Staging(
            self.shared / STAGED,
            everything=update.all,
            selection=self.selection.__getitem__,
            scale=self.settings.tolerance_scale,
            overrides=self.overrides,
        )

    def _golden(self, case: GoldenCase) -> GoldenCase:
        """Return the case whose values a replay is judged against."""
        if self.staging is None:
            return case
        staged = self.staging.staged(case)
        if staged.case is None:
            raise RegressError(f"the update is refused: {staged.error}")
        return staged.case

    def dump(self, case: str, variant: str, precision: str) -> DumpReader:
        """Return the dump of a replay, which runs unless another process of the session ran it."""
        from regress.golden.golden_directory import GoldenStore
        from regress.replay.test_matrix import Replay
        from regress.replay.variant import Precision

        if variant not in self.variants:
            raise ConfigError(f"there is no variant {variant!r}; choose one of {', '.join(self.variants)}")
        runnable = [str(choice) for choice in Precision if choice is not Precision.BITWISE]
        if precision not in runnable:
            raise ConfigError(f"there is no precision {precision!r}; choose one of {', '.join(runnable)}")
        opened = GoldenStore(self.settings.golden_dir).case(case)
        opened.verify_inputs()
        return self.cache.dump(Replay(opened, self.variants[variant], Precision(precision)))

    def parts(
        self, cases: str, variants: str, asked: Callable[[str], bool] = lambda _: True
    ) -> Iterator[ReplayPart | Broken]:
        """Yield the tests of the cases and variants that two lists of patterns name, in the tiers of this session.

        Args:
            asked: predicate of the start of an id: False if no test is wanted whose id begins so.

        Raises:
            ConfigError: if a pattern finds nothing, or none of the variants is replayed on any of the cases, or a
                tolerance is set for what nobody recorded.
        """
        from regress.replay.variant import Extent
        from regress.replay.variant_names import select

        if self.overrides.rows:
            self.overrides.check(self.cases)
        extent = Extent(self.settings.matrix)
        table = {name: self.variants[name] for name in select(self.variants, variants)}
        if not self.names:
            advice = "correct --golden-dir, or record a case with regress golden record"
            problem = (
                f"{self.settings.golden_dir} holds no golden case, so nothing would be compared: {advice}"
            )
            yield Broken("no-cases", problem)
            return
        chosen = select(self.names, cases)
        # in the reduced matrix the other cases decide on which case a variant is replayed
        needed = [name for name in chosen if extent is Extent.REDUCED or asked(f"{name}/")]
        opened = [self.opened(name) for name in needed]
        whole = len(needed) == len(chosen)
        for replay in self._replays(opened, table, extent, (cases, variants), whole=whole):
            if asked(replay.name):
                yield from self._parts(replay, extent)
        yield from (case for case in opened if isinstance(case, Broken))

    def _replays(
        self,
        opened: Sequence[GoldenCase | Broken],
        table: Mapping[str, Variant],
        extent: Extent,
        patterns: tuple[str, str],
        *,
        whole: bool,
    ) -> list[Replay]:
        """Return the replays of the cases that can be opened; ``whole`` says that these are all that are named."""
        from regress.replay.test_matrix import combinations, left_out
        from regress.replay.variant import TIERS

        (cases_named, named), reasons = patterns, dict[str, str | None]()
        cases = [case for case in opened if not isinstance(case, Broken)]
        found = list(combinations(cases, table, TIERS[self.settings.tier], extent))
        if named != EVERY_VARIANT:
            found += self._unmet(found, cases, table)
            reasons = {one.name: left_out(one) if one.variant.follows_traits else None for one in found}
        if whole and cases and (not found or (reasons and all(reasons.values()))):
            example = "".join(f" ({name}: {why})" for name, why in [*reasons.items()][:1])
            raise ConfigError(f"""no variant of {named!r} is replayed on a case of {cases_named!r}, so nothing would be
            compared; {", ".join(table)} have cases of their own{example}""")
        return found

    def _unmet(
        self, found: Sequence[Replay], opened: Sequence[GoldenCase], table: Mapping[str, Variant]
    ) -> Iterator[Replay]:
        """Yield the replays of variants that are asked for by name and that the matrix has on none of the cases."""
        from regress.replay.test_matrix import combinations
        from regress.replay.variant import TIERS, Extent

        met = {replay.variant.name for replay in found}
        rows = {name: row for name, row in table.items() if name not in met and row.follows_traits}
        yield from combinations(opened, rows, TIERS[self.settings.tier], Extent.FULL)

    def _parts(self, replay: Replay, extent: Extent) -> Iterator[ReplayPart | Broken]:
        """Yield the tests of a replay; for one that cannot be made, the test that reports it."""
        from regress.replay.extra_settings import conflict
        from regress.replay.test_matrix import belongs, left_out

        try:
            if not belongs(replay):
                return
            applies = conflict(replay.variant, self.configured) is None  # else the run tells
            reason = left_out(replay, extent) if applies else None
            if reason is not None:
                self.left_out[replay.name] = reason
                return
            yield from [*parts(replay, self.replayers.of(replay.variant).items(replay))]
        except RegressError as error:
            yield Broken(f"{replay.name}/unplanned", str(error), replay.case.name)
