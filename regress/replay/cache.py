"""Replays shared by all processes of a test session: each runs once, in the process that asks for it first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regress.compare.verdicts.overrides import Overrides
from regress.dump.files import remove_tree, write_atomically
from regress.dump.location import Location
from regress.dump.manifest import MANIFEST
from regress.dump.reader import DumpReader, files_within
from regress.errors import ConfigError, NotInstalled, NotSupported, ReplayError, reason
from regress.golden.case import GoldenCase
from regress.parallel.launch.imports import imported_for_good
from regress.replay.cpu_slots import CpuSlots
from regress.replay.data_ranks import truth_of_ranks
from regress.replay.interprocess_lock import interprocess_lock, stated
from regress.replay.matrix import Replay, items, place_of_test
from regress.replay.needs import unmet, unusable_tracker
from regress.replay.outcome import FILE, ReplayOutcome
from regress.replay.run_context import run_context_of
from regress.replay.settings import conflict, scene_with
from regress.replay.shares import has_other_values
from regress.replay.variants import Precision, Variant

if TYPE_CHECKING:
    from regress.replay.foreign import ForeignReplays
    from regress.service.replay.remote import RemoteReplay

SERVED = "served"
"""File that tells that the dumps of a replay through a service are complete."""
REMOTE_FOLDERS = ("client", "service", "reference")


def _run_here(replay: Replay, folder: Path) -> DumpReader:
    if replay.world_size == 1:  # several ranks compute in processes of their own, and this one needs no torch
        _import_engine()
    from regress.replay.run import replay as run

    return run(replay.case, replay.variant, replay.precision, folder)


def _serve_here(replay: Replay, folder: Path) -> RemoteReplay:
    _import_engine()
    from regress.service.replay.remote import replay_remote

    return replay_remote(replay.case, replay.variant, replay.precision, folder)


@cache
def _import_engine() -> None:
    with imported_for_good():
        import regress.engine.build
        import regress.replay.run  # noqa: F401  # to be there


@dataclass
class ReplayCache:
    """Replays below ``root``, which all processes of the session see.

    Attributes:
        variants: the table in which bitwise references are looked up.
        scale: factor on tolerances.
        overrides: tolerances that the project sets by hand.
        dumps: folder of the replays' dumps, if not below `root`.
        tokens: True to keep token values for a report; see `regress.replay.token_tables`.
        keep: folder for a copy of each dump, below the name of its replay; None: dumps are removed.
        golden: the case whose values a case is judged against; itself, unless it is being updated.
        run: function that replays a case under a variant in a precision, into a folder; by default the engine
            of this package, on ranks of its pool.
        foreign: replays by a user's own trainer, in place of `run`.
        serve: function that replays a case under a variant through a training service of this machine.
        settings: settings applied to every variant; a replay in which one would not take effect is left out.
    """

    root: Path
    variants: Mapping[str, Variant]
    scale: float = 1.0
    overrides: Overrides = field(default_factory=Overrides)
    dumps: Location | None = None
    keep: Path | None = None
    tokens: bool = False
    golden: Callable[[GoldenCase], GoldenCase] = lambda case: case
    run: Callable[[Replay, Path], DumpReader] = _run_here
    foreign: ForeignReplays | None = None
    serve: Callable[[Replay, Path], RemoteReplay] = _serve_here
    settings: Mapping[str, Any] = field(default_factory=dict)
    _outcomes: dict[str, ReplayOutcome] = field(default_factory=dict)

    def outcome(self, replay: Replay) -> ReplayOutcome:
        """Return the verdicts on a replay, which runs unless another process ran it."""
        if replay.name not in self._outcomes:
            self._outcomes[replay.name] = self._shared_outcome(replay)
        return self._outcomes[replay.name]

    def claim(self, replay: Replay) -> bool:
        """Return True to the first process that asks for a replay, which is to run it."""
        try:
            (self._folder(replay) / "claimed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def dump(self, replay: Replay) -> DumpReader:
        """Return the dump of a replay, which stays until the session ends; raises `RegressError` if it cannot run."""
        if replay.variant.wire is not None:
            raise ConfigError(
                f"{replay.variant.name} trains through a service, which writes dumps of another form; take them with "
                "--regress-keep-dumps and regress compare"
            )
        folder = self._folder(replay)
        with interprocess_lock(folder, replay.name):
            (folder / "keep").touch()
            return self._dump(replay)

    def _shared_outcome(self, replay: Replay) -> ReplayOutcome:
        folder = self._folder(replay)
        path = folder / FILE
        with interprocess_lock(folder, replay.name):
            if path.is_file():
                return ReplayOutcome.loads(path.read_text())
            try:
                self._require_in_force(replay)
                found = self._judged(replay)
            except (NotSupported, NotInstalled) as error:
                found = ReplayOutcome(unsupported=str(error))
            except Exception as error:  # any error would occur again with each of the replay's tests
                found = ReplayOutcome(error=stated(error).removeprefix(f"{replay.name}: "))
            write_atomically(path, [found.dumps().encode()])
            self._leave(replay)
        return found

    def _judged(self, replay: Replay) -> ReplayOutcome:
        if self.foreign is not None:
            return self._judge_foreign(replay)
        return self._judge(replay) if replay.variant.wire is None else self._judge_remote(replay)

    def _judge(self, replay: Replay) -> ReplayOutcome:
        from regress.replay.judge import judge_replay, judge_twin, stored_tolerances

        twin = self._twin(
            replay
        )  # its lock is taken under this one; a twin has no twin, so there is no deadlock
        dump = self._dump(replay)
        tested = {(str(item.place), item.quantity) for item in items(replay)}
        scene = scene_with(run_context_of(replay, dump.manifest.provenance.config), self.settings)
        if twin is not None:
            return ReplayOutcome.of(judge_twin(replay.case, dump, twin, replay.plan), tested, scene)
        tolerance = stored_tolerances(replay.case, replay.precision, self.scale, self.overrides)
        golden = self.golden(replay.case)
        truth = truth_of_ranks(replay, self._folder(replay) / "truth")
        verdicts = judge_replay(golden, dump, replay.plan, replay.precision, truth=truth, tolerance=tolerance)
        outcome = ReplayOutcome.of(verdicts, tested, scene)
        if self.tokens and truth is None:
            from regress.replay.token_tables import keep_tables

            keep_tables(self._folder(replay), replay, golden, dump, outcome, tolerance)
        return outcome

    def _require_in_force(self, replay: Replay) -> None:
        reason = conflict(replay.variant, self.settings) or self._impossible(replay)
        if reason is not None:
            raise NotSupported(reason)

    def _impossible(self, replay: Replay) -> str | None:
        """Return why a case cannot be replayed under a variant here; None if it can."""
        variant = replay.variant
        if variant.program and self.foreign is not None:
            return "it is about the program around the steps, which is that of this package"
        if variant.wire is not None and self.foreign is not None:
            return "it is about the training service, which is that of this package"
        return (None if self.foreign is not None else unmet(replay.case, variant)) or unusable_tracker(
            variant
        )

    def _judge_foreign(self, replay: Replay) -> ReplayOutcome:
        from regress.replay.foreign import foreign_items, foreign_scene
        from regress.replay.judge import stored_tolerances

        assert self.foreign is not None
        if has_other_values(replay):
            raise NotSupported("the recorded values are not those of its data-parallel ranks")
        dump = self._dump(replay)
        tolerance = stored_tolerances(replay.case, replay.precision, self.scale, self.overrides)
        verdicts = self.foreign.judge(replay, dump, self.golden(replay.case), tolerance)
        tested = {(str(item.place), item.quantity) for item in foreign_items(replay)}
        scene = scene_with(foreign_scene(replay), self.settings)
        return ReplayOutcome.of(verdicts, tested, scene, place_of_test)

    def _judge_remote(self, replay: Replay) -> ReplayOutcome:
        """Judge a replay through a service: in float32 by the truth, else by the engine's step on what was sent."""
        from regress.service.replay.judge import compare_with_reference, compare_with_truth, judged, scene_of
        from regress.service.replay.reference import replay_sent

        folder, golden = self._folder(replay), self.golden(replay.case)
        found = self._remote(replay)
        if replay.precision is Precision.FLOAT32:
            compared = compare_with_truth(golden, found, scale=self.scale, overrides=self.overrides)
        else:
            reference = replay_sent(replay.case, found, replay.precision, folder / "reference")
            compared = compare_with_reference(reference, found, replay.precision)
        tested = {(str(item.place), item.quantity) for item in items(replay)}
        scene = scene_with(scene_of(replay, compared), self.settings)
        return ReplayOutcome.of(judged(replay, compared, masked=found.masked), tested, scene, place_of_test)

    def _remote(self, replay: Replay) -> RemoteReplay:
        """Return the dumps of a replay through a service; that in float32 is the bitwise one, too, and runs once."""
        if replay.precision is not Precision.BITWISE:
            return self._served(replay)
        shared = Replay(replay.case, replay.variant, Precision.FLOAT32)
        folder = self._folder(shared)
        with interprocess_lock(folder, shared.name):
            (folder / "keep").touch()
            return self._served(shared)

    def _served(self, replay: Replay) -> RemoteReplay:
        """Run a replay through a service unless its dumps are there; the caller holds its lock."""
        from regress.service.replay.remote import RemoteReplay

        folder = self._folder(replay)
        if (folder / SERVED).is_file():
            return RemoteReplay.of(replay.variant, folder)
        for name in REMOTE_FOLDERS:
            remove_tree(folder / name)
        try:
            with CpuSlots(self.root / ".slots").taken(replay.world_size, replay.name):
                found = self.serve(replay, folder)
            (folder / SERVED).touch()
        finally:
            self._keep(folder, replay)
        return found

    def _twin(self, replay: Replay) -> DumpReader | None:
        if replay.precision is not Precision.BITWISE:
            return None
        twin = self.variants[str(replay.variant.twin)]
        return self.dump(Replay(replay.case, twin, Precision.FLOAT32))

    def _dump(self, replay: Replay) -> DumpReader:
        """Run the replay unless its dump is there; the caller holds its lock."""
        folder, place = self._folder(replay), self._place(replay)
        if (place / MANIFEST).is_file():
            return DumpReader(place)
        remove_tree(place)
        try:
            with CpuSlots(self.root / ".slots").taken(replay.world_size, replay.name):
                return (self.run if self.foreign is None else self.foreign.run)(replay, folder)
        finally:
            self._keep(folder, replay)

    def _keep(self, folder: Path, replay: Replay) -> None:
        """Copy the dump of a replay, complete or not, over the one that an earlier session kept."""
        if self.keep is None:
            return
        kept = self.keep / replay.name
        try:
            with suppress(FileNotFoundError):
                shutil.rmtree(kept)
            shutil.copytree(folder, kept, ignore=lambda *_: {"keep"})
            if self.dumps is not None:
                _download(self._place(replay), kept / "dump")
        except OSError as error:  # shutil.Error, too
            raise ReplayError(
                f"{kept} cannot hold the dump of a replay ({reason(error)}); choose another folder with "
                "--regress-keep-dumps"
            ) from None

    def _leave(self, replay: Replay) -> None:
        """Remove the dump of a judged replay; that of a bitwise reference stays until the session ends."""
        folder = self._folder(replay)
        if (folder / "keep").exists():
            return
        remove_tree(self._place(replay))
        if replay.variant.wire is not None:
            (folder / SERVED).unlink(missing_ok=True)
            for name in REMOTE_FOLDERS:
                remove_tree(folder / name)

    def _folder(self, replay: Replay) -> Path:
        folder = self.root / replay.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _place(self, replay: Replay) -> Location:
        return (self.dumps or self.root) / replay.name / "dump"


def _download(dump: Location, folder: Path) -> None:
    for file in files_within(dump):
        write_atomically(folder / file.parent.name / file.name, [file.read_bytes()])
    if (dump / MANIFEST).is_file():
        write_atomically(folder / MANIFEST, [(dump / MANIFEST).read_bytes()])
