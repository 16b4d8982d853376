"""Engines: the same verdicts whoever computes them, and none lost with a worker that dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from deadly import Deadly
from made_dumps import Made

from regress.cli import main
from regress.compare.dumps.comparison import Job, compare_dumps
from regress.compare.dumps.comparison_plan import plan_units
from regress.compare.dumps.engines import ENGINES, engine_named, process_pool, ray_cluster
from regress.compare.dumps.engines.process_pool import AHEAD, Processes
from regress.compare.dumps.engines.ray_cluster import Cluster, work_there
from regress.compare.dumps.scaled_verdicts import Finding
from regress.errors import CompareError, DumpError

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two dumps that differ: in rounding everywhere, and beyond it in some tensors; 8 ranks and 5."""
    golden = Made(ranks=8, samples=16).write(tmp_path_factory.mktemp("golden"))
    actual = Made(ranks=5, samples=16, noise=2e-6).write(tmp_path_factory.mktemp("actual"))
    return str(golden), str(actual)


@pytest.fixture
def told() -> list[str]:
    return []


def spread(told: list[str], workers: int = 2) -> Processes:
    return Processes(workers, told.append, alone=0.0)


def killing(when: Callable[[int], bool]) -> Callable[[int], None]:
    """An observer of progress that kills a worker after some results."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count > 0
        if count > 0 and when(done):
            for child in multiprocessing.active_children()[:1]:
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                child.join()

    return advance


def test_processes_find_the_same_to_the_last_bit(pair: Pair, expected: list[object], told: list[str]) -> None:
    found = compare_dumps(*pair, engine=spread(told))
    assert [verdict.to_json() for verdict in found.verdicts] == expected
    assert told == []
    assert not multiprocessing.active_children()


def test_a_killed_process_changes_nothing(pair: Pair, expected: list[object], told: list[str]) -> None:
    found = compare_dumps(*pair, engine=spread(told), advance=killing(lambda done: done == 3))
    assert [verdict.to_json() for verdict in found.verdicts] == expected
    assert "a worker process died" in told[0]
    assert "done anew" in told[0]


@pytest.mark.extended
def test_processes_that_die_all_the_time_change_nothing(
    pair: Pair, expected: list[object], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_pool, "_stay_with_owner", die)
    found = compare_dumps(*pair, engine=spread(told))
    assert [verdict.to_json() for verdict in found.verdicts] == expected
    assert told[process_pool.PATIENCE - 1] == (
        "a worker process died again: all that is left is done by this process"
    )


def die() -> None:
    """Kill the worker in place of waiting for work."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_cannot_do_one_job_leaves_it_to_this_process(
    pair: Pair, expected: list[object], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = [(unit, None) for unit in plan_units(*pair).units]
    poisoned = [(replace(unit, only=Deadly()), scales) for unit, scales in jobs[:1]]
    found = list(spread(told)([*jobs[:4], *poisoned, *jobs[4:8]]))
    assert len(found) == 9
    assert found[4] == found[0]
    assert "a worker process died again: the comparison that it was at is done by this process" in told


