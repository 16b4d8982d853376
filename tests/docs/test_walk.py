"""Every row of the documents' capabilities is walked: its command is run, small, and its outcome looked at."""

from __future__ import annotations

import pytest

from tests.docs import rows_dumps, rows_experiments, rows_guide, rows_mock, rows_repair
from tests.docs.walking import CHECKS, ROOT, ROWS, Shown, Walk

ELSEWHERE = {
    ("1.2", "debug.remote_api_dump_options"): "tests/unit/service/client/test_remote_dumps.py",
    (
        "1.2",
        "write prepared_trajectories, datums and training_metrics",
    ): "tests/unit/service/client/test_remote_dumps.py",
    ("4.2", "tree of a remote-API dump"): "tests/modes/test_three_modes.py",
    ("4.3", "WEAVER_DEBUG_DUMP_ENABLED, _DIR, _EVERY_N, _OPTIONS"): "tests/unit/service/host/test_dumps.py",
    (
        "4.3",
        "a tree with a file for each rank and microbatch of the service",
    ): "tests/modes/test_three_modes.py",
}
"""Rows of the document on dumps that need a training service, whose tests run one, by file."""

PARTS = (rows_dumps, rows_mock, rows_repair, rows_guide, rows_experiments)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The folder of the whole walk."""
    return Walk(tmp_path_factory.mktemp("walk"))


def test_every_row_that_works_is_walked_once() -> None:
    assert all(any(one.check.__module__ == part.__name__ for one in CHECKS) for part in PARTS)
    shown = [row for one in CHECKS for row in one.rows]
    assert len({*shown}) == len(shown), "a row is shown twice"
    promised = {row for row in ROWS if row[3] in ("works", "replaced") and row[1:3] not in ELSEWHERE}
    assert {row[1:3] for row in ROWS} >= {*ELSEWHERE}, "a row that is shown elsewhere is none"
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())
    assert {row[:3] for row in promised - {*shown}} == set()
    assert {row[3] for row in shown} == {"works", "replaced"}


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("one", CHECKS, ids=lambda one: f"{one.document}-{one.check.__name__}")
def test_a_row_is_as_it_says(one: Shown, walk: Walk) -> None:
    one.check(walk)
