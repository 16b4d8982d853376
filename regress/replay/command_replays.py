"""Run of many replays from the command line: their selection, their execution and their results."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.compare.diagnosis.first_divergence import Divergence
from regress.compare.diagnosis.probable_cause import Diagnosis
from regress.compare.verdicts.tolerance_overrides import Overrides, read_overrides
from regress.dump.dump_files import remove_tree
from regress.errors import ConfigError, GoldenError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore, project_root
from regress.replay.engine_replayer import overrides_on
from regress.replay.replay_cache import ReplayCache
from regress.replay.replay_configuration import replay_config
from regress.replay.replay_outcome import ReplayOutcome
from regress.replay.replay_pool import standstill_of
from regress.replay.replayer_registry import Judging, Machine, Replayers
from regress.replay.temporary_workspace import Workspace
from regress.replay.test_matrix import Replay, replays
from regress.replay.user_trainer import Adapter, project_adapter
from regress.replay.variant import EVERY, TIERS, Extent, Variant
from regress.replay.variant_names import choose, overrides_of, select
from regress.replay.variant_table import project_variants
from regress.report.failure_groups import Group, grouped
from regress.report.token_values import TokenTable
from regress.report.verdict_entries import Call


@dataclass
class Results:
    """Results of replays, in their order.

    Attributes:
        calls: replay -> its verdicts: all that failed, and of each place and quantity the closest.
        errors: replay -> why it could not be judged.
        failed: replays with a verdict that is not ok.
        tensors: number of compared tensors.
        tokens: token values of the failed replays, or of the closest one.
        divergences, diagnoses: first divergences and probable causes of the failed replays.
        cases: replayed cases, by name.
        unsupported: replay -> reason it is not possible here: of a user's own trainer, or an absent package.
        notes: what passed and was not judged, a sentence each -> the replays.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    tensors: int = 0
    tokens: list[TokenTable] = field(default_factory=list)
    divergences: dict[str, Divergence] = field(default_factory=dict)
    diagnoses: dict[str, list[Diagnosis]] = field(default_factory=dict)
    cases: dict[str, GoldenCase] = field(default_factory=dict)
    unsupported: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, replay: Replay, outcome: ReplayOutcome) -> None:
        """Add an outcome."""
        self.cases[replay.case.name] = replay.case
        if outcome.error is not None:
            self.errors[replay.name] = outcome.error
            return
        if outcome.unsupported is not None:
            self.unsupported[replay.name] = outcome.unsupported
            return
        for note in outcome.notes:
            self.notes.setdefault(note, []).append(replay.name)
        if outcome.failed:
            self.failed.append(replay.name)
        if outcome.divergence is not None:
            self.divergences[replay.name] = outcome.divergence
            self.diagnoses[replay.name] = outcome.diagnoses
        self.tensors += sum(found.tensors for found in outcome.outcomes.values())
        self.calls[replay.name] = [
            call
            for found in outcome.outcomes.values()
            for call in found.calls(replay.name, str(replay.precision))
        ]

    @property
    def all_calls(self) -> list[Call]:
        """Verdicts of all replays."""
        return [call for calls in self.calls.values() for call in calls]

    def groups(self) -> list[Group]:
        """Group failing replays that broke alike, those with most failures first."""
        failed = {
            name: [call.verdict.quantity for call in self.calls[name] if not call.verdict.ok]
            for name in self.failed
        }
        return grouped(failed, self.divergences, self.diagnoses, {})

    @property
    def exit_code(self) -> int:
        """Exit code: 0 all within tolerance, 1 something is not, 2 something could not be judged."""
        nothing = self.unsupported and not self.calls
        return 2 if self.errors or nothing else int(bool(self.failed))

    def require(self, names: Sequence[str]) -> None:
        """Take the first replay of each of these cases, asked for by name, for an error if none was possible."""
        judged = {_case_of(replay) for replay in (*self.calls, *self.errors)}
        for replay in list(self.unsupported):
            case = _case_of(replay)
            if case in names and case not in judged:
                judged.add(case)
                self.errors[replay] = self.unsupported.pop(replay)

    @property
    def left_out(self) -> list[str]:
        """Replays that are not possible here, and what was not judged: a sentence for each reason."""
        found: dict[str, list[str]] = {}
        for replay, reason in self.unsupported.items():
            found.setdefault(reason, []).append(replay)
        return [
            *(f"not supported: {_some(replays)}: {reason}" for reason, replays in found.items()),
            *(f"{note} ({_some(replays)})" for note, replays in self.notes.items()),
        ]


def _case_of(replay: str) -> str:
    return replay.partition("/")[0]


def _some(replays: Sequence[str]) -> str:
    further = len(replays) - _NAMED
    return ", ".join(replays[:_NAMED]) + (f" and {further} more" if further > 0 else "")


_NAMED = 3
"""Replays named in a sentence; the others are counted."""


def variant_table() -> dict[str, Variant]:
    """Return the variants of the project around the current directory."""
    root = project_root()
    return project_variants(Path() if root is None else root)


def adapter_around() -> Adapter | None:
    """Return the adapter that ``[tool.regress] replay`` of the project around the current directory names,
    or None.
    """
    root = project_root()
    return None if root is None else project_adapter(root)