def test_a_small_comparison_starts_no_process(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a pool was started")

    monkeypatch.setattr(process_pool, "ProcessPoolExecutor", refuse)
    monkeypatch.setattr(process_pool, "ALONE", 3600.0)
    compare_dumps(*pair, engine=Processes(2, alone=process_pool.ALONE))


def test_only_so_many_jobs_are_in_hand(pair: Pair, told: list[str]) -> None:
    class Counted(list[Job]):
        taken = 0

        def __iter__(self) -> Iterator[Job]:
            for job in super().__iter__():
                Counted.taken += 1
                yield job

        def __getitem__(self, index: object) -> Counted:  # type: ignore[override]
            return Counted(super().__getitem__(index))  # type: ignore[index]

    jobs = Counted((unit, None) for unit in plan_units(*pair).units)
    assert len(jobs) > 2 * AHEAD + 2
    results = iter(process_pool._spread(jobs, 2, told.append))
    next(results)
    assert Counted.taken == 2 * AHEAD
    next(results)
    assert Counted.taken == 2 * AHEAD + 1
    results.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_job_raises_is_raised_here(pair: Pair, told: list[str], tmp_path: Path, workers: int) -> None:
    def broken(jobs: Sequence[Job]) -> Iterator[list[Finding]]:
        unit, scales = jobs[2]
        missing = replace(unit, actual=str(tmp_path / "nowhere"))
        return spread(told, workers)([*jobs[:2], (missing, scales), *jobs[3:]])

    with pytest.raises(DumpError, match="nowhere does not exist: give the folder of a dump"):
        compare_dumps(*pair, engine=broken)
    assert not multiprocessing.active_children()


def test_workers_end_with_the_process_that_wanted_them(pair: Pair, tmp_path: Path) -> None:
    code = f"""
import multiprocessing, os, signal, sys
from regress.compare.dumps.engines.process_pool import Processes
from regress.compare.dumps.comparison import compare_dumps

def die(count):
    if count > 0:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    compare_dumps(*{pair!r}, engine=Processes(2, alone=0.0), advance=die)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = [int(pid) for pid in done.stdout.split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives the process that it works for"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("spark", {}, "engine 'spark' does not exist: choose one of local, processes, ray"),
        ("processes", {"workers": 0}, "0 workers cannot compare anything: ask for at least one"),
        ("local", {"workers": 3}, "this process alone, but 3 workers were asked for: add --engine processes"),
        ("processes", {"address": "host:1"}, "host:1 is one of a Ray cluster: add --engine ray"),
    ],
)
def test_what_is_no_engine_is_said(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(CompareError, match=message):
        engine_named(name, **options)  # type: ignore[arg-type]


def test_every_engine_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "imported", lambda: None)
    assert [engine_named(name) for name in ENGINES if name != "local"] == [Processes(), Cluster()]


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CompareError, match=r"needs the package ray .* pip install 'ray>="):
        engine_named("ray")


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        @staticmethod
        def is_initialized() -> bool:
            return False

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(ray_cluster, "imported", Ray)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(
        CompareError, match=rf"no Ray cluster at 127.0.0.1:{port} .*ConnectionRefused.*RAY_ADDR"
    ):
        next(Cluster()([None]))  # type: ignore[list-item]


def test_a_node_that_cannot_see_a_dump_is_named(pair: Pair, tmp_path: Path) -> None:
    unit = replace(plan_units(*pair).units[0], actual=str(tmp_path / "mine"))
    with pytest.raises(
        CompareError, match=rf"node {socket.gethostname()} cannot read .*mine .* all nodes see them"
    ):
        work_there("", (unit, None))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [("--engine", "local"), ("--engine", "processes", "--workers", "2"), ()])
def test_the_command_takes_an_engine(pair: Pair, tmp_path: Path, options: tuple[str, ...]) -> None:
    file = tmp_path / "report.json"
    done = CliRunner().invoke(main, ["compare", *pair, *options, "--json", str(file)])
    assert (done.exit_code, done.stderr) == (1, "")
    assert json.loads(file.read_text())["failed"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "local", "--workers", "3"), "error: the engine local is this process alone"),
        (("--workers", "0"), "error: 0 workers cannot compare anything"),
        (
            ("--ray-address", "head:6379"),
            "error: the address head:6379 is one of a Ray cluster: add --engine ray",
        ),
        (("--engine", "spark"), "'spark' is not one of 'local', 'processes', 'ray'"),
    ],
)
def test_the_command_refuses_options_that_do_not_fit(
    pair: Pair, options: tuple[str, ...], message: str
) -> None:
    done = CliRunner().invoke(main, ["compare", *pair, *options])
    assert done.exit_code == 2
    assert message in done.stderr
