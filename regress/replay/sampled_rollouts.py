"""Rollouts of a sampled case: drawn by the base variant in true float64, with every decision clear of its boundary."""

from __future__ import annotations

import shutil
from pathlib import Path

from regress.dump.dump_reader import DumpReader, read_all
from regress.engine.decision_margins import margins
from regress.errors import ReplayError
from regress.golden.golden_case import GREEDY, GoldenCase
from regress.replay.case_recipe import Recipe
from regress.replay.case_run import run_steps, write_rollouts
from regress.replay.replay_configuration import replay_config
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE

MARGIN = 1e-6
"""Least probability between a decision and another outcome: what rounds differently in float64 differs by 1e-12."""


def sample_rollouts(case: GoldenCase, workspace: Path) -> float:
    """Write ``trajectories/`` and ``greedy/`` of a case, and return the least margin of a decision.

    Raises:
        ReplayError: if a draw, an argmax, or a cut of top-k or top-p lies within `MARGIN` of another outcome.
    """
    config = replay_config(case, BASE, Precision.FLOAT64, Recipe.of(case).steps, workspace)
    with margins() as found:
        run_steps(config)
    least = min(found)
    if least < MARGIN:
        raise ReplayError(f"""case {case.name}: a decision of the sampler lies within {least:.1e} of another outcome,
        and of {len(found)} none may within {MARGIN:g}, as rounding would decide it; choose another seed in
        {case.folder / "case.yaml"}""")
    dump = DumpReader(config.debug.dump_dir)
    for folder in ("trajectories", GREEDY):
        shutil.rmtree(case.folder / folder, ignore_errors=True)
    for record in dump.records("trajectory"):
        write_rollouts(case.folder / "trajectories", record)
    for path in sorted((Path(config.output_dir) / GREEDY).iterdir()):
        (record,) = read_all(path)
        write_rollouts(case.folder / GREEDY, record)
    return least
