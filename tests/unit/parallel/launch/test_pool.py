"""The rank pool: fresh ranks for each job, one error for whatever ends it, and nothing left behind."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from regress.errors import RankError, ReplayError
from regress.parallel.launch import rank_pool as module
from regress.parallel.launch.rank_pool import RankPool
from tests.unit.parallel.launch.awaited import gone


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(
        ("torch", "torch.distributed", "regress.parallel.launch.forked_rank", "regress.dump")
    ) as pool:
        yield pool


def left_of(pool: RankPool) -> list[int]:
    """Processes that the forkserver has not seen the end of."""
    assert pool.process is not None
    found = Path(f"/proc/{pool.process}/task/{pool.process}/children").read_text().split()
    return [int(process) for process in found]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_communicate(pool: RankPool, targets: Any, world_size: int) -> None:
    expected = sum(range(1, world_size + 1))
    assert pool.run(targets.total, {"value": 2.0}, world_size) == [2.0 * expected] * world_size
    assert left_of(pool) == []


def test_a_rank_finds_the_surroundings_of_the_caller_as_they_are_now(
    pool: RankPool, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOMETHING", "new")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    names = ["SOMETHING", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    first, second = pool.run(targets.surroundings, {"names": names}, 2)
    assert first["directory"] == second["directory"] == str(tmp_path)
    assert first["threads"] == 1
    assert (first["group"], second["group"]) == ((0, 2), (1, 2))
    assert list(second["environment"].values()) == ["new", "1", "1", "2", "1", "2"]
    assert not first["main"], "the main module of the caller was run again"


def test_each_job_has_fresh_processes(pool: RankPool, targets: Any) -> None:
    jobs = [pool.run(targets.surroundings, {"names": []}, 2) for _ in range(2)]
    assert len({state["process"] for job in jobs for state in job}) == 4


def test_a_framework_may_make_the_process_group_itself(pool: RankPool, targets: Any) -> None:
    assert pool.run(targets.rendezvous_by_environment, {}, 2) == [3.0, 3.0]


def test_rank_0_stays_until_all_are_done(pool: RankPool, targets: Any) -> None:
    assert pool.run(targets.late, {"seconds": 1.0}, 3) == [1, 2, 2]


def test_a_rank_that_raises_is_named_with_its_traceback_and_what_it_printed(
    pool: RankPool, targets: Any
) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(targets.raises, {"culprit": 1}, 3, what="dense/tp2")
    assert str(caught.value) == (
        "dense/tp2: rank 1 of 3 raised ValueError: wrong sign, before it recorded anything"
    )
    assert caught.value.rank == 1
    trace, printed = caught.value.__notes__
    assert trace.startswith("rank 1: Traceback (most recent call last):\n")
    assert 'rank_targets.py", line ' in trace
    assert "run_rank" not in trace
    assert printed == "rank 1 printed:\nrank 1 says hello"


def test_it_is_told_what_the_rank_had_recorded(pool: RankPool, targets: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(targets.raises, {"culprit": 0, "folder": str(tmp_path / "dump")}, 1)
    assert str(caught.value) == (
        "rank 0 of 1 raised ValueError: wrong sign, after it recorded loss at step3/rank0/micro1"
    )


def test_the_words_of_a_rank_are_heard_although_its_end_is_heard_first(
    pool: RankPool, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last words may lie in the pipe behind others when the forkserver tells that it has ended."""

    def late(sources: list[Any], timeout: float) -> list[Any]:
        found = wait(sources, timeout)
        if found and found != [sources[0]]:
            time.sleep(0.5)  # until all is said, and the rank has ended
        return wait(sources, 0)

    monkeypatch.setattr(module, "wait", late)
    with pytest.raises(RankError, match="rank 0 of 1 raised ValueError: wrong sign, after it recorded loss"):
        pool.run(targets.raises, {"culprit": 0, "folder": str(tmp_path / "dump")}, 1)


