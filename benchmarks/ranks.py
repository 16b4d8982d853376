"""A replay on the ranks of a pool, against the same replay on ranks started by ``torchrun``.

Timed: from the configuration of a replay to its complete dump, three steps of a golden case with everything recorded,
without judging it. The forkserver of the pool starts once, outside of what is timed; its start is told beside. The
other side is what ``regress replay --launcher torchrun`` does: one agent for each replay, whose ranks import everything
anew and, at the end, save the model. Before anything is timed both sides have replayed every layout, and their dumps
are compared bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Report
from benchmarks.timing import Side, alternate, timed
from regress.dump.bitwise_difference import compare_bitwise
from regress.golden.golden_directory import GoldenStore
from regress.parallel.launch.cluster_launchers import Launch
from regress.replay.case_run import replay
from regress.replay.command_replays import variant_table
from regress.replay.replay_pool import close_shared_pool, shared_pool
from regress.replay.variant import Precision

ROUNDS = 3
CASE = "dense"
LAYOUTS = ("dp2", "fsdp2", "tp2", "pp2", "cp2", "dp2-tp2")
"""Each way to split the work of a dense model, and a combination of two."""
GOLDEN = Path(__file__).parents[1] / "golden"

Run = Callable[[str], Path]
"""Function that replays a layout and returns the location of its dump."""


def run() -> Report:
    """Time the pool over torchrun, layout by layout and all together."""
    report = Report("ranks", f"replays of {CASE}, three steps, float64: ranks of a pool, or of torchrun")
    with TemporaryDirectory(prefix="regress-bench-") as folder:
        start = time.perf_counter()
        try:
            shared_pool().run(nothing, {}, 1)
            ready = time.perf_counter() - start
            sides = {
                "pool": _runner(Path(folder), None),
                "torchrun": _runner(Path(folder), Launch("torchrun")),
            }
            _require_same(sides)
            _measure(report, sides)
        finally:
            close_shared_pool()
    report.facts |= {"layouts": LAYOUTS, "seconds_until_the_pool_is_ready": round(ready, 2)}
    return report


def nothing() -> None:
    """Do nothing: a job that ends at once."""


def _runner(folder: Path, launch: Launch | None) -> Run:
    table, case, numbers = variant_table(), GoldenStore(GOLDEN).case(CASE), count()

    def work(layout: str) -> Path:
        target = folder / f"{'pool' if launch is None else launch.launcher}-{next(numbers)}"
        return replay(case, table[layout], Precision.FLOAT64, target, launch=launch).folder

    return work


def _require_same(sides: dict[str, Run]) -> None:
    for layout in LAYOUTS:
        first, second = (work(layout) for work in sides.values())
        found = compare_bitwise(first, second)
        if found.differences:
            raise AssertionError(f"{layout}: {found.differences[0].file}: {found.differences[0].what}")


def _measure(report: Report, sides: dict[str, Run]) -> None:
    def side(work: Run, layouts: tuple[str, ...]) -> Side:
        return timed(lambda: [work(layout) for layout in layouts], len(layouts))

    measured = alternate({name: side(work, LAYOUTS) for name, work in sides.items()}, ROUNDS)
    report.add_times(measured, "torchrun")
    for name, row in report.rows.items():
        row["replays a minute"] = round(60 / measured.wall(name), 1)
        del row["CPU ratio"]  # of this process, which only waits
    report.goals["pool over torchrun"] = (measured.ratio("pool", "torchrun"), 0.1)