def project_overrides(store: GoldenStore) -> Overrides:
    """Return the tolerances that the project around the current directory sets by hand.

    Raises:
        ConfigError: for a row that matches nothing in the golden directory.
    """
    found = read_overrides(project_root())
    if found.rows:
        found.check([store.case(name) for name in store.names()])
    return found


def chosen_replays(
    store: GoldenStore,
    cases: Sequence[str],
    variants: str,
    tier: str,
    table: dict[str, Variant],
    extent: Extent = Extent.DEFAULT,
    refused: dict[str, str] | None = None,
) -> list[Replay]:
    """Return the replays of some cases, all by default, under the variants that a text chooses.

    Args:
        refused: gets the name of each replay that is not possible, and the reason.

    Raises:
        RegressError: if a case cannot be replayed, or nothing is chosen.
    """
    names = store.names()
    if not names:
        raise GoldenError(
            f"{store.root} holds no golden case; give --golden-dir, or record one with regress golden record"
        )
    chosen = list(dict.fromkeys(name for pattern in cases for name in select(names, pattern))) or names
    opened = [_opened(store, name) for name in chosen]
    table |= spelled_out(variants, table)
    rows = {name: table[name] for name in choose(table, variants)}
    left: dict[str, str] = {} if refused is None else refused
    found = list(replays(opened, rows, TIERS[tier], extent, lambda one, why: left.update({one.name: why})))
    if not found and left:
        name, why = next(iter(left.items()))
        raise ConfigError(f"{name} is not possible: {why}")
    if not found:
        raise ConfigError(f"""no variant of {variants!r} is replayed on {", ".join(chosen)} in the tier {tier} of the
        matrix {extent}, so nothing would be compared; regress variants lists their cases and precisions, --matrix full
        takes all cases""")
    return found


def spelled_out(text: str, known: Mapping[str, Variant]) -> dict[str, Variant]:
    """Return the variants missing from all tables, among names with commas: ``fsdp8-tp4`` spells out itself."""
    found = {}
    for name in (part.strip() for part in text.split(",")):
        overrides = overrides_of(name)
        if name not in known and overrides is not None:
            found[name] = Variant(name, "asked for by its name", overrides, EVERY)
    return found


def _opened(store: GoldenStore, name: str) -> GoldenCase:
    case = store.case(name)
    case.verify_inputs()
    if case.manifest is None:
        raise GoldenError(f"{case.folder} is not recorded yet: run regress golden record {name}")
    if not case.manifest.tolerances:
        raise GoldenError(
            f"{case.folder} has no measured tolerances yet: run regress golden calibrate {name}"
        )
    return case


@dataclass(frozen=True)
class Session:
    """Replays of one command.

    Attributes:
        machine: launch settings, device, and the folder or URL of the dumps, which does not exist yet.
        keep: folder for a copy of each dump.
        tokens: True to keep token values for a report.
        adapter: a user's own trainer, which replays in place of the engine.
        settings: settings applied to every variant.
    """

    machine: Machine = field(default_factory=Machine)
    keep: Path | None = None
    tokens: bool = False
    adapter: Adapter | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def cache(self, table: dict[str, Variant], overrides: Overrides) -> Iterator[ReplayCache]:
        """Yield the cache that runs and judges replays; remove its folder and its ranks afterwards."""
        from regress.replay.replay_pool import close_shared_pool

        with self._work() as folder:
            try:
                yield ReplayCache(
                    folder,
                    table,
                    self.replayers(folder),
                    Judging(overrides=overrides, tokens=self.tokens),
                    keep=self.keep,
                    settings=self.settings,
                )
            finally:
                close_shared_pool()

    def replayers(self, folder: Path) -> Replayers:
        """Return the ways to compute and judge replays in a folder.

        Raises:
            ConfigError: if a user's own trainer is to replay where it cannot.
        """
        if self.adapter is None:
            return Replayers(self.machine)
        from regress.replay.user_trainer_replays import ForeignReplayer

        if self.machine != Machine():
            raise ConfigError(f"""{self.adapter.name} replays cases on the ranks of a pool on this machine; leave
            --launcher, --device and --work away""")
        return Replayers(own=ForeignReplayer(self.adapter, folder / ".exports"))

    def attend(self, replay: Replay) -> None:
        """Run the ranks of a node that does not judge, unless the one that judges leaves the replay out."""
        launch = self.machine.launch
        assert launch is not None
        with Workspace() as folder:
            if self.replayers(folder).of(replay.variant).refuses(replay) is not None:
                return
            overrides, steps = overrides_on(self.machine, replay), len(replay.case.trajectories())
            config = replay_config(replay.case, replay.variant, replay.precision, steps, folder, overrides)
            launch.run(
                folder / "config.yaml",
                replay.world_size,
                folder / "ranks",
                replay.name,
                standstill=standstill_of(config),
            )

    @contextmanager
    def _work(self) -> Iterator[Path]:
        """Yield a folder of this machine; one of dumps that lies elsewhere is removed with it."""
        work = self.machine.work
        if work is not None and work.exists():
            raise ConfigError(f"{work} exists, but every run needs a folder of its own; give another --work")
        if isinstance(work, Path):
            work.mkdir(parents=True)
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
            return
        with Workspace() as folder:
            try:
                yield folder
            finally:
                if work is not None:
                    remove_tree(work)
