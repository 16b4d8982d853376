"""Reward curves of trainings with a fault, beside those of healthy seeds: what a look at the curve would notice."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, TypedDict

from regress.dump.command_outputs import Output, StandardOutput, save_output
from regress.dump.dump_location import Location, read_bytes
from regress.engine.config import load_config
from regress.engine.run_construction import build
from regress.errors import ReplayError, reason
from regress.json_schema import IsFinite, conform
from regress.replay.case_run import no_progress, torch_settings
from regress.replay.temporary_workspace import Workspace
from regress.untrusted_files import DOCUMENT, parse_json
from tests.faults.registry import installed

NAMED = (
    *("mean_of_means", "loss_divided_by_microbatches", "only_the_last_survives", "kl_detached"),
    *("population_deviation", "statistics_of_the_batch", "groups_interleaved", "advantages_reversed"),
    *("clip_sides_swapped", "ratio_inverted", "minimum_before_the_advantage", "another_estimator"),
    *("reference_is_the_policy", "clipping_left_out", "no_weight_decay", "counter_one_ahead"),
    *("learning_rate_off", "logits_in_bfloat16", "rotary_in_bfloat16", "stop_token_not_in_the_loss"),
)
"""Faults whose curves are drawn by default."""
HEALTHY = ""
"""Name of the trainings without a fault."""
LAST = 10
"""Steps at the end of a curve that are looked at."""
OVERRIDES = (
    *("data.prompts_per_step=8", "data.group_size=8", "rollout_worker.batch_size=64"),
    *("batching.micro_batch_size=22", "algorithm.kl_coef=0.04", "evaluation.every_n_steps=0"),
    *("optimizer.warmup_steps=5", "optimizer.learning_rate=2e-3", "tracking.trackers=[]"),
)
"""Changes of the built-in configuration ``reverse_string``: smaller steps, several microbatches, a reference."""

Curves = Mapping[str, Mapping[int, Sequence[float]]]
"""Fault, or `HEALTHY` -> seed -> mean reward of each step."""


@dataclass(frozen=True)
class Verdict:
    """Reading of the curves of a fault.

    Attributes:
        end: mean reward of the last steps, over all seeds.
        low, high: least and greatest of those of the healthy seeds.
    """

    fault: str
    end: float
    low: float
    high: float

    @property
    def noticed(self) -> bool:
        """True if the curve ends outside of the range of the healthy seeds."""
        return not self.low <= self.end <= self.high


def curve(fault: str, seed: int, steps: int) -> list[float]:
    """Train for so many steps from a seed, with a fault unless its name is empty; return the mean reward of each."""
    with (
        Workspace() as folder,
        torch_settings(1),
        installed(fault or None) as broken,
        ExitStack() as resources,
    ):
        given = (*OVERRIDES, f"seed={seed}", f"max_steps={steps}", f"output_dir={folder}", "threads=1")
        config = load_config(config_name="reverse_string", overrides=given, environ={}).config
        run = build(config, resources, no_progress)
        if broken is not None:
            broken(run)
        found = [run.trainer.step(step) for step in range(steps)]
    return [float(values["rollouts/returns_mean"]) for values in found]


def drawn(
    faults: Sequence[str],
    path: Output,
    *,
    steps: int,
    seeds: int,
    healthy: int,
    advance: Callable[[str], None] = lambda _: None,
) -> Curves:
    """Return the curves of faults and of healthy seeds; those that the file has are kept, and each new one is added."""
    known = read(path, steps) if not isinstance(path, StandardOutput) and path.exists() else {}
    wanted = [(HEALTHY, seed) for seed in range(healthy)]
    wanted += [(fault, seed) for fault in faults for seed in range(seeds)]
    for fault, seed in wanted:
        own = known.setdefault(fault, {})
        if seed not in own:
            own[seed] = curve(fault, seed, steps)
            save_output(path, json.dumps({"steps": steps, "curves": known}) + "\n")
        advance(fault or "healthy")
    return known


class _Document(TypedDict):
    steps: int
    curves: dict[str, dict[str, list[Annotated[float, IsFinite()]]]]


def read(path: Location, steps: int | None = None) -> dict[str, dict[int, list[float]]]:
    """Return the curves of a file; none if they are those of another number of steps.

    Raises:
        ReplayError: for a file that holds none.
    """
    try:
        tree: _Document = conform(parse_json(read_bytes(path, DOCUMENT)), _Document, "it")
        if not all(seed.isdecimal() for own in tree["curves"].values() for seed in own):
            raise ValueError("a seed is not a number")
        if not all(values for own in tree["curves"].values() for values in own.values()):
            raise ValueError("a curve has no steps")
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"{path} holds no reward curves ({reason(error)}); write one with python -m tests.faults curves"
        ) from error
    if steps not in (None, tree["steps"]):
        return {}
    return {
        fault: {int(seed): [*values] for seed, values in own.items()} for fault, own in tree["curves"].items()
    }


def verdicts(curves: Curves) -> list[Verdict]:
    """Return what the curves of each fault say.

    Raises:
        ReplayError: if there is no healthy one beside them.
    """
    ends = [_end(values) for values in curves.get(HEALTHY, {}).values()]
    if not ends:
        raise ReplayError("there is no healthy curve, beside which others are read; draw it with --healthy")
    return [
        Verdict(fault, statistics.fmean(_end(values) for values in own.values()), min(ends), max(ends))
        for fault, own in curves.items()
        if fault != HEALTHY and own
    ]


def _end(values: Sequence[float]) -> float:
    return statistics.fmean(values[-LAST:])
