"""The truth of a cell: what the system's configuration claims, computed by the engine in true float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regress.golden.case import GoldenCase
from regress.grpo.presets import make_objective
from regress.replay.configure import case_config, compose, dump_everything
from regress.replay.run import run_steps
from regress.replay.variants import Precision

COLD: Mapping[str, Any] = {"optimizer.state_path": None, "trainer.epochs": 1, "trainer.mini_batch_size": None}
"""A released trainer starts its optimizer itself, and makes one update of each recorded rollout batch."""
_SECTION = "algorithm."


def truth(case: GoldenCase, objective: Mapping[str, Any], updates: int, folder: Path) -> Path:
    """Compute the values of a case under another objective, unpadded, on one process, in true float64.

    Args:
        objective: dotted keys of the engine's configuration; any of ``algorithm.`` replace the case's own objective.
        updates: number of recorded rollout batches, from the first.
        folder: new, for the dump.

    Returns:
        The folder of the dump.

    Raises:
        RegressError: if the case is damaged or the objective impossible.
    """
    case.verify_inputs()
    own = {key.removeprefix(_SECTION): value for key, value in objective.items() if key.startswith(_SECTION)}
    layers: list[Mapping[str, Any]] = [case_config(case, updates), dump_everything(folder), COLD]
    config = dict(case.config)
    if own:
        config.pop("algorithm", None)
        if not make_objective(own.pop("preset", None), **own).needs_reference:
            layers.append({"reference.path": None})
    layers += [Precision.FLOAT64.overrides, objective]
    run_steps(compose(config, {key: value for layer in layers for key, value in layer.items()}, folder))
    return folder / "dump"
