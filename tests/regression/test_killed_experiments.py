"""The six experiments, killed anywhere and resumed: each is the run that was never killed, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regress.engine.tracking.tracker_state import read_sync_state
from regress.parallel.launch.rank_pool import RankPool
from regress.replay.replay_pool import MODULES
from tests.regression.resumed import ONLY_MAIN, Bench, require_same

pytest.importorskip("tensorboard")

EXPERIMENTS = {
    "experiment_base": 1,
    "experiment_drgrpo": 1,
    "experiment_accelerate": 1,
    "experiment_accelerate_ddp": 2,
    "experiment_multiturn_qa": 1,
    "experiment_multiturn_tool_calling": 1,
}
"""Experiment -> number of its ranks."""

SIZES = (
    "max_steps=6",
    "task.train_size=64",
    "task.eval_size=4",
    "data.prompts_per_step=2",
    "data.group_size=4",
    "rollout_worker.batch_size=8",
    "trainer.mini_batch_size=4",
    "batching.micro_batch_size=1",
    "warm_start.batch_size=8",
    "evaluation.every_n_steps=2",
    "tracking.trackers=[tensorboard]",
)
"""Six steps of two updates of four (on two ranks: two) microbatches; the rest is the experiment's own."""

KILLS = {
    "rollout": 3,
    "snapshot": 4,
    "half of the weights": 6,
    "before the manifest": 7,
    "before the rename": 5,
    "after the rename": 8,
    "pruning": 4,
    "evaluation": 2,
    "after an evaluation": 1,
    "accumulation": 5,
    "before an update": 7,
    "between updates": 6,
    "half of a row": 20,
    "half of a record": 40,
    "tracker flush": 15,
    "half of the tracking state": 7,
    "final model": 0,
}
"""Window -> number of times that it is passed unharmed."""

ATTACKS = [
    (name, window, victim)
    for name, ranks in EXPERIMENTS.items()
    for window in KILLS
    for victim in (None, 1)
    if victim is None or (ranks > 1 and window not in ONLY_MAIN)
]
RANDOM = [
    (name, number, victim)
    for name, ranks in EXPERIMENTS.items()
    for number in range(8)
    for victim in (None, 1)
    if victim is None or ranks > 1
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks that have imported the tracker, too."""
    with RankPool((*MODULES, "torch.utils.tensorboard", "accelerate.tracking")) as pool:
        yield pool


@pytest.fixture(scope="module")
def bench(pool: RankPool, targets: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    known: dict[str, Bench] = {}

    def make(name: str) -> Bench:
        if name not in known:
            ranks = EXPERIMENTS[name]
            given = [*SIZES, *(["parallel.dp=2"] if ranks == 2 else [])]
            known[name] = Bench(pool, targets, tmp_path_factory.mktemp(name), given, ranks=ranks, name=name)
        return known[name]

    return make


@pytest.mark.extended
@pytest.mark.parametrize(("name", "window", "victim"), ATTACKS)
def test_a_killed_experiment_goes_on(
    bench: Callable[[str], Bench], name: str, window: str, victim: int | None
) -> None:
    found = bench(name)
    whole = found.uninterrupted()
    again = found.killed_and_resumed(f"{window} {victim}", window=(window, KILLS[window]), victim=victim)
    require_same(whole, again)
    assert shown(again) == shown(whole)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "number", "victim"), RANDOM)
def test_an_experiment_killed_at_any_moment_goes_on(
    bench: Callable[[str], Bench], name: str, number: int, victim: int | None
) -> None:
    found = bench(name)
    whole = found.uninterrupted()
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    again = found.killed_at_random(seed, victim)
    require_same(whole, again)
    assert shown(again) == shown(whole)


def shown(run: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return the points that TensorBoard shows of a run, by directory of events and name; repeated ones once.

    A run that was killed before its first checkpoint begins anew, under another name.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    state = read_sync_state(run)
    assert state is not None
    (home,) = (run / "tensorboard").glob(f"*-{state['run_id']}")
    for folder in (home, home / "updates"):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points = {(event.step, repr(event.value)): None for event in events.Scalars(tag)}
            found[folder.relative_to(home).as_posix(), tag] = [(step, float(text)) for step, text in points]
    return found
