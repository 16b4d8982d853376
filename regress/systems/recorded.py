"""Recording of a system: `regress.record` with the case's rollouts beside, from which `regress explain` reads more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from regress.capture.recording import record
from regress.dump.recorder import Recorder
from regress.dump.trajectory import Trajectory, to_record
from regress.systems.exported import ExportedCase, Sample
from regress.systems.protocol import Cell


@contextmanager
def recorded(
    folder: Path, model: nn.Module, case: ExportedCase, cell: Cell, **options: Any
) -> Iterator[Recorder]:
    """Record a system's updates with token gradients, and on the first rank the rollouts that they are made on.

    Args:
        folder: that of the dump.
        options: further arguments of `regress.record`.
    """
    options = {"token_gradient": True, **options}
    with record(folder, model, **options) as recorder:
        if int(os.environ.get("RANK", "0")) == 0:
            for step, samples in enumerate(case.steps[: cell.updates]):
                recorder.put(to_record([trajectory(sample) for sample in samples], step))
        yield recorder


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
