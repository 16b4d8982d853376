"""Variants of sampled cases: the same rollouts from other batches and layouts of the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regress.replay.parts import overrides_of
from regress.replay.variants import BOTH, SEMANTICS, Precision, Variant

CASES = ("@sampled",)


def _row(
    name: str,
    why: str,
    layout: str = "",
    *,
    size: int | None = None,
    precisions: tuple[Precision, ...] = SEMANTICS,
    default: bool = False,
) -> Variant:
    found: dict[str, Any] = dict(overrides_of(layout) or {}) if layout else {}
    if size is not None:
        found["rollout_worker.batch_size"] = size
    return Variant(name, why, found, precisions, CASES if default else (), possible=CASES)


_ROWS = (
    _row("rollout-batch1", "draws and log-probs that depend on the rows beside", size=1, precisions=BOTH),
    _row(
        "rollout-dp2-batch5",
        "streams of ranks that are shared, or start with the rank",
        "dp2",
        size=5,
        default=True,
    ),
    _row("rollout-tp2", "weights that are sampled from before they are put together", "tp2", default=True),
    _row(
        "rollout-fsdp2-packed", "shards that are sampled from as they were before the update", "fsdp2-packed"
    ),
    _row("rollout-pp2", "stages put together in another order", "pp2"),
    _row("rollout-cp2", "ranks that each sample all prompts", "cp2"),
    _row("rollout-dp3", "a rank that samples no prompt", "dp3", size=2),
)

ROLLOUTS: Mapping[str, Variant] = {row.name: row for row in _ROWS}
"""Variants of sampled cases, by name."""
