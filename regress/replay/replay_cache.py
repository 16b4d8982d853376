"""Replays shared by all processes of a test session: each runs once, in the process that asks for it first."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regress.dump.dump_files import remove_tree, write_atomically
from regress.dump.dump_location import Location
from regress.dump.dump_manifest import MANIFEST
from regress.dump.dump_reader import DumpReader, files_within
from regress.errors import NotInstalled, NotSupported, ReplayError, reason
from regress.replay.cpu_slots import CpuSlots
from regress.replay.extra_settings import conflict, scene_with
from regress.replay.interprocess_lock import interprocess_lock, stated
from regress.replay.replay_outcome import FILE, ReplayOutcome
from regress.replay.replayer_registry import Judging, Replayer, Replayers
from regress.replay.test_matrix import Replay
from regress.replay.variant import Variant

_COMPUTED, _KEPT = "computed", "keep"
"""Files that tell that what a replay leaves is complete, and that it stays until the session ends."""


@dataclass
class ReplayCache:
    """Replays below ``root``, which all processes of the session see.

    Attributes:
        variants: the table in which bitwise references are looked up.
        replayers: ways to compute and judge them.
        judging: measures that they are judged by.
        keep: folder for a copy of what each replay leaves, below its name; None: it is removed.
        settings: settings applied to every variant; a replay in which one would not take effect is left out.
    """

    root: Path
    variants: Mapping[str, Variant]
    replayers: Replayers = field(default_factory=Replayers)
    judging: Judging = field(default_factory=Judging)
    keep: Path | None = None
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
        place = self.replayers.of(replay.variant).dump_of(replay, self._folder(replay))
        self._computed(replay)
        return DumpReader(place)

    def _shared_outcome(self, replay: Replay) -> ReplayOutcome:
        folder = self._folder(replay)
        path = folder / FILE
        with interprocess_lock(folder, replay.name):
            if path.is_file():
                return ReplayOutcome.loads(path.read_text())
            try:
                found = self._judged(replay)
            except (NotSupported, NotInstalled) as error:
                found = ReplayOutcome(unsupported=str(error))
            except Exception as error:  # any error would occur again with each of the replay's tests
                found = ReplayOutcome(error=stated(error).removeprefix(f"{replay.name}: "))
            write_atomically(path, [found.dumps().encode()])
        return found

    def _judged(self, replay: Replay) -> ReplayOutcome:
        replayer = self.replayers.of(replay.variant)
        refusal = conflict(replay.variant, self.settings) or replayer.refuses(replay)
        if refusal is not None:
            raise NotSupported(refusal)
        try:
            return self._verdicts(replay, replayer)
        finally:
            if not (self._folder(replay) / _KEPT).exists():
                self._remove(replay)

    def _verdicts(self, replay: Replay, replayer: Replayer) -> ReplayOutcome:
        # the lock of a reference is taken under this one; a reference has none itself, so there is no deadlock
        reference, source = replayer.reference_of(replay, self.variants), replayer.computed_as(replay)
        against = None if reference is None else self.dump(reference)
        folder = self._compute(replay) if source == replay else self._computed(source)
        judged = replayer.judge(replay, folder, self.judging, against)
        tested = {(str(item.place), item.quantity) for item in replayer.items(replay)}
        scene = scene_with(judged.scene, self.settings)
        outcome = ReplayOutcome.of(judged.verdicts, tested, scene, judged.place)
        if judged.keep is not None:
            judged.keep(outcome)
        return outcome

    def _computed(self, replay: Replay) -> Path:
        """Return the folder of a replay that is computed, by this process or another, and stays."""
        folder = self._folder(replay)
        with interprocess_lock(folder, replay.name):
            (folder / _KEPT).touch()
            return self._compute(replay)

    def _compute(self, replay: Replay) -> Path:
        """Compute a replay unless it is there; the caller holds its lock."""
        folder = self._folder(replay)
        if (folder / _COMPUTED).is_file():
            return folder
        self._remove(replay)
        try:
            with CpuSlots(self.root / ".slots").taken(replay.world_size, replay.name):
                self.replayers.of(replay.variant).compute(replay, folder)
            (folder / _COMPUTED).touch()
        finally:
            self._keep(folder, replay)
        return folder

    def _keep(self, folder: Path, replay: Replay) -> None:
        """Copy what a replay leaves, complete or not, over what an earlier session kept."""
        if self.keep is None:
            return
        kept = self.keep / replay.name
        try:
            with suppress(FileNotFoundError):
                shutil.rmtree(kept)
            shutil.copytree(folder, kept, ignore=lambda *_: {_KEPT, _COMPUTED})
            elsewhere = self.replayers.of(replay.variant).elsewhere(replay)
            if elsewhere is not None:
                _download(elsewhere, kept / "dump")
        except OSError as error:  # shutil.Error, too
            raise ReplayError(f"""{kept} cannot hold the dump of a replay ({reason(error)}); choose another folder with
            --regress-keep-dumps""") from None

    def _remove(self, replay: Replay) -> None:
        """Remove what a replay has left."""
        folder, replayer = self._folder(replay), self.replayers.of(replay.variant)
        (folder / _COMPUTED).unlink(missing_ok=True)
        for name in replayer.leaves:
            remove_tree(folder / name)
        elsewhere = replayer.elsewhere(replay)
        if elsewhere is not None:
            remove_tree(elsewhere)

    def _folder(self, replay: Replay) -> Path:
        folder = self.root / replay.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _download(dump: Location, folder: Path) -> None:
    for file in files_within(dump):
        write_atomically(folder / file.parent.name / file.name, [file.read_bytes()])
    if (dump / MANIFEST).is_file():
        write_atomically(folder / MANIFEST, [(dump / MANIFEST).read_bytes()])