def test_what_ranks_print_is_kept_where_it_is_asked_for(pool: RankPool, targets: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError):
        pool.run(targets.raises, {"culprit": 1}, 2, folder=tmp_path)
    assert (tmp_path / "rank0.log").read_text() == "rank 0 says hello\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.log", "rank1.log"]


def test_a_rank_that_is_killed_is_named_and_not_those_that_miss_it(pool: RankPool, targets: Any) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(targets.killed, {"culprit": 2}, 4)
    assert str(caught.value) == (
        "rank 2 of 4 was ended by SIGKILL, before it recorded anything (the kernel does so when memory runs out: see "
        "dmesg, and lower the batch or the number of ranks)"
    )


def test_a_fault_in_native_code_shows_where(pool: RankPool, targets: Any) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 was ended by SIGSEGV") as caught:
        pool.run(targets.killed, {"culprit": 0, "number": signal.SIGSEGV}, 2)
    assert 'rank_targets.py", line ' in caught.value.__notes__[0]


def test_a_rank_that_leaves_without_a_word_is_named(pool: RankPool, targets: Any) -> None:
    with pytest.raises(RankError, match=r"^rank 0 of 2 ended itself with exit code 3, before it recorded"):
        pool.run(targets.leaves, {"culprit": 0}, 2)


def test_a_rank_that_misses_a_collective_is_named_with_its_stack(pool: RankPool, targets: Any) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(targets.sleeps, {"culprit": 1}, 3, patience=1.0)
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 hangs before it recorded anything: rank")
    assert "waited for it in vain (RuntimeError: Timed out waiting 1000ms for recv" in message
    assert re.search(r"; ranks? .* waits? in all_reduce \(total, rank_targets\.py:\d+\)", message)
    assert re.search(r"; rank 1 is in sleeps, rank_targets\.py:\d+$", message)
    (stack,) = (note for note in caught.value.__notes__ if note.startswith("rank 1 printed:"))
    assert "in sleeps" in stack


def test_a_job_that_takes_too_long_is_ended_and_the_rank_that_others_wait_for_is_named(
    pool: RankPool, targets: Any
) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(targets.sleeps, {"culprit": 1}, 2, timeout=3.0)
    assert re.fullmatch(
        r"rank 1 of 2 hangs before it recorded anything: after 3 s ranks 0 and 1 had not come to an end; "
        r"rank 0 waits in all_reduce \(total, rank_targets\.py:\d+\); rank 1 is in sleeps, rank_targets\.py:\d+",
        str(caught.value),
    )
    assert [note.splitlines()[0] for note in caught.value.__notes__] == ["rank 0 printed:", "rank 1 printed:"]


def test_a_stopped_rank_is_named_though_the_others_go_on(
    pool: RankPool, targets: Any, tmp_path: Path
) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(targets.stops, {"culprit": 1}, 3, standstill=1.0)
    assert re.fullmatch(
        r"rank 1 of 3 \(process \d+\) is stopped by a signal such as SIGSTOP, before it recorded anything: see who "
        "sent it, and run it again",
        str(caught.value),
    )
    assert left_of(pool) == []


STOPPED = (
    r"the forkserver of the ranks \(process (\d+)\) is stopped by a signal such as SIGSTOP: see who sent it, and run "
    r"it again"
)


