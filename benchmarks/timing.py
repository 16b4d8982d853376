"""Timing side by side: the sides take turns, and only ratios within a turn count.

Another process may take the processor away for a while. Its share of a measurement is a matter of chance, so
ratios are taken within a round, whose sides run one right after the other, and their median is reported.
Processor time (user and system, all threads of this process) is measured beside wall time: it does not
count what others take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Seconds:
    """Wall time and processor time, of all threads and of this one: an instant, or the span between two."""

    wall: float = 0.0
    cpu: float = 0.0
    thread: float = 0.0

    @classmethod
    def now(cls) -> Seconds:
        """Return the current instant, counted from an arbitrary one."""
        return cls(time.perf_counter(), time.process_time(), time.thread_time())

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu, self.thread - other.thread)

    def __truediv__(self, number: int) -> Seconds:
        return Seconds(self.wall / number, self.cpu / number, self.thread / number)


Side = Callable[[], Seconds]
"""Function that does the work once and returns the time of the part that counts."""


def timed(work: Callable[[], object], repeats: int = 1) -> Side:
    """Return the side that consists of all of ``work``, which does ``repeats`` steps: the time of one."""

    def side() -> Seconds:
        start = Seconds.now()
        work()
        return (Seconds.now() - start) / repeats

    return side


@dataclass(frozen=True)
class Measured:
    """Rounds of all sides; ``rounds[i][name]`` is the time of side ``name`` in round ``i``."""

    rounds: list[dict[str, Seconds]]

    def wall(self, name: str) -> float:
        """Return the median wall time of a side."""
        return statistics.median(times[name].wall for times in self.rounds)

    def ratio(self, name: str, base: str) -> float:
        """Return the median over the rounds of the wall time of one side over that of another."""
        return statistics.median(self.ratios(name, base))

    def ratios(self, name: str, base: str) -> list[float]:
        """Return the ratio of wall times in every round."""
        return [times[name].wall / times[base].wall for times in self.rounds]

    def excess(self, name: str, base: str) -> float:
        """Return the median over the rounds of the extra wall time of one side."""
        return statistics.median(times[name].wall - times[base].wall for times in self.rounds)

    def cpu_ratio(self, name: str, base: str) -> float:
        """Return the median over the rounds of the processor time of one side over that of another."""
        return statistics.median(times[name].cpu / times[base].cpu for times in self.rounds)

    def thread_ratio(self, name: str, base: str) -> float:
        """Return the same of the thread that trains alone: what work beside it leaves to it."""
        return statistics.median(times[name].thread / times[base].thread for times in self.rounds)


def alternate(sides: Mapping[str, Side], rounds: int) -> Measured:
    """Run every side once to warm up, then ``rounds`` times, in turn; every other round runs backwards.

    With A, B, B, A, ... a load that grows or shrinks slowly favors no side.
    """
    for side in sides.values():
        side()
    measured = []
    for index in range(rounds):
        names = list(sides)[:: 1 if index % 2 == 0 else -1]
        measured.append({name: sides[name]() for name in names})
    return Measured(measured)
