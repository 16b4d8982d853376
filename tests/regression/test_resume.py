"""A run that is killed anywhere and resumed is the run that was never killed, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from regress.dump.recorded_trajectories import read_trajectories
from regress.engine.checkpoint import latest, read_state
from regress.parallel.launch.rank_pool import RankPool
from tests.regression.resumed import LATEST, ONLY_MAIN, SMALL, Bench, require_same

ADAPTIVE = ("kl_coef=0.1", "kl_controller=adaptive", "kl_target=0.01", "kl_horizon=50")
"""A coefficient that follows the KL would begin anew with a resume that forgets it."""


@pytest.fixture(scope="module")
def bench(pool: RankPool, targets: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    known: dict[str, Bench] = {}

    def make(layout: str) -> Bench:
        if layout not in known:
            parts = layout.split()
            ranks = int(
                np.prod([int(part.partition("=")[2]) for part in parts if part[-1:].isdigit()] or [1])
            )
            given = [*SMALL, "evaluation.every_n_steps=1", *(f"parallel.{part}" for part in parts)]
            given += [f"algorithm.{key}" for key in ADAPTIVE]
            known[layout] = Bench(pool, targets, tmp_path_factory.mktemp("resume"), given, ranks=ranks)
        return known[layout]

    return make


KILLS = {
    "half of the weights": 3,
    "before the rename": 5,
    "pruning": 2,
    "accumulation": 5,
    "between updates": 6,
    "snapshot": 4,
    "before the manifest": 0,
    "after the rename": 2,
    "evaluation": 2,
    "after an evaluation": 1,
    "rollout": 2,
    "before an update": 9,
    "half of a row": 2,
    "half of a record": 40,
    "final model": 0,
}
"""Window -> number of times that it is passed unharmed."""
DEFAULT = ("half of the weights", "before the rename", "pruning", "accumulation", "between updates")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("window", DEFAULT)
def test_a_killed_run_goes_on(bench: Callable[[str], Bench], window: str) -> None:
    found = bench("")
    whole = found.uninterrupted()
    require_same(whole, found.killed_and_resumed(window, window=(window, KILLS[window])))


def test_adaptive_coefficients_go_on(bench: Callable[[str], Bench]) -> None:
    """The coefficient of the run that others are killed from follows the KL, so one that began anew would show."""
    kept = read_state(latest(bench("").uninterrupted())).parts["coefficients"]
    assert kept["kl"] != pytest.approx(0.1, rel=1e-3)


GROUPS = ("", "dp=2", "dp=2 data_parallel=ddp", "dp=2 data_parallel=accelerate", "fsdp=2")
ATTACKS = [
    (layout, window, victim)
    for layout in GROUPS
    for window in KILLS
    for victim in (None, 1)
    if victim is None or (layout and window not in ONLY_MAIN)
]


@pytest.mark.extended
@pytest.mark.parametrize(("layout", "window", "victim"), ATTACKS)
def test_a_killed_group_goes_on(
    bench: Callable[[str], Bench], layout: str, window: str, victim: int | None
) -> None:
    found = bench(layout)
    whole = found.uninterrupted()
    name = f"{window} {victim}"
    require_same(whole, found.killed_and_resumed(name, window=(window, KILLS[window]), victim=victim))


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["", "dp=2 data_parallel=ddp"])
@pytest.mark.parametrize("number", range(8))
def test_a_run_killed_at_any_moment_goes_on(bench: Callable[[str], Bench], layout: str, number: int) -> None:
    found = bench(layout)
    whole = found.uninterrupted()
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    require_same(whole, found.killed_at_random(seed))


LAYOUTS = {
    "dp2": ("dp=2",),
    "ddp2": ("dp=2", "data_parallel=ddp"),
    "fsdp2": ("fsdp=2",),
    "tp2": ("tp=2",),
    "pp2": ("pp=2",),
    "cp2": ("cp=2",),
}
EXACT = (*SMALL, "model.dtype=float64", "trainer.save_updates=3", "optimizer.eps=1e-6")
POINTS = ("checkpoint-0-update3", "checkpoint-1-update2")


def _recorded(pool: RankPool, targets: Any, home: Path, live: bool, model: Sequence[str]) -> list[str]:
    """Overrides of runs that replay recorded rollouts, or that sample."""
    given = [*EXACT, *model, "debug.enable_data_dump=true", "debug.dump_options.trajectory=true"]
    if live:
        return given
    pool.run(targets.trained, {"overrides": [*given, f"output_dir={home / 'rec'}"]}, 1)
    return [
        *(*given, "rollout_worker.type=mock", "rollout_worker.need_llm_inference=false"),
        f"rollout_worker.trajectory_load_path={home / 'rec' / 'debug_dump'}",
    ]


@pytest.mark.one_in(28)
@pytest.mark.parametrize("live", [False, True], ids=["recorded", "live"])
@pytest.mark.parametrize("name", [*LAYOUTS, "ep2"])
@pytest.mark.parametrize("widens", [True, False], ids=["widens", "narrows"])
def test_a_run_goes_on_under_another_layout(
    pool: RankPool, targets: Any, tmp_path: Path, name: str, live: bool, widens: bool
) -> None:
    """From one process to several, and back: the run in one process is the truth."""
    moe = ("model.family=qwen3_moe", "model.config={hidden_size: 32, moe_intermediate_size: 32}")
    model = moe if name == "ep2" else ()
    split = [f"parallel.{part}" for part in LAYOUTS.get(name, ("ep=2",))]
    base = _recorded(pool, targets, tmp_path, live, model)
    run = lambda folder, ranks, *more: pool.run(  # noqa: E731
        targets.trained, {"overrides": [*base, f"output_dir={tmp_path / folder}", *more]}, ranks, timeout=120
    )
    run("one", 1)
    first, second = ([], split) if widens else (split, [])
    run("first", 2 if first else 1, *first)
    for point in POINTS:
        resumed = f"trainer.resume_from_checkpoint={tmp_path / 'first' / point}"
        run(point, 2 if second else 1, *second, resumed)
        rollouts, truth = sampled(tmp_path / point), sampled(tmp_path / "one")
        assert rollouts == {step: truth[step] for step in rollouts}
        assert max(rollouts) == 2
        expected = load_file(tmp_path / "one" / "final" / "model.safetensors")
        actual = load_file(tmp_path / point / "final" / "model.safetensors")
        for key, value in expected.items():
            np.testing.assert_allclose(
                actual[key], value, rtol=0, atol=1e-12 * np.abs(value).max(), err_msg=key
            )


def sampled(run: Path) -> dict[int, list[tuple[str, int, list[int]]]]:
    """Return every sample of every step that a run has recorded."""
    steps = read_trajectories(run / "debug_dump" / "trajectory")
    return {step: [(*t.key, t.tokens) for t in found.trajectories] for step, found in steps.items()}


@pytest.mark.extended
def test_a_finished_run_is_extended(bench: Callable[[str], Bench], tmp_path: Path) -> None:
    """More steps than the first process was asked for: the constant schedule makes them those of one long run."""
    found = bench("")
    constant = "optimizer.lr_scheduler=constant"
    found.run(tmp_path / "long", constant)
    found.run(tmp_path / "short", constant, "max_steps=2")
    assert json.loads((tmp_path / "short" / "checkpoint-2" / "trainer_state.json").read_text())["step"] == 2
    found.run(tmp_path / "short", constant, LATEST)
    require_same(tmp_path / "long", tmp_path / "short")
