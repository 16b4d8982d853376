"""Pipeline schedules: their names, their placement of stages, and their requirements on a mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from regress.errors import ConfigError
from regress.parallel.split_requirements import microbatches_refusal

Runner = PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True)
class Schedule:
    """Schedule of torch.

    Attributes:
        kind: its class.
        least: fewest stages on a rank.
        most: most stages on a rank.
        back: ranks take their second stage in reverse order, so that first and last stage lie on one rank.
    """

    kind: Callable[..., Runner]
    least: int
    most: int | None
    back: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(ScheduleGPipe, 1, 1),
    "1f1b": Schedule(Schedule1F1B, 1, 1),
    "interleaved_1f1b": Schedule(ScheduleInterleaved1F1B, 2, None),
    "looped_bfs": Schedule(ScheduleLoopedBFS, 2, None),
    "interleaved_zero_bubble": Schedule(ScheduleInterleavedZeroBubble, 2, None),
    "zbv_zero_bubble": Schedule(ScheduleZBVZeroBubble, 2, 2, back=True),
}


def ranks_of_stages(name: str, ranks: int, per_rank: int) -> list[int]:
    """Return the rank of every stage.

    Raises:
        ConfigError: if the schedule cannot have this number of stages on a rank.
    """
    schedule = SCHEDULES[name]
    if per_rank < schedule.least or (schedule.most is not None and per_rank > schedule.most):
        bound = "exactly" if schedule.least == schedule.most else "at least"
        raise ConfigError(f"""parallel.pp_stages_per_rank={per_rank}: the schedule {name} has {bound} {schedule.least}
        on each rank; set parallel.pp_stages_per_rank={schedule.least} or choose another parallel.pp_schedule""")
    turns = [list(range(ranks)) for _ in range(per_rank)]
    if schedule.back:
        turns[1].reverse()
    return [rank for turn in turns for rank in turn]


def require_microbatches(name: str, microbatches: int, ranks: int, stages: int) -> None:
    """Refuse a number of microbatches that the schedule cannot order.

    Raises:
        ConfigError: naming the schedule and the numbers it takes.
    """
    refusal = microbatches_refusal(name, microbatches, ranks, stages)
    if refusal is not None:
        raise ConfigError(refusal)


def runner(name: str, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[..., Any]) -> Runner:
    """Return torch's schedule over the stages of this rank. Gradients are summed over microbatches, not averaged."""
    schedule = SCHEDULES[name]
    given = stages[0] if schedule.most == 1 else list(stages)
    return schedule.kind(given, n_microbatches=microbatches, loss_fn=loss, scale_grads=False)
