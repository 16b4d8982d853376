"""Small dumps of released trainers with a planted fault, judged without the trainers; and the plants themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from plants.catalogue import FAULTS, HARMLESS
from plants.rewriting import rewritten

from regress.golden.golden_directory import GoldenStore
from regress.systems.cell_judge import judge
from regress.systems.conformance_row import Result
from regress.systems.conformance_run import Workspace, chosen
from regress.systems.system_registry import load, location_of

HERE = Path(__file__).parent
RECORDED = {
    "trl": "k1_as_a_loss",
    "verl": "dual_clip_of_gains",
    "deepspeed": "accumulation_not_divided",
    "megatron": "tokens_of_this_rank_only",
}
"""Plants of which the first update was kept, up to the gradients of the first rank."""


@pytest.mark.parametrize("system", RECORDED)
def test_a_planted_fault_is_located(system: str, tmp_path: Path) -> None:
    plant = next(one for one in FAULTS if (one.system, one.name) == (system, RECORDED[system]))
    adapter = load(location_of(system))
    cell = replace(chosen(adapter, [plant.cell])[0], updates=1)
    truth = Workspace(tmp_path, GoldenStore(HERE.parents[1] / "golden")).truth(cell, adapter.objective(cell))
    found = judge(truth, HERE / "dumps" / f"planted-{system}")
    assert found.result is Result.WRONG
    assert plant.located(found.first), found.told


def test_plants_are_of_cells_and_categories() -> None:
    for plant in (*FAULTS, *HARMLESS):
        cells = {cell.name for cell in load(location_of(plant.system)).cells()}
        assert plant.cell in cells, plant
    for system in {plant.system for plant in FAULTS}:
        kinds = [plant.kind[0] for plant in FAULTS if plant.system == system]
        assert len(set(kinds)) == len(kinds) == 6
    assert set(Counter(plant.system for plant in HARMLESS).values()) == {5}


def _outer(number: int) -> int:
    """Function with a free variable of its own inside."""

    def inner() -> int:
        return number + 1

    return inner() * 2


def test_a_source_is_rewritten_inside_only() -> None:
    with rewritten(_outer, {"number + 1": "number + 2"}):
        assert _outer(1) == 6
    assert _outer(1) == 4


def test_a_source_that_changed_is_refused() -> None:
    with (
        pytest.raises(LookupError, match="_outer has 0 times, not once: number - 1"),
        rewritten(_outer, {"number - 1": ""}),
    ):
        pass
