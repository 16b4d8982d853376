"""Replays of golden cases in this process, on an engine that a test may have broken."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from numpy.typing import NDArray

from regress.compare.verdicts.verdict import Verdict
from regress.golden.golden_directory import GoldenStore
from regress.layout import TokenLayout
from regress.parallel.launch.rank_pool import RankPool
from regress.replay.replay_judge import judge_replay
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.replay_pool import shared_pool
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

if TYPE_CHECKING:
    from regress.replay.run_changes import Prepare

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def pool() -> RankPool:
    """Return the ranks that replays of golden cases have, too; each job has fresh processes."""
    return shared_pool()


@pytest.fixture(scope="module")
def targets() -> Iterator[Any]:
    """The module of runs that may be killed, importable as a user's is."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        import resume_ranks

        yield resume_ranks
    finally:
        sys.path.remove(folder)


@dataclass(frozen=True)
class Local:
    """One microbatch as it should be: its layout, and golden token values in it."""

    layout: TokenLayout
    update: PlannedUpdate
    truth: Mapping[str, Mapping[str, NDArray[Any]]]

    def __getattr__(self, quantity: str) -> NDArray[Any]:
        """``[B, T]`` golden values of a quantity that has one tensor, or of one of ``batch_inputs``."""
        tensors = self.truth.get(quantity, {}) or {quantity: self.truth["batch_inputs"][quantity]}
        (values,) = tensors.values()
        return self.layout.scatter(values, self.update.frame.offsets)


@dataclass(frozen=True)
class Judged:
    """A replay, and the verdicts on it that are not ok, in the order of computation."""

    replay: Replay
    failed: list[Verdict]

    @property
    def first(self) -> Verdict:
        return self.failed[0]

    @cached_property
    def micros(self) -> list[Local]:
        """The microbatches of the first update that went wrong."""
        place = self.first.place
        (update,) = (u for u in self.replay.plan if (u.step, u.update) == (place.step, place.update))
        truth = self.replay.case.truth(update.where)
        return [Local(layout.targets, update, truth) for layout in update.layouts[0]]

    def over(self, name: str) -> dict[int | None, int]:
        """Elements of a tensor beyond their tolerance at that update, by microbatch."""
        step, update = self.first.place.step, self.first.place.update
        found = (v for v in self.failed if (v.place.step, v.place.update, v.name) == (step, update, name))
        return {verdict.place.micro: verdict.over for verdict in found}


@pytest.fixture
def micros() -> Callable[[Any], list[Local]]:
    """``micros(judged)``: the microbatches of the update in which a replay went wrong first, as they should be."""

    def of(found: Any) -> list[Local]:
        place = found.divergence.first.place
        (update,) = (u for u in found.plan if (u.step, u.update) == (place.step, place.update))
        truth = found.replay.case.truth(update.where)
        return [Local(layout.targets, update, truth) for layout in update.layouts[0]]

    return of


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Judged]:
    """``judge(case, variant)``: replay it now, by the engine as it is, and judge it."""

    def run(
        case: str, variant: str, *, precision: Precision = Precision.FLOAT64, prepare: Prepare | None = None
    ) -> Judged:
        from regress.replay.case_run import (
            replay,  # loads torch, which golden tests on several ranks need in these only
        )

        chosen = Replay(GoldenStore(GOLDEN).case(case), VARIANTS[variant], precision)
        dump = replay(chosen.case, chosen.variant, precision, tmp_path / chosen.name, prepare=prepare)
        verdicts = judge_replay(chosen.case, dump, chosen.plan, precision)
        assert verdicts
        return Judged(chosen, [verdict for verdict in verdicts if not verdict.ok])

    return run
