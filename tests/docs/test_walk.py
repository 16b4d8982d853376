"""Every row of the documents' capabilities is walked: its command is run, small, and its outcome looked at."""

from __future__ import annotations

import pytest

from tests.docs import rows_dumps, rows_experiments, rows_guide, rows_mock, rows_repair
from tests.docs.walking import CHECKS, ROWS, Shown, Walk

PARTS = (rows_dumps, rows_mock, rows_repair, rows_guide, rows_experiments)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The folder of the whole walk."""
    return Walk(tmp_path_factory.mktemp("walk"))


def test_every_row_that_works_is_walked_once() -> None:
    assert all(any(one.check.__module__ == part.__name__ for one in CHECKS) for part in PARTS)
    shown = [row for one in CHECKS for row in one.rows]
    assert len({*shown}) == len(shown), "a row is shown twice"
    promised = {row for row in ROWS if row[3] in ("works", "replaced")}
    assert {row[:3] for row in promised - {*shown}} == set()
    assert {row[3] for row in shown} == {"works", "replaced"}


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one", CHECKS, ids=lambda one: f"{one.document}-{one.check.__name__}")
def test_a_row_is_as_it_says(one: Shown, walk: Walk) -> None:
    one.check(walk)
