"""Functions that ranks run in tests of training on several of them; a module of its own, because ranks import it."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console
from torch import distributed

from regress.dump import background_writer
from regress.engine import causal_lm_policy, grpo_trainer, rollout_worker, run_files, run_models
from regress.engine.checkpoint import checkpoint_writer
from regress.engine.config import load_config
from regress.engine.sampling import UndefinedDistribution
from regress.engine.tracking.metrics_log import TrackedLog
from regress.errors import ConfigError, DumpError, RegressError
from regress.parallel.parallel_policy import ParallelPolicy
from regress.parallel.parallel_run import train


def trained(
    folder: Path, overrides: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A whole run of ``regress train``, with a folder for what this rank writes."""
    os.environ.update(environment or {})
    said = io.StringIO()
    files = f"output_dir={folder / f'rank{distributed.get_rank()}'}"
    config = load_config(overrides=[*overrides, files], environ={}).config
    result = train(config, Console(file=said))
    return {"pass_rates": result.pass_rates, "said": said.getvalue(), "metrics": result.metrics}


def sampled(folder: Path, overrides: Sequence[str], stale: bool = False) -> dict[str, Any]:
    """The same, and what was sampled: a mark of every generator of this rank, and every rollout as it came to the
    trainer.

    Args:
        stale: keep the weights that are sampled from as they were at first.
    """
    marks: list[tuple[int, ...]] = []
    rollouts: list[list[tuple[str, int, list[int]]]] = []

    def seeing(*args: Any, generators: Sequence[Random], **kwargs: Any) -> Any:
        marks.extend(generator.getstate()[1][:4] for generator in generators)
        return sample(*args, generators=generators, **kwargs)

    def counting(trajectories: Any) -> Any:
        rollouts.append([(found.group_id, found.run_id, found.tokens) for found in trajectories])
        return metrics(trajectories)

    with pytest.MonkeyPatch.context() as patch:
        sample, metrics = rollout_worker.sample, grpo_trainer.rollout_metrics
        patch.setattr(rollout_worker, "sample", seeing)
        patch.setattr(grpo_trainer, "rollout_metrics", counting)
        if stale:
            patch.setattr(ParallelPolicy, "_refresh", lambda self: None)
        return trained(folder, overrides) | {"marks": marks, "rollouts": rollouts}


def failing(folder: Path, overrides: Sequence[str], fault: str, culprit: int) -> tuple[str, str]:
    """Return the error of this rank when something is wrong on one of them.

    A rank that returns does not end, as one that raises does, so the others can only know what was reported
    to them.
    """
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == culprit:
            FAULTS[fault](patch)
        try:
            trained(folder, overrides)
        except RegressError as error:
            return type(error).__name__, str(error)
    return "", ""


def skipping(folder: Path, overrides: Sequence[str], culprit: int) -> dict[str, Any]:
    """A whole run in which the first training pass of one rank gives no number, and every other one does."""
    with pytest.MonkeyPatch.context() as patch:
        if distributed.get_rank() == culprit:
            _no_number(patch, passes=1)
        return trained(folder, [*overrides, "trainer.on_nonfinite=skip"])


def _no_number(patch: pytest.MonkeyPatch, passes: float = math.inf) -> None:
    forward = causal_lm_policy.LocalPolicy._forward
    made = 0

    def poisoned(self: Any, *args: Any, entropy: Any, **kwargs: Any) -> Any:
        nonlocal made
        out = forward(self, *args, entropy=entropy, **kwargs)
        made += entropy is not False
        return out if entropy is False or made > passes else replace(out, log_probs=out.log_probs * math.nan)

    patch.setattr(causal_lm_policy.LocalPolicy, "_forward", poisoned)


def _no_distribution(patch: pytest.MonkeyPatch) -> None:
    def undefined(*_: Any, **__: Any) -> Any:
        raise UndefinedDistribution(0)

    patch.setattr(rollout_worker, "sample", undefined)


def _raising(target: Any, name: str, error: RegressError | OSError) -> Any:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return lambda patch: patch.setattr(target, name, fails)


FAULTS = {
    "loss": _no_number,
    "sampling": _no_distribution,
    "dump": _raising(background_writer, "write_atomically", DumpError("the disk of this rank is full")),
    "model": _raising(run_models, "build_model", ConfigError("no checkpoint on this machine")),
    "metrics": _raising(TrackedLog, "log", RegressError("metrics cannot be written")),
    "publishing": _raising(run_files, "publish", OSError(28, "No space left on device")),
    "checkpoint": _raising(checkpoint_writer, "write_manifest", OSError(28, "No space left on device")),
    "unforeseen": _raising(grpo_trainer, "rollout_metrics", RegressError("nobody thought of this")),
}