@pytest.mark.extended
def test_a_forkserver_that_was_stopped_before_a_job_is_named_and_another_takes_its_place(
    pool: RankPool, targets: Any
) -> None:
    assert pool.run(targets.total, {}, 1) == [1.0]
    assert pool.process is not None
    server = pool.process
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(ReplayError) as caught:
        pool.run(targets.total, {}, 2, standstill=1.0, what="dense/tp2")
    found = re.fullmatch(f"dense/tp2: {STOPPED}", str(caught.value))
    assert found is not None
    assert int(found[1]) == server
    assert gone(server)
    assert pool.run(targets.total, {}, 2) == [3.0, 3.0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("waits", [True, False], ids=["while ranks run", "when they are done"])
def test_a_forkserver_that_is_stopped_in_a_job_is_named_and_its_ranks_end(
    pool: RankPool, targets: Any, tmp_path: Path, waits: bool
) -> None:
    arguments = {"file": str(tmp_path / "pid"), "waits": waits}
    with pytest.raises(ReplayError, match=f"^{STOPPED}$"):
        pool.run(targets.stops_the_forkserver, arguments, 2, standstill=1.0)
    assert all(gone(int((tmp_path / f"pid{rank}").read_text())) for rank in range(2))
    assert pool.run(targets.total, {}, 2) == [3.0, 3.0]


def test_a_forkserver_that_is_stopped_while_it_imports_is_named(
    targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stopping.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RankPool(("stopping",)) as pool, pytest.raises(ReplayError, match=f"^{STOPPED}$"):
        pool.run(targets.total, {}, 1, standstill=1.0)


def test_a_job_none_of_whose_ranks_does_anything_is_given_up(pool: RankPool, targets: Any) -> None:
    with pytest.raises(
        RankError, match=r"rank 1 of 2 hangs .*: for 1 s ranks 0 and 1 did nothing \(parallel"
    ):
        pool.run(targets.sleeps, {"culprit": 1}, 2, standstill=1.0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["thread", "child"])
def test_a_job_of_which_anything_goes_on_is_not_given_up(pool: RankPool, targets: Any, how: str) -> None:
    """Another thread computes, or a process that a rank has started."""
    assert pool.run(targets.goes_on, {"how": how, "seconds": 2.0}, 2, standstill=0.5) == [3.0, 3.0]


def test_ranks_that_may_wait_for_something_else_are_not_given_up(pool: RankPool, targets: Any) -> None:
    assert pool.run(targets.late, {"seconds": 1.0}, 2, timeout=math.inf, standstill=0.2) == [1, 1]


def test_too_little_memory_is_an_error_of_its_rank(pool: RankPool, targets: Any) -> None:
    with pytest.raises(RankError, match=r"^rank 1 of 2 raised RuntimeError: .*allocate"):
        pool.run(targets.needs_memory, {"culprit": 1}, 2)


def test_a_full_disk_is_an_error_of_its_rank(pool: RankPool, targets: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(targets.writes, {"culprit": 1, "folder": str(tmp_path), "limit": 1024}, 2)
    assert f"rank 1 of 2 raised DumpError: {tmp_path}/1/loss/" in str(caught.value)
    assert (
        "a limit on file sizes is in force: raise it or dump fewer types, after it recorded loss at"
        in str(caught.value)
    )
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".partial")]


def test_a_result_that_cannot_be_sent_is_an_error(pool: RankPool, targets: Any) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 1 raised .*pickle"):
        pool.run(targets.returns_what_cannot_be_sent, {}, 1)


def test_whatever_ended_a_job_nothing_is_left_and_the_next_one_runs(
    pool: RankPool, targets: Any, tmp_path: Path
) -> None:
    with pytest.raises(RankError):
        pool.run(targets.raises_with_a_child, {"file": str(tmp_path / "child")}, 1)
    assert gone(int((tmp_path / "child").read_text())), "what a rank has started outlives it"
    for target, arguments in (
        (targets.killed, {"culprit": 0}),
        (targets.leaves, {"culprit": 1}),
        (targets.sleeps, {"culprit": 0}),
    ):
        with pytest.raises(RankError):
            pool.run(target, arguments, 2, patience=1.0)
        assert left_of(pool) == []
        assert pool.run(targets.total, {}, 2) == [3.0, 3.0]


def test_a_target_that_ranks_cannot_import_is_refused(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def target() -> None: ...

    monkeypatch.setattr(target, "__module__", "__main__")
    with pytest.raises(ValueError, match="is not a function of a module that ranks can import"):
        pool.run(target, {}, 1)


def test_a_module_that_cannot_be_imported_is_named(targets: Any) -> None:
    with RankPool(("no_such_module",)) as pool, pytest.raises(ReplayError) as caught:
        pool.run(targets.total, {}, 1)
    assert str(caught.value) == (
        "no ranks can be started: no_such_module cannot be imported (ModuleNotFoundError: No module named "
        "'no_such_module')"
    )
