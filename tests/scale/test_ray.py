"""Ray: the verdicts of the local engine, from tasks of a cluster, whatever becomes of its workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from deadly import Deadly
from made_dumps import Made

from regress.compare.dumps.comparison import Job, compare_dumps, work
from regress.compare.dumps.comparison_plan import plan_units
from regress.compare.dumps.engines.ray_cluster import Cluster, imported
from regress.compare.dumps.scaled_verdicts import Finding
from regress.errors import CompareError

pytestmark = pytest.mark.extended

Pair = tuple[str, str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two dumps of 64 ranks that differ in rounding everywhere, and beyond it in some tensors."""
    golden = Made(ranks=64, samples=128).write(tmp_path_factory.mktemp("golden"))
    actual = Made(ranks=64, samples=128, noise=2e-6).write(tmp_path_factory.mktemp("actual"))
    return str(golden), str(actual)


@pytest.fixture(scope="module", autouse=True)
def two_processors() -> Iterator[None]:
    """A local cluster for all of these tests, which the engine uses as it would one of a session of its own."""
    ray = imported()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_ray_finds_the_same_to_the_last_bit(pair: Pair, expected: list[object]) -> None:
    told: list[str] = []
    found = compare_dumps(*pair, engine=Cluster(notify=told.append))
    assert [verdict.to_json() for verdict in found.verdicts] == expected
    assert told == []
    assert imported().is_initialized(), "a connection that the engine did not make is not its own to close"


def test_killed_workers_change_nothing(pair: Pair, expected: list[object]) -> None:
    pending, done = [5, 60], 0

    def advance(count: int) -> None:
        nonlocal done
        done += count > 0
        if pending and done >= pending[0]:
            workers = tasks_of(os.getpid())
            for process in workers:
                os.kill(process, signal.SIGKILL)
            del pending[: bool(workers)]

    found = compare_dumps(*pair, engine=Cluster(), advance=advance)
    assert not pending, "nothing was at work that could be killed"
    assert [verdict.to_json() for verdict in found.verdicts] == expected


def test_a_job_that_kills_every_worker_is_done_here(pair: Pair) -> None:
    told: list[str] = []
    jobs: list[Job] = [(unit, None) for unit in plan_units(*pair).units[:4]]
    poisoned: Job = (replace(jobs[1][0], only=Deadly()), None)  # type: ignore[arg-type]
    found = list(Cluster(notify=told.append)([jobs[0], poisoned, *jobs[2:]]))
    assert found == [work(job) for job in jobs]
    assert len(told) == 1
    assert "a task on Ray failed 4 times (WorkerCrashedError" in told[0]
    assert told[0].endswith("this process does its comparison")


def tasks_of(root: int) -> list[int]:
    """Workers of the cluster that this process has started, which do a task."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            command = folder.joinpath("cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if command.startswith(b"ray::work_there"):
            found.append(int(folder.name))

    def is_ours(process: int) -> bool:
        while process not in (0, 1, root):
            process = parents.get(process, 0)
        return process == root

    return [process for process in found if is_ours(process)]


def test_paths_are_those_of_this_process(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(pair[0]).parent
    monkeypatch.chdir(base)
    relative = [str(Path(path).relative_to(base)) for path in pair]
    assert compare_dumps(*relative, engine=Cluster()).exit_code == 1


def test_what_a_node_cannot_read_is_said(pair: Pair, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    dump = Path(Made(ranks=2, samples=4).write(tmp_path / "dump"))

    def after_it_was_moved(jobs: Sequence[Job]) -> Iterator[list[Finding]]:
        dump.rename(moved)
        return Cluster()(jobs)

    with pytest.raises(CompareError, match=r"Ray node \S+ cannot read .*dump .*all nodes see them"):
        compare_dumps(str(dump), pair[1], engine=after_it_was_moved)


class Unknown:
    """A selection of tensors that a node knows nothing of."""


def test_a_node_that_lacks_the_code_is_told_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    module.Unknown = Unknown  # type: ignore[attr-defined]
    monkeypatch.setattr(Unknown, "__module__", "only_here")
    job: Job = (replace(plan_units(*pair).units[0], only=Unknown()), None)  # type: ignore[arg-type]
    with pytest.raises(
        CompareError, match=r"a Ray node cannot take up this work .*only_here.* install the same"
    ):
        list(Cluster()([job]))
