"""Jobs over processes: the same results in the same order, errors as they are, progress of all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regress.errors import ReplayError
from regress.replay.job_spread import spread


@pytest.fixture(scope="module")
def jobs() -> Iterator[Any]:
    """The module of jobs, importable as one of the package is."""
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        import spread_jobs

        yield spread_jobs
    finally:
        sys.path.remove(folder)


def test_a_rank_does_jobs_beside_this_process(jobs: Any, tmp_path: Path) -> None:
    ticks: list[int] = []
    found = spread(jobs.square, range(6), tmp_path, lambda: ticks.append(1), 2)
    assert [square for square, _, _ in found] == [0, 1, 4, 9, 16, 25]
    assert len({process for _, process, _ in found}) == 2
    assert os.getpid() in {process for _, process, _ in found}
    assert not any(launched for _, _, launched in found), "a single process to the engine that it runs"
    assert len(ticks) == 12


def test_one_process_starts_no_other(jobs: Any, tmp_path: Path) -> None:
    (tmp_path / "others").touch()
    found = spread(jobs.square, range(3), tmp_path, lambda: None)
    assert {process for _, process, _ in found} == {os.getpid()}
    assert spread(jobs.square, [], tmp_path / "none", lambda: None, 4) == []


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_error_in_the_order_of_jobs_is_raised(jobs: Any, tmp_path: Path, processes: int) -> None:
    with pytest.raises(ReplayError) as error:
        spread(jobs.refused, range(4), tmp_path, lambda: None, processes)
    assert str(error.value) == "job 1 is refused; ask for another"


def test_what_breaks_this_process_ends_the_ranks(jobs: Any, tmp_path: Path) -> None:
    """An interrupt, say: nobody waits for jobs that are not wanted any more."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spread(jobs.square, range(6), tmp_path, interrupted, 2)
