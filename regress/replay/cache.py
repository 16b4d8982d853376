"""Replays shared by all processes of a test session: each runs once, whoever asks for it first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from regress.dump.files import write_atomically
from regress.dump.reader import DumpReader
from regress.errors import RegressError
from regress.golden.case import GoldenCase
from regress.replay.matrix import Replay
from regress.replay.outcome import ReplayOutcome
from regress.replay.variants import Precision, Variant

TIMEOUT = 600.0
"""Seconds to wait for a replay that another process runs: far more than any takes, so a dead one is noticed."""


@dataclass
class ReplayCache:
    """Replays below ``root``, which all processes of the session see.

    Attributes:
        variants: the table in which twins are looked up.
        scale: factor on measured tolerances.
        keep: where the dumps of judged replays stay; None: they are removed.
        golden: the case whose values a case is judged against; itself, unless it is being updated.
    """

    root: Path
    variants: Mapping[str, Variant]
    scale: float = 1.0
    keep: Path | None = None
    golden: Callable[[GoldenCase], GoldenCase] = lambda case: case
    _outcomes: dict[str, ReplayOutcome] = field(default_factory=dict)

    def outcome(self, replay: Replay) -> ReplayOutcome:
        """The verdicts on a replay, which is run unless any process did."""
        if replay.name not in self._outcomes:
            self._outcomes[replay.name] = self._shared_outcome(replay)
        return self._outcomes[replay.name]

    def dump(self, replay: Replay) -> DumpReader:
        """The dump of a replay, which stays until the session ends."""
        folder = self._folder(replay)
        with FileLock(f"{folder}.lock", timeout=TIMEOUT):
            (folder / "keep").touch()
            return self._dump(replay)

    def _shared_outcome(self, replay: Replay) -> ReplayOutcome:
        folder = self._folder(replay)
        path = folder / "outcome.json"
        with FileLock(f"{folder}.lock", timeout=TIMEOUT):
            if path.is_file():
                return ReplayOutcome.loads(path.read_text())
            try:
                found = self._judge(replay)
            except RegressError as error:
                found = ReplayOutcome(error=str(error))
            write_atomically(path, [found.dumps().encode()])
            self._leave(replay)
        return found

    def _judge(self, replay: Replay) -> ReplayOutcome:
        from regress.replay.judge import judge_replay, judge_twin, stored_tolerances

        twin = self._twin(
            replay
        )  # its lock is taken under this one; a twin has none itself, so no circle arises
        dump = self._dump(replay)
        if twin is not None:
            return ReplayOutcome.of(judge_twin(replay.case, dump, twin, replay.plan))
        tolerance = stored_tolerances(replay.case, replay.precision, self.scale)
        golden = self.golden(replay.case)
        return ReplayOutcome.of(
            judge_replay(golden, dump, replay.plan, replay.precision, tolerance=tolerance)
        )

    def _twin(self, replay: Replay) -> DumpReader | None:
        if replay.precision is not Precision.BITWISE:
            return None
        twin = self.variants[str(replay.variant.twin)]
        return self.dump(Replay(replay.case, twin, Precision.FLOAT32))

    def _dump(self, replay: Replay) -> DumpReader:
        """Run the replay unless its dump is there; the caller holds its lock."""
        from regress.replay.run import replay as run

        folder = self._folder(replay)
        if (folder / "dump" / "manifest.json").is_file():
            return DumpReader(folder / "dump")
        shutil.rmtree(folder / "dump", ignore_errors=True)
        return run(replay.case, replay.variant, replay.precision, folder)

    def _leave(self, replay: Replay) -> None:
        """Keep or remove the dump of a judged replay; a twin's stays until the session ends."""
        folder = self._folder(replay)
        if self.keep is not None:
            shutil.rmtree(self.keep / replay.name, ignore_errors=True)
            shutil.copytree(
                folder, self.keep / replay.name, ignore=shutil.ignore_patterns("outcome.json", "keep")
            )
        if not (folder / "keep").exists():
            shutil.rmtree(folder / "dump", ignore_errors=True)

    def _folder(self, replay: Replay) -> Path:
        folder = self.root / replay.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder
