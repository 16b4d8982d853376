"""Step time with every token-level dump, against the same steps without a dump.

Timed: blocks of whole steps of the engine's trainer on recorded rollouts, as in mock mode: batch, log-probs of the
policy and of the reference before the update, advantages, one update. The blocks with dumps also open the dump,
wait for its writer at the end and write the manifest: all the work that a run with dumps does more, amortized over
the steps of a block. Both sides hold the same weights throughout, which is checked bit by bit at the end.

On a busy machine the ratio for the large model says little: a few percent drown in what others take. So the same dumps
(same lengths, same tensors, same bytes) are also taken from a model with next to no computation, where their cost
stands out, and that cost is compared with the step of the large model.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.report import Report
from benchmarks.timing import Measured, alternate, timed
from benchmarks.workload import TEN_MILLION, TINY, Size, make_trainer, make_trajectories, stepper
from regress.dump.recorder import Recorder
from regress.dump.taps import recording
from regress.engine.grpo_trainer import Trainer

TYPES = (
    "trajectory",
    "old_log_probs",
    "ref_log_probs",
    "forward_data",
    "loss",
    "is_loss_debug",
    "batch_inputs",
)
FORMATS = ("safetensors", "pt", "jsonl")
SETTINGS = ("algorithm.preset=grpo", "batching.layout=packed", "model.attn_implementation=varlen")


SAME_DUMPS = replace(
    TEN_MILLION,
    name="10M batch, tiny model",
    vocabulary=TINY.vocabulary,
    model={"max_position_embeddings": 1024},
)
SIZES = ((TEN_MILLION, 2, 5), (SAME_DUMPS, 10, 9), (TINY, 20, 15))
"""Size, steps per block, rounds."""


def run() -> Report:
    """Time three workloads; the less a step computes, the more its dumps weigh."""
    report = Report("dump_overhead", "step time with all token-level dumps")
    measured = {}
    for size, steps, rounds in SIZES:
        measured[size.name], report.facts[size.name] = _measure(size, steps, rounds)
        report.add_times(measured[size.name], "off", prefix=f"{size.name}: ")
    large, small = measured[TEN_MILLION.name], measured[SAME_DUMPS.name]
    cost = small.excess("safetensors", "off")
    report.facts["safetensors_cost_s_per_step"] = cost
    report.goals["10M, safetensors over off"] = (large.ratio("safetensors", "off"), 1.05)
    report.goals["10M, by the cost of the same dumps"] = (1 + cost / large.wall("off"), 1.05)
    return report


def _measure(size: Size, steps: int, rounds: int) -> tuple[Measured, dict[str, object]]:
    trajectories = make_trajectories(size, prompts=2, group_size=4)
    trainers = {name: make_trainer(size, trajectories, SETTINGS) for name in ("off", *FORMATS)}
    with tempfile.TemporaryDirectory() as folder:
        blocks = {"off": _block(trainers["off"], steps)}
        for name in FORMATS:
            blocks[name] = _dumping(trainers[name], steps, Path(folder), name)
        measured = alternate({name: timed(block, steps) for name, block in blocks.items()}, rounds)
        bytes_per_step = {name: _bytes(Path(folder), name) // (steps * (rounds + 1)) for name in FORMATS}
    _check_same_weights(trainers)
    return measured, {"steps_per_block": steps, "rounds": rounds, "bytes_per_step": bytes_per_step}


def _block(trainer: Trainer, steps: int) -> Callable[[], None]:
    step = stepper(trainer)

    def block() -> None:
        for _ in range(steps):
            step()

    return block


def _dumping(trainer: Trainer, steps: int, folder: Path, format: str) -> Callable[[], None]:
    block, numbers = _block(trainer, steps), itertools.count()

    def dumping() -> None:
        target = folder / format / str(next(numbers))
        with recording(Recorder(target, options=dict.fromkeys(TYPES, True), format=format)):
            block()

    return dumping


def _bytes(folder: Path, format: str) -> int:
    return sum(path.stat().st_size for path in (folder / format).rglob("*") if path.is_file())


def _check_same_weights(trainers: dict[str, Trainer]) -> None:
    base = trainers["off"].policy.model.state_dict()
    for name in FORMATS:
        for key, value in trainers[name].policy.model.state_dict().items():
            if not torch.equal(value, base[key]):
                raise AssertionError(f"dumping as {name} changed {key}: a dump must not change training")
