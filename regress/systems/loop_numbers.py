"""Numbers of the loss for systems that have none of their own: the loop around them is the adapter's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from regress.replay.exported_case import ExportedCase, Sample


def group_advantages(samples: Sequence[Sample]) -> list[float]:
    """Return reward minus the mean of the group, over its standard deviation."""
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.key[0], []).append(sample.reward)
    found = []
    for sample in samples:
        own = groups[sample.key[0]]
        spread = statistics.stdev(own) if len(own) > 1 else 0.0
        centred = sample.reward - statistics.fmean(own)
        found.append(centred / (spread + 1e-6) if len(set(own)) > 1 else 0.0)
    return found


def loss_mask(sample: Sample) -> list[int]:
    """Return 1 at the tokens of prompt and completion that enter the loss."""
    return [0] * len(sample.prompt) + sample.mask


def sampler_log_probs(sample: Sample) -> list[float]:
    """Return the sampler's log-probs of prompt and completion, 0 where there are none."""
    known = sample.sampler or []
    return [0.0] * len(sample.prompt) + [0.0 if value is None else value for value in known]


def manifest_config(
    case: ExportedCase, system: str, dtype: str = "float32", *, clip: bool = True
) -> dict[str, Any]:
    """Return what a dump tells of the run: the system, the dtype, and AdamW by which the judge follows updates."""
    optimizer = {
        "learning_rate": case.learning_rate(0),
        "betas": list(case.optimizer["betas"]),
        "eps": case.optimizer["eps"],
        "max_grad_norm": case.numbers["max_grad_norm"] if clip else None,
    }
    return {"model": {"dtype": dtype}, "optimizer": optimizer, "capture": {"system": system}}
