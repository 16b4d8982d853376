"""Replays of golden cases in this process, on an engine that a test may have broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from regress.compare.verdict import Verdict
from regress.golden.store import GoldenStore
from regress.replay.judge import judge_replay
from regress.replay.matrix import Replay
from regress.replay.run import Prepare, replay
from regress.replay.variants import VARIANTS, Precision

GOLDEN = Path(__file__).parents[2] / "golden"


@dataclass(frozen=True)
class Judged:
    """A replay, and the verdicts on it that are not ok, in the order of computation."""

    replay: Replay
    failed: list[Verdict]

    @property
    def first(self) -> Verdict:
        return self.failed[0]

    def alike(self) -> list[Verdict]:
        """The failures of the first quantity at the first broken update."""
        first = self.first
        return [
            v
            for v in self.failed
            if (v.quantity, v.place.step, v.place.update) == (first.quantity, first.place.step, first.place.update)
        ]

    def loss_tokens(self, micro: int, rows: Callable[[int, int], bool] = lambda *_: True) -> int:
        """Loss tokens of step 0 in a microbatch, in the segments that ``rows(index, length)`` chooses."""
        update = self.replay.plan[0]
        masks = {t.key: t.loss_mask for t in self.replay.case.trajectories()[update.step]}
        segments = enumerate(update.layouts[micro].segments)
        return sum(
            sum(masks[update.frame.samples[segment.sample]])
            for index, segment in segments
            if rows(index, segment.stop)
        )


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Judged]:
    """``judge(case, variant)``: replay it now, by the engine as it is, and judge it."""

    def run(
        case: str, variant: str, *, precision: Precision = Precision.FLOAT64, prepare: Prepare | None = None
    ) -> Judged:
        chosen = Replay(GoldenStore(GOLDEN).case(case), VARIANTS[variant], precision)
        dump = replay(chosen.case, chosen.variant, precision, tmp_path / chosen.name, prepare=prepare)
        verdicts = judge_replay(chosen.case, dump, chosen.plan, precision)
        assert verdicts
        return Judged(chosen, [verdict for verdict in verdicts if not verdict.ok])

    return run
