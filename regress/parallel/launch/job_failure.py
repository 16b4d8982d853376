"""Failure of a job, as the rank that caused it and the reason, in one sentence.

The other ranks fail, too, once they miss the first, so the first message does not always name the cause. The
order is: the first rank that raised by itself or died; a rank that still runs while others have waited for it
in vain; a rank that waited in vain itself.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from regress.errors import RankError
from regress.parallel.launch.collective_stacks import described, waiting
from regress.parallel.launch.job_standstill import REMEDY, STOPPED
from regress.parallel.launch.pool_messages import Done, Failed, Tapped

_TAIL = 4000
_COLLECTIVE = "torch/distributed/distributed_c10d.py"
"""File in the stack of a rank that waits for others."""
_ADVICE = {
    signal.SIGKILL: "the kernel does so when memory runs out: see dmesg, and lower the batch or the number of ranks",
    signal.SIGSEGV: "a fault in native code: the stack below shows the call",
    signal.SIGABRT: "native code gave up: what it printed stands below",
}


@dataclass
class RankState:
    """State of a rank of a running job, as the pool knows it.

    Attributes:
        last: the value that it recorded last.
        result: result of the rank, None as long as it runs.
        status: exit code, or minus a signal, once it has ended.
        ended: time of its end, on the clock of the machine, s.
        slain: True if the pool ended it.
        process: its process id, once it is known.
        stopped: True if a signal has stopped it.
    """

    rank: int
    last: Tapped | None = None
    result: Done | Failed | None = None
    status: int | None = None
    ended: float = math.inf
    slain: bool = False
    process: int | None = None
    stopped: bool = False

    @property
    def died(self) -> bool:
        """True if the rank ended by itself without a report."""
        return self.status is not None and not self.slain and not isinstance(self.result, Failed)

    @property
    def runs(self) -> bool:
        """True if its target has not come to an end."""
        return self.result is None and (self.status is None or self.slain)

    @property
    def since(self) -> str:
        """Last recorded value, as the end of a clause."""
        if self.last is None:
            return "before it recorded anything"
        return f"after it recorded {self.last.record_type} at {self.last.place}"


def rank_failure(states: Sequence[RankState], logs: Sequence[str], what: str, limit: str) -> RankError:
    """Return the error of a job that failed or was given up.

    Args:
        logs: outputs of the ranks.
        limit: clause of what they exceeded, with a place for their names.
    """
    culprit, clause = _culprit(states, logs, limit)
    head = f"rank {culprit.rank} of {len(states)}"
    error = RankError(f"{what}: {head} {clause}" if what else f"{head} {clause}", culprit.rank)
    for state in (culprit, *(other for other in states if other is not culprit)):
        failed = state.result
        if isinstance(failed, Failed) and failed.trace and (state is culprit or not failed.connection):
            error.add_note(f"rank {state.rank}: {failed.trace}")
    for state in states:
        printed = logs[state.rank].strip()
        if printed and (state is culprit or (state.runs and culprit.runs)):
            error.add_note(f"rank {state.rank} printed:\n{_shortened(printed)}")
    return error


def _culprit(states: Sequence[RankState], logs: Sequence[str], limit: str) -> tuple[RankState, str]:
    for state in states:
        if state.stopped:
            return state, f"(process {state.process}) {STOPPED}, {state.since}: {REMEDY}"
    own = [(_when(state), state.rank) for state in states if state.died or _raised(state)]
    if own:
        state = states[min(own)[1]]
        return state, _end(state)
    waited = [state for state in states if isinstance(state.result, Failed)]
    running = [state for state in states if state.runs]
    if waited and running:
        state = running[0]
        names = _ranks(waited)
        reason = f"hangs {state.since}: {names} waited for it in vain ({_error(waited[0])})"
        return state, reason + _collectives(states, logs)
    if waited:
        state = min(waited, key=_when)
        others = _ranks([other for other in waited if other is not state])
        also = f"; so did {others}" if others else ""
        return state, f"lost the others {state.since} ({_error(state)}){also}{_collectives(states, logs)}"
    state = min(running, key=lambda state: _COLLECTIVE in logs[state.rank])
    reason = f"hangs {state.since}: {limit.format(_ranks(running))}"
    return state, reason + _collectives(states, logs)


def _collectives(states: Sequence[RankState], logs: Sequence[str]) -> str:
    """Return the end of a sentence: which ranks wait in which collective, and where the others are."""
    places = {}
    for state in states:
        failed = state.result
        stack = failed.trace if isinstance(failed, Failed) and failed.connection else logs[state.rank]
        if (place := waiting(stack or "")) is not None:
            places[state.rank] = place
    waits = described(places)
    return f"; {waits}" if waits else ""


def _raised(state: RankState) -> bool:
    return isinstance(state.result, Failed) and not state.result.connection


def _when(state: RankState) -> float:
    return state.result.at if isinstance(state.result, Failed) else state.ended


def _error(state: RankState) -> str:
    assert isinstance(state.result, Failed)
    return state.result.error


def _end(state: RankState) -> str:
    if isinstance(state.result, Failed):
        return f"raised {state.result.error}, {state.since}"
    assert state.status is not None
    if state.status >= 0:
        return f"ended itself with exit code {state.status}, {state.since}"
    number = signal.Signals(-state.status)
    advice = _ADVICE.get(number)
    return f"was ended by {number.name}, {state.since}{f' ({advice})' if advice else ''}"


def _ranks(states: Sequence[RankState]) -> str:
    numbers = [str(state.rank) for state in states]
    if len(numbers) < 2:
        return "".join(f"rank {number}" for number in numbers)
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _shortened(text: str) -> str:
    return text if len(text) <= _TAIL else f"...{text[-_TAIL:]}"
