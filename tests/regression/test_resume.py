"""A run that is killed anywhere and resumed is the run that was never killed, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from regress.dump.difference import compare_bitwise
from regress.dump.metrics_file import metrics_of, read_metrics
from regress.dump.reader import DumpReader
from regress.engine.checkpoint import latest
from regress.errors import RankError
from regress.parallel.launch.pool import RankPool

SMALL = (
    "task.train_size=12",
    "task.eval_size=3",
    "data.prompts_per_step=2",
    "data.group_size=4",
    "model.config={hidden_size: 32, intermediate_size: 64}",
    "task.rewards={exact_match: 1.0, character_match: 1.0}",
    "max_steps=3",
    "warm_start.steps=2",
    "warm_start.batch_size=8",
    "trainer.epochs=2",
    "trainer.mini_batch_size=4",
    "batching.micro_batch_size=2",
    "algorithm.kl_coef=0.05",
    "reference.sync_every_n_steps=1",
    "reference.mixup_alpha=0.3",
    "optimizer.lr_scheduler=linear",
    "optimizer.weight_decay=0.01",
)
"""Three steps of four updates; the reference moves, and so does the learning rate."""

RECORDED = ("trajectory", "old_log_probs", "loss", "gradient", "param", "optimizer")
DUMPED = ("debug.enable_data_dump=true", *(f"debug.dump_options.{name}=true" for name in RECORDED))
SAVED = ("trainer.save_updates=1", "trainer.save_total_limit=2", "evaluation.every_n_steps=1")
LATEST = "trainer.resume_from_checkpoint=latest"


@pytest.fixture(scope="module")
def targets() -> Iterator[Any]:
    """The module of targets, importable as a user's is."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        import resume_ranks

        yield resume_ranks
    finally:
        sys.path.remove(folder)


class Bench:
    """Runs of one layout, and the run that nothing interrupts."""

    def __init__(self, pool: RankPool, targets: Any, home: Path, layout: Sequence[str], ranks: int) -> None:
        self.pool, self.targets, self.home, self.ranks = pool, targets, home, ranks
        self.layout = [f"parallel.{part}" for part in layout]
        self.whole = home / "whole"

    def run(self, folder: Path, *more: str, **how: Any) -> list[Any]:
        overrides = [*SMALL, *DUMPED, *SAVED, *self.layout, f"output_dir={folder}", *more]
        return self.pool.run(self.targets.trained, {"overrides": overrides, **how}, self.ranks, timeout=120)

    def uninterrupted(self) -> Path:
        if not self.whole.exists():
            self.run(self.whole)
        return self.whole

    def killed_and_resumed(self, name: str, **how: Any) -> Path:
        folder = self.home / name.replace(" ", "-")
        with pytest.raises(RankError):
            self.run(folder, **how)
        self.run(folder, LATEST)
        return folder


@pytest.fixture(scope="module")
def bench(pool: RankPool, targets: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    known: dict[str, Bench] = {}

    def make(layout: str) -> Bench:
        if layout not in known:
            parts = layout.split()
            ranks = int(
                np.prod([int(part.partition("=")[2]) for part in parts if part[-1:].isdigit()] or [1])
            )
            known[layout] = Bench(pool, targets, tmp_path_factory.mktemp("resume"), parts, ranks)
        return known[layout]

    return make


def require_same(whole: Path, again: Path) -> None:
    """The same final weights, state of the optimizer, metrics and dump, bit for bit."""
    expected, actual = (load_file(run / "final" / "model.safetensors") for run in (whole, again))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    states = [DumpReader(Path(str(latest(run))) / "state") for run in (whole, again)]
    assert [record.checksum() for record in states[0]] == [record.checksum() for record in states[1]]
    assert seen(again) == seen(whole)
    assert compare_bitwise(whole / "debug_dump", again / "debug_dump").differences == []
    assert not [path.name for path in again.iterdir() if path.name.startswith(".")], "something was left over"


def seen(run: Path) -> list[tuple[Any, ...]]:
    """Metrics as the read view shows them, without segments, numbers and times."""
    rows = read_metrics(run / "metrics.jsonl", lambda text: None)
    return [(row["step"], row.get("update"), metrics_of(row)) for row in rows]


KILLS = {
    "half of the weights": 3,
    "before the rename": 5,
    "pruning": 2,
    "accumulation": 11,
    "between updates": 6,
    "snapshot": 4,
    "before the manifest": 0,
    "after the rename": 2,
    "evaluation": 2,
    "rollout": 2,
    "before an update": 9,
    "half of a row": 2,
    "half of a record": 40,
    "final model": 0,
}
"""Window -> number of times that it is passed unharmed."""
DEFAULT = ("half of the weights", "before the rename", "pruning", "accumulation", "between updates")


@pytest.mark.parametrize("window", DEFAULT)
def test_a_killed_run_goes_on(bench: Callable[[str], Bench], window: str) -> None:
    found = bench("")
    whole = found.uninterrupted()
    require_same(whole, found.killed_and_resumed(window, window=(window, KILLS[window])))


@pytest.mark.extended
@pytest.mark.parametrize(
    "layout", ["", "dp=2", "dp=2 data_parallel=ddp", "dp=2 data_parallel=accelerate", "fsdp=2"]
)
@pytest.mark.parametrize("victim", [None, 1])
@pytest.mark.parametrize("window", KILLS)
def test_a_killed_group_goes_on(
    bench: Callable[[str], Bench], layout: str, window: str, victim: int | None
) -> None:
    found = bench(layout)
    if victim is not None and (found.ranks == 1 or window in ONLY_MAIN):
        return
    whole = found.uninterrupted()
    name = f"{window} {victim}"
    require_same(whole, found.killed_and_resumed(name, window=(window, KILLS[window]), victim=victim))


ONLY_MAIN = (
    *("half of the weights", "before the rename", "pruning", "before the manifest", "after the rename"),
    *("half of a row", "final model"),
)
"""Windows through which only the first rank goes."""


@pytest.mark.extended
@pytest.mark.parametrize("layout", ["", "dp=2 data_parallel=ddp"])
@pytest.mark.parametrize("number", range(8))
def test_a_run_killed_at_any_moment_goes_on(bench: Callable[[str], Bench], layout: str, number: int) -> None:
    found = bench(layout)
    whole = found.uninterrupted()
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder = found.home / f"random-{seed}"
    for attempt in range(3):  # killed up to twice
        try:
            more = [LATEST] if attempt else []
            found.run(folder, *more, after=draw.uniform(0.2, 2.5) if attempt < 2 else None)
        except RankError:
            continue
        break
    else:
        pytest.fail("the last attempt is not killed")
    require_same(whole, folder)


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
    if live:
        return [*EXACT, *model]
    dump = (
        "debug.enable_data_dump=true",
        "debug.dump_options.trajectory=true",
        f"debug.dump_dir={home / 'r'}",
    )
    pool.run(targets.trained, {"overrides": [*EXACT, *model, *dump, f"output_dir={home / 'rec'}"]}, 1)
    return [
        *(*EXACT, *model, "rollout_worker.type=mock", "rollout_worker.need_llm_inference=false"),
        f"rollout_worker.trajectory_load_path={home / 'r'}",
    ]


@pytest.mark.one_in(14)
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
        expected = load_file(tmp_path / "one" / "final" / "model.safetensors")
        actual = load_file(tmp_path / point / "final" / "model.safetensors")
        for key, truth in expected.items():
            np.testing.assert_allclose(
                actual[key], truth, rtol=0, atol=1e-12 * np.abs(truth).max(), err_msg=key
            )


def copied(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder)
    return folder


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
