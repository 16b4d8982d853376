"""Faults planted in the released trainers are caught and located, and harmless changes are not flagged."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from plants.catalogue import FAULTS, HARMLESS, Plant
from plants.runs import run

from regress.systems.conformance_row import ConformanceRow, Result

pytestmark = pytest.mark.systems

UNSEEN = {"trainer:weights_decay"}
"""Faults that are below the tolerance of the quantity that they change first, and found after it."""


@pytest.fixture(scope="module", params=list(dict.fromkeys(plant.system for plant in FAULTS)))
def rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Plant, ConformanceRow]:
    """Rows of all plants of a system, which one process runs."""
    plants = [plant for plant in (*FAULTS, *HARMLESS) if plant.system == request.param]
    return dict(run(request.param, plants, tmp_path_factory.mktemp("systems")))


def test_faults_are_caught(rows: Mapping[Plant, ConformanceRow]) -> None:
    missed = {
        plant.location: row.told for plant, row in rows.items() if plant.kind and row.result != Result.WRONG
    }
    assert not missed


def test_faults_are_located(rows: Mapping[Plant, ConformanceRow]) -> None:
    faults = {f"{plant.system}:{plant.name}": (plant, row) for plant, row in rows.items() if plant.kind}
    elsewhere = {name for name, (plant, row) in faults.items() if not plant.located(row.first)}
    assert elsewhere == UNSEEN & set(faults)


def test_harmless_changes_are_not_flagged(rows: Mapping[Plant, ConformanceRow]) -> None:
    flagged = {
        plant.location: row.told
        for plant, row in rows.items()
        if not plant.kind and row.result != Result.EXACT
    }
    assert not flagged
