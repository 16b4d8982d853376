"""`regress oracle` on verl's dumps: healthy ones pass without a case, planted faults are caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plants.catalogue import FAULTS

from regress.compare.dumps.comparison import Comparison
from regress.golden.golden_directory import GoldenStore
from regress.oracle.oracle_judge import judge_dump
from regress.replay.exported_case import ExportedCase
from regress.systems.cell_launch import run_jobs
from regress.systems.cell_worker import Job
from regress.systems.conformance_run import Workspace, chosen
from regress.systems.protocol import Cell
from regress.systems.system_environments import environment_of
from regress.systems.system_registry import load, location_of

pytestmark = [pytest.mark.systems, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
SYSTEM = "verl"
OWN = {plant.name: plant for plant in FAULTS if plant.system == SYSTEM}
HEALTHY = (
    "packed/verl:token-mean/dense",
    "fsdp2-micro3/verl:gspo/dense",
    "ulysses2-flash-micro3/verl:token-mean/dense",
)
MIXED = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}


def cell_of(name: str, precision: str) -> Cell:
    """Return a cell of one update with an optimizer of its own, as a user's first step has."""
    cell = replace(chosen(load(location_of(SYSTEM)), [name])[0], warm=False, updates=1, precision=precision)
    if precision == "float32":
        return cell
    settings = {**cell.layout.settings, "engine": {**cell.layout.settings.get("engine", {}), **MIXED}}
    return replace(cell, layout=replace(cell.layout, settings=settings))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    """Judge the dumps of all cells, healthy and planted, in one precision."""
    folder, system = tmp_path_factory.mktemp(request.param), load(location_of(SYSTEM))
    tasks = {name: (cell_of(name, request.param), "") for name in HEALTHY}
    tasks |= {plant.name: (cell_of(plant.cell, request.param), plant.location) for plant in OWN.values()}
    export = Workspace(folder, GoldenStore(HERE.parents[1] / "golden")).export("dense")
    jobs = []
    for name, (cell, plant) in tasks.items():
        own = folder / name.replace("/", "-")
        job = Job(location_of(SYSTEM), cell.to_json(), str(export), str(own / "dump"), plant, (str(HERE),))
        jobs.append((job, cell.layout.ranks))
    environment, errors = environment_of(system), []
    run_jobs(
        environment.python,
        jobs,
        folder / "runs",
        modules=system.modules,
        environ={**environment.variables, **system.environ},
        timeout=300,
        on_outcome=lambda _, outcome: errors.append(outcome.error or outcome.missing),
    )
    assert not any(errors)
    found = {}
    for name, (cell, _) in tasks.items():
        settings: dict[str, Any] = dict(system.objective(cell))
        preset = settings.pop("algorithm.preset")
        settings.pop("optimizer.weight_decay")  # the dump tells what AdamW had
        if preset == "verl:dr_grpo":
            settings["algorithm.norm_length"] = ExportedCase(export).numbers["norm_length"]
        own = folder / name.replace("/", "-")
        found[name] = judge_dump(own / "dump", own / "truth", preset=preset, settings=settings).comparison
        assert not found[name].problems, (name, found[name].problems)
    return found


def test_healthy_dumps_are_within_tolerance(judged: dict[str, Comparison]) -> None:
    assert not {name: judged[name].failed[:2] for name in HEALTHY if judged[name].exit_code}
    for name in HEALTHY:
        kinds = {verdict.quantity for verdict in judged[name].verdicts}
        assert {"log_probs", "loss", "token_gradient", "gradient", "param", "optimizer"} <= kinds


def test_faults_are_caught(judged: dict[str, Comparison], request: pytest.FixtureRequest) -> None:
    coarse = "bfloat16" in request.node.name
    missed = {name for name in OWN if judged[name].exit_code == 0}
    assert missed == set()
    if not coarse:
        first = {name: judged[name].failed[0].quantity for name in OWN}
        assert first == {plant.name: plant.first for plant in OWN.values()}
