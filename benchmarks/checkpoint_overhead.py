"""Step time with a checkpoint after every step, against the same steps without any.

Timed: blocks of whole steps of the engine's trainer on recorded rollouts, as in mock mode. The blocks with checkpoints
also take the snapshots, and wait at their end for the one that is still being written, so all the work that a run with
checkpoints does more is counted. Weights, optimizer and tokenizer are written, hashed, read again and verified; the one
before is removed. Wall time is that goal's measure; on a machine without a free processor, where the writer takes
turns with the training, it nears the ratio of processor time, and what the thread that trains takes is told beside it.
Both sides hold the same weights throughout, which is checked bit by bit at the end.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.report import Report
from benchmarks.timing import alternate, timed
from benchmarks.workload import TEN_MILLION, make_trainer, make_trajectories, stepper
from regress.engine.checkpoint.checkpoint_saver import Saver
from regress.engine.grpo_trainer import Trainer
from regress.engine.run_construction import Run
from regress.engine.tokenizer import train_tokenizer

STEPS, ROUNDS = 10, 3
"""Steps per block, and rounds. A block ends as a run does, by waiting for its last checkpoint, which is one of ten."""
SETTINGS = ("algorithm.preset=grpo", "batching.layout=packed", "model.attn_implementation=varlen")
SAVING = ("trainer.save_steps=1", "trainer.save_total_limit=1", "trainer.resume_from_checkpoint=latest")


def run() -> Report:
    """Time steps at ten million parameters, with and without checkpoints."""
    disable_progress_bar()
    report = Report("checkpoint_overhead", "step time with a checkpoint after every step")
    trajectories = make_trajectories(TEN_MILLION, prompts=2, group_size=4)
    with tempfile.TemporaryDirectory() as folder:
        saving = (*SETTINGS, *SAVING, f"trainer.checkpoint_dir={folder}")
        off, on = (make_trainer(TEN_MILLION, trajectories, given) for given in (SETTINGS, saving))
        blocks = {"off": _block(off, lambda: None), "on": _saving(on)}
        measured = alternate({name: timed(block, STEPS) for name, block in blocks.items()}, ROUNDS)
        (last,) = Path(folder).glob("checkpoint-*")
        report.facts["bytes"] = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    for key, value in on.policy.model.state_dict().items():
        if not torch.equal(value, off.policy.model.state_dict()[key]):
            raise AssertionError(f"saving changed {key}: a checkpoint must not change training")
    report.facts |= {"steps_per_block": STEPS, "rounds": ROUNDS}
    report.add_times(measured, "off")
    report.facts["training_thread_cpu_ratio"] = round(measured.thread_ratio("on", "off"), 4)
    report.goals["10M, a checkpoint every step over none"] = (measured.ratio("on", "off"), 1.05)
    return report


def _block(trainer: Trainer, after: Callable[[], None]) -> Callable[[], None]:
    step = stepper(trainer)

    def block() -> None:
        for _ in range(STEPS):
            step()
            after()

    return block


def _saving(trainer: Trainer) -> Callable[[], None]:
    prompts: Any = SimpleNamespace(training_problems=1)  # rollouts are recorded
    unused: Any = None
    tokenizer = train_tokenizer(["words of a tokenizer"])
    saver = Saver(Run(trainer.config, tokenizer, prompts, trainer, unused, None, None))
    numbers = itertools.count(1)
    block = _block(trainer, lambda: saver.after_step(next(numbers), {}))

    def saved() -> None:
        block()
        saver.finish()

    return saved
