"""Forward passes from rank to rank without a backward pass, in lockstep.

torch's schedules are made for training: those that place two neighbouring stages on one rank cannot run
without a backward pass (torch 2.13), and some need a certain number of microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

Forward = Callable[[int, int, Tensor | None], Tensor | None]


def timetable(ranks: Sequence[int], microbatches: int) -> list[list[tuple[int, int]]]:
    """Return the work of each tick: pairs ``(stage, microbatch)``, at most one on each rank.

    Args:
        ranks: the rank of every stage.

    A rank takes its stages one after the other, each with all microbatches, as early as their inputs allow.
    """
    free: defaultdict[int, int] = defaultdict(int)
    ready = [0] * microbatches
    ticks: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for stage, rank in enumerate(ranks):
        for micro in range(microbatches):
            tick = max(free[rank], ready[micro])
            ticks[tick].append((stage, micro))
            free[rank] = ready[micro] = tick + 1
    return [ticks[tick] for tick in range(len(ticks))]


def relay(
    ranks: Sequence[int],
    group: dist.ProcessGroup,
    microbatches: int,
    forward: Forward,
    buffer: Callable[[int], Tensor],
) -> None:
    """Run every microbatch through all stages.

    The results of a tick are sent before the next one, all messages of a rank as one batch, so that none
    waits for another on any backend.

    Args:
        ranks: the rank of every stage.
        forward: computes ``(stage, microbatch, hidden states)``; first stages get ``None``, last ones return it.
        buffer: an empty tensor for the hidden states of a microbatch.
    """
    own, last = group.rank(), len(ranks) - 1
    waiting: dict[tuple[int, int], Tensor] = {}
    for tick in timetable(ranks, microbatches):
        messages: list[dist.P2POp] = []
        done = {
            (stage, micro): forward(stage, micro, waiting.pop((stage, micro), None))
            for stage, micro in tick
            if ranks[stage] == own
        }
        for stage, micro in tick:
            if stage == last or own not in (ranks[stage], ranks[stage + 1]):
                continue
            hidden = done.get((stage, micro))
            if ranks[stage + 1] == own:
                hidden = waiting[stage + 1, micro] = buffer(micro) if hidden is None else hidden
            assert hidden is not None
            if ranks[stage] != ranks[stage + 1]:
                other, act = (stage + 1, dist.isend) if ranks[stage] == own else (stage, dist.irecv)
                peer = dist.get_global_rank(group, ranks[other])
                messages.append(dist.P2POp(act, hidden.contiguous(), peer, group))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
