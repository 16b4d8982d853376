"""Runs that are killed and resumed, and what must then be as in the run that nothing interrupted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from regress.dump.bitwise_difference import compare_bitwise
from regress.dump.metrics_file import metrics_of, read_metrics
from regress.engine.checkpoint import latest
from regress.errors import RankError
from regress.parallel.launch.rank_pool import RankPool

RECORDED = ("trajectory", "old_log_probs", "loss", "gradient", "param", "optimizer")
DUMPED = ("debug.enable_data_dump=true", *(f"debug.dump_options.{name}=true" for name in RECORDED))
SAVED = ("trainer.save_updates=1", "trainer.save_total_limit=2")
LATEST = "trainer.resume_from_checkpoint=latest"

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

ONLY_MAIN = (
    *("half of the weights", "before the rename", "pruning", "before the manifest", "after the rename"),
    *("half of a row", "tracker flush", "half of the tracking state", "final model"),
)
"""Windows through which only the first rank goes."""


class Bench:
    """Runs of one configuration in one layout, and the run that nothing interrupts.

    Args:
        overrides: what every run has in common.
        name: name of the configuration; None: the default one.
    """

    def __init__(
        self,
        pool: RankPool,
        targets: Any,
        home: Path,
        overrides: Sequence[str],
        *,
        ranks: int = 1,
        name: str | None = None,
    ) -> None:
        self.pool, self.targets, self.home, self.ranks, self.name = pool, targets, home, ranks, name
        self.overrides = [*DUMPED, *SAVED, *overrides]
        self.whole = home / "whole"
        self.cpu = 0.0

    def run(self, folder: Path, *more: str, **how: Any) -> list[Any]:
        overrides = [*self.overrides, f"output_dir={folder}", *more]
        given = {"overrides": overrides, "config_name": self.name, **how}
        return self.pool.run(self.targets.trained, given, self.ranks, timeout=240)

    def refused(self, folder: Path, *more: str, **how: Any) -> list[str]:
        """Return the sentence with which each rank of a run ends; any other error fails the test."""
        given = {"overrides": [*self.overrides, f"output_dir={folder}", *more], **how}
        return self.pool.run(self.targets.refused, given, self.ranks, timeout=240)

    def uninterrupted(self) -> Path:
        if not self.whole.exists():
            self.cpu = min(found["cpu"] for found in self.run(self.whole))
        return self.whole

    def killed_and_resumed(self, name: str, **how: Any) -> Path:
        """Return the folder of a run that was killed in a window, and went on from what was on the disk."""
        folder = self.home / name.replace(" ", "-")
        with pytest.raises(RankError, match="was ended by SIGKILL"):
            self.run(folder, **how)
        self.resume(folder)
        return folder

    def resume(self, folder: Path, **how: Any) -> None:
        saved = latest(folder)
        (said, *_) = [found["said"] for found in self.run(folder, LATEST, **how)]
        expected = "no checkpoint in" if saved is None else f"going on from {saved}"
        assert expected in said.replace("\n", "")

    def killed_at_random(self, seed: int, victim: int | None = None) -> Path:
        """Return the folder of a run that was killed at a moment of its processor time, once or twice.

        Processor time, because on a busy machine a moment on the clock could always be before the first step.
        """
        draw = random.Random(seed)
        moments = [draw.uniform(0.05, 0.9) * self.cpu for _ in range(6)]
        for number, moment in enumerate(moments[1:]):
            folder = self.home / f"random-{seed}-{number}-{victim}"
            if self.dies(folder, after=moment, victim=victim):
                break
        else:
            pytest.fail("no run was killed")
        if self.dies(folder, LATEST, after=moments[0], victim=victim):
            self.resume(folder)
        return folder

    def dies(self, folder: Path, *more: str, **how: Any) -> bool:
        """Run, and return True if the kernel ended it."""
        try:
            self.run(folder, *more, **how)
        except RankError as error:
            if "was ended by SIGPROF" not in str(error):
                raise
            return True
        return False


def require_same(whole: Path, again: Path) -> None:
    """The same final weights, state of the optimizer, metrics and dump, bit for bit."""
    expected, actual = (load_file(run / "final" / "model.safetensors") for run in (whole, again))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    states = [
        {path.name: path.read_bytes() for path in Path(str(latest(run))).glob("*.safetensors")}
        for run in (whole, again)
    ]
    assert states[0].keys() >= {"model.safetensors", "optimizer.safetensors"}
    assert states[0] == states[1]
    assert seen(again) == seen(whole)
    assert compare_bitwise(whole / "debug_dump", again / "debug_dump").differences == []
    left = [path.name for path in again.iterdir() if path.name.startswith(".")]
    assert left == [], "something was left over"


def seen(run: Path) -> list[tuple[Any, ...]]:
    """Metrics as the read view shows them, without segments, numbers and times."""
    rows = read_metrics(run / "metrics.jsonl", lambda text: None)
    return [(row["step"], row.get("update"), metrics_of(row)) for row in rows]
