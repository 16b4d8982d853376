"""Rollouts of a case as trajectories, from which `regress explain` reads more than from a system's dump alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.dump_reader import DumpReader
from regress.errors import RegressError
from regress.explain.explanation import explain_update
from regress.explain.update_tokens import UpdateTokens, read_update
from regress.replay.exported_case import ExportedCase, Sample


def explained(dump: Path, case: ExportedCase, claimed: Mapping[str, Any]) -> dict[str, str]:
    """Return what the first recorded step really did, by subject; empty where its dump does not tell.

    Args:
        claimed: what the system was told, as keys of the engine's configuration: with old log-probs of the sampler it
            was given the recorded ones.
    """
    try:
        rollouts = [sample.trajectory for sample in case.steps[0]]
        update = read_update(DumpReader(str(dump)), 0, rollouts=rollouts)
        if claimed.get("algorithm.old_log_probs") == "sampler":
            _give(update, "old_log_probs", case.steps[0], [sample.sampler for sample in case.steps[0]])
        if claimed.get("algorithm.kl_coef"):
            _give(update, "ref_log_probs", case.steps[0], [sample.reference for sample in case.steps[0]])
        found = explain_update(str(dump), update)
    except RegressError:
        return {}
    return {statement.subject: statement.text for statement in found.statements}


def _give(
    update: UpdateTokens,
    name: str,
    samples: Sequence[Sample],
    values: Sequence[Sequence[float | None] | None],
) -> None:
    """Add recorded log-probs that the system was given, unless its dump has them."""
    key = f"{name}/{name}"
    if update.get(f"is_loss_debug/{name}", key) is not None:
        return
    found = np.full(update.frame.size, np.nan)
    for number, index in enumerate(update.rollout.tolist()):
        given = None if index < 0 else values[index]
        if given is None:
            continue
        start = int(update.frame.offsets[number]) + len(samples[index].prompt)
        own = np.array([np.nan if value is None else value for value in given])
        found[start : start + len(own)] = own
    update.values[key] = found
