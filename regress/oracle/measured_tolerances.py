"""Tolerances of a coarse precision, measured on the very updates that are judged.

The rule is that of golden cases (`regress.replay.tolerance_calibration`): ``kappa`` times the largest of the response
to weights that are moved by one unit in the last place of the dtype, over several seeds, and of the error of the engine
in that precision; both against true float64. Weights are moved for the forward and backward pass only, so that
parameters answer to what their gradients do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from regress.compare.dumps.comparison import compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.quantities import quantity_named
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.golden.case_manifest import ToleranceEntry
from regress.oracle.update_repetition import Repetition
from regress.replay.noise_floor import Floor, Response
from regress.replay.variant import Precision

SEEDS = 3
"""Perturbations that are measured, as by TTrace (arXiv 2506.09280)."""
NAME = "bfloat16"

Responses = dict[str, dict[str, Response]]
"""``quantity -> tensor -> measured response``."""


def measured_bounds(
    repetition: Callable[[Config], Repetition], config: Config, truth: Path, work: Path, *, mixed: bool
) -> Bounds:
    """Return the tolerances of bfloat16 for the updates of a dump.

    Args:
        repetition: returns what repeats them, under a configuration.
        config: that of the true values, in ``truth``.
        work: folder for the measurements.
        mixed: weights and optimizer are in float32, as under autocast; else everything is in bfloat16.
    """
    found: Responses = {}
    chosen = _config(config, work / "dtype", "float32" if mixed else NAME)
    rough = replace(repetition(chosen), context=_autocast if mixed else nullcontext)
    _widen(found, truth, rough.run(), lambda relative, error: Response(0.0, relative, error))
    for seed in range(SEEDS):
        moved = replace(repetition(_config(config, work / f"seed{seed}", "float64")), perturb=_moved(seed))
        _widen(found, truth, moved.run(), lambda relative, error: Response(relative, 0.0, error))
    entries: Mapping[str, Mapping[str, ToleranceEntry]] = {
        quantity: {NAME: Floor.of(quantity, Precision.BFLOAT16, tensors, SEEDS).entry}
        for quantity, tensors in found.items()
    }
    return Bounds(measured=entries, precision=NAME)


def _config(config: Config, folder: Path, dtype: str) -> Config:
    return replace(
        config,
        model=replace(config.model, dtype=dtype),
        debug=replace(config.debug, dump_dir=str(folder)),
    )


def _autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _moved(seed: int) -> Callable[[LocalPolicy], None]:
    """Return a function that multiplies weights by ``1 + s * eps``, ``s`` drawn from -1 and +1."""
    eps = torch.finfo(torch.bfloat16).eps

    @torch.no_grad()
    def move(policy: LocalPolicy) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _, parameter in policy.named_parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.mul_(1 + sign * eps)

    return move


def _widen(found: Responses, truth: Path, dump: Path, response: Callable[[float, float], Response]) -> None:
    """Take the largest error of each tensor that is compared by value."""
    unbounded = Options(bounds=Bounds(given=Tolerance(math.inf)))
    for verdict in compare_dumps(str(truth), str(dump), unbounded).verdicts:
        if verdict.status in (Status.OK, Status.DRIFT) and not quantity_named(verdict.quantity).exact:
            tensors = found.setdefault(verdict.quantity, {})
            known = tensors.get(verdict.name, Response())
            tensors[verdict.name] = known.joined(response(verdict.relative, verdict.max_error))
