"""Rollouts of a case as trajectories, from which `regress explain` reads more than from a system's dump alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from regress.dump.reader import DumpReader
from regress.dump.trajectory import Trajectory
from regress.errors import RegressError
from regress.explain.explain import explain_update
from regress.explain.update import read_update
from regress.systems.exported import ExportedCase, Sample


def explained(dump: Path, case: ExportedCase) -> dict[str, str]:
    """Return what the first recorded step really did, by subject; empty where its dump does not tell."""
    try:
        rollouts = [trajectory(sample) for sample in case.steps[0]]
        found = explain_update(str(dump), read_update(DumpReader(str(dump)), 0, rollouts=rollouts))
    except RegressError:
        return {}
    return {statement.subject: statement.text for statement in found.statements}


def trajectory(sample: Sample) -> Trajectory:
    """Return a sample as the rollout that it was recorded from."""
    group, run = sample.key
    start = len(sample.prompt)
    values = None
    if sample.sampler is not None:
        values = np.array([0.0] * start + [0.0 if x is None else x for x in sample.sampler], np.float32)
    return Trajectory(
        group,
        run,
        sample.tokens,
        [0] * start + sample.mask,
        sample.reward,
        start,
        log_probs=values,
        finish_reason=sample.finish_reason,
    )
