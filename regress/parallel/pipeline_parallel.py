"""Pipeline parallelism: forward and backward passes of microbatches over stages on several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context, copy_context
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from regress.dump.taps import at
from regress.engine import step_taps
from regress.engine.local_tensor import local
from regress.engine.mini_batch import Microbatch
from regress.engine.numeric_types import arithmetic
from regress.engine.policy_interface import Loss, Result
from regress.errors import ConfigError, RegressError
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.parallel.pipeline_schedules import ranks_of_stages, require_microbatches, runner
from regress.parallel.pipeline_stages import Stages

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
    """Run every microbatch forward through all stages, in lockstep.

    torch's schedules are made for training: those that place two neighbouring stages on one rank cannot run
    without a backward pass (torch 2.13), and some need a certain number of microbatches.

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


T = TypeVar("T")
Run = Callable[[PreTrainedModel, Microbatch, Tensor | None], Tensor]
Project = Callable[[PreTrainedModel, Microbatch, Tensor | None], TokenLogProbs]
Visit = Callable[[Microbatch], None]


class Pipeline:
    """Stages of this rank and their neighbours.

    Args:
        stages: stages on this rank, wrapped or sharded.
        group: the ranks of the pipeline, in order.
        schedule: a key of :data:`SCHEDULES`.
        run: runs the model of a stage on a microbatch, from hidden states in place of token ids unless they are
            ``None``, and returns what it returns as logits: the hidden states ``[B, T, H]`` for the next stage.
        hidden_dtype: dtype of these hidden states; by default that of the model.

    Raises:
        ConfigError: if the schedule cannot have this number of stages on a rank, or tied weights were
            separated.
    """

    def __init__(
        self,
        stages: Stages,
        group: dist.ProcessGroup,
        *,
        schedule: str,
        run: Run,
        hidden_dtype: torch.dtype | None = None,
    ) -> None:
        self.stages = stages
        self.group = group
        self.schedule = schedule
        self._run = run
        self._ranks = ranks_of_stages(schedule, group.size(), len(stages.models))
        _require_one_weight(schedule, self._ranks, stages)
        self._model = dict(zip(stages.indices, stages.models, strict=True))
        self.dtype: torch.dtype = stages.models[0].dtype
        self.device: torch.device = stages.models[0].device
        self._hidden_dtype = hidden_dtype or self.dtype

    @property
    def is_last(self) -> bool:
        """True if the last stage, and so the values of the loss, lie on this rank."""
        return self.stages.indices[-1] == self.stages.count - 1

    def forward_backward(
        self,
        microbatches: Sequence[Microbatch],
        loss: Loss[Result],
        project: Project,
        visit: Visit | None = None,
    ) -> list[Result]:
        """Run forward and backward over all microbatches, which have one shape; gradients accumulate.

        Args:
            loss: as in :class:`Policy`; called on the rank of the last stage only.
            project: runs the model of the last stage, like ``run``, up to the log-probs of the loss tokens.
            visit: called on every rank once for each microbatch, before its forward pass, under its coordinates.

        Returns:
            The results of ``loss`` in the order of the microbatches; none where the last stage does not lie.

        Raises:
            ConfigError: if the schedule cannot order this number of microbatches, before anything is
                computed.
            ValueError: if the microbatches are not of one shape.
        """
        require_microbatches(self.schedule, len(microbatches), self.group.size(), self.stages.count)
        _require_one_shape([self._hidden(micro).shape for micro in microbatches])
        results: dict[int, Result] = {}
        outs: dict[int, TokenLogProbs] = {}

        def forward(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            micro, model = microbatches[index], self._model[stage]
            if visit is not None and stage == self.stages.indices[0]:
                visit(micro)
            if stage < self.stages.count - 1:
                return self._checked(self._run(model, micro, hidden), stage, micro)
            outs[index] = project(model, micro, hidden)
            return outs[index].log_probs

        def share(_: Tensor, target: Tensor) -> Tensor:
            index = int(target)

            def compute() -> Tensor:
                value, results[index] = loss(microbatches[index], outs.pop(index))
                return value

            value = places.run(index, compute)
            places.leave(index)
            return value.clone()  # torch detaches its input in place, and the results may hold this tensor

        def visited(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            out = places.run(index, lambda: forward(stage, index, hidden))
            if stage == self.stages.indices[-1] and not self.is_last:
                places.leave(index)
            return out

        stages = [self._stage(stage, microbatches[0], visited) for stage in self.stages.indices]
        steps = runner(self.schedule, stages, len(microbatches), share)
        order = torch.arange(len(microbatches))
        with _Places.opened() as places, arithmetic(self.dtype), _unwrapped():
            steps.step(index=order, target=order, return_outputs=False)
        return [results[index] for index in sorted(results)]

    def values(self, microbatches: Sequence[Microbatch], project: Project) -> list[TokenLogProbs]:
        """Return what ``project`` gives for the loss tokens of each microbatch, without a graph; zeros without entropy
        on ranks without the last stage. Nothing is recorded.
        """
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        values = [
            TokenLogProbs(torch.zeros(len(micro.select), dtype=dtype, device=self.device), None)
            for micro in microbatches
        ]

        def forward(stage: int, index: int, hidden: Tensor | None) -> Tensor | None:
            micro, model = microbatches[index], self._model[stage]
            if stage < self.stages.count - 1:
                return self._checked(self._run(model, micro, hidden), stage, micro)
            values[index] = project(model, micro, hidden)
            return None

        def buffer(index: int) -> Tensor:
            return torch.empty_like(self._hidden(microbatches[index]), device=self.device)

        with torch.no_grad(), arithmetic(self.dtype):
            relay(self._ranks, self.group, len(microbatches), forward, buffer)
        return values

    def sum_tied(self) -> None:
        """Sum the gradients of tied parameters over first and last stage; both then hold the same bits.

        Where both lie on one rank they are one parameter, whose gradient already is the sum.
        """
        first, last, own = self._ranks[0], self._ranks[-1], self.group.rank()
        if first == last or own not in (first, last):
            return
        for name, parameter in self.stages.named_parameters():
            if name in self.stages.tied:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                part = local(parameter.grad)
                part.add_(self._other(part, last if own == first else first))

    def _other(self, own: Tensor, rank: int) -> Tensor:
        """Exchange tensors with another rank: send this rank's, return the other's."""
        other = torch.empty_like(own, memory_format=torch.contiguous_format)
        peer = dist.get_global_rank(self.group, rank)
        operations = [
            dist.P2POp(dist.isend, own.contiguous(), peer, self.group),
            dist.P2POp(dist.irecv, other, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return other

    def _stage(
        self, stage: int, example: Microbatch, forward: Callable[[int, int, Tensor | None], Tensor]
    ) -> _Stage:
        hidden = self._hidden(example).requires_grad_()
        return _Stage(
            self._model[stage],
            stage,
            self.stages.count,
            self.device,
            input_args=() if stage == 0 else hidden,
            output_args=hidden,  # known in advance, so that torch need not run stages to find out
            group=self.group,
            forward=forward,
        )

    def _hidden(self, micro: Microbatch) -> Tensor:
        """Return the hidden states that stages exchange, as a tensor without values."""
        shape = (*micro.input_ids.shape, self.stages.models[0].config.hidden_size)
        return torch.empty(shape, dtype=self._hidden_dtype, device="meta")

    def _checked(self, out: Tensor, stage: int, micro: Microbatch) -> Tensor:
        expected = self._hidden(micro)
        if (out.shape, out.dtype) != (expected.shape, expected.dtype):
            raise ValueError(
                f"stage {stage} gives hidden states {tuple(out.shape)} of {out.dtype}, and the next one waits for "
                f"{tuple(expected.shape)} of {expected.dtype}: give Pipeline its hidden_dtype"
            )
        return out


class _Stage(PipelineStage):
    """Stage that takes the microbatch by its number, instead of tensors cut out of a batch."""

    def __init__(
        self, *args: Any, forward: Callable[[int, int, Tensor | None], Tensor], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._compute = forward

    def forward_maybe_with_nosync(self, *args: Tensor, index: Tensor) -> Tensor:
        return self._compute(self.stage_index, int(index), *(args or (None,)))


class _Places:
    """Coordinates of several microbatches in progress: each is entered once and left once.

    Stages of one rank, and the loss, add to the same records of a microbatch at different times, and records are
    written when their coordinates are left.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[Context, ExitStack]] = {}

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[_Places]:
        """Leave all coordinates at the end that are still entered, as after an error."""
        places = cls()
        with ExitStack() as ends:
            ends.push(places._end)
            yield places

    def run(self, micro: int, work: Callable[[], T]) -> T:
        """Run work at the coordinates of a microbatch."""
        if micro not in self._open:
            context, stack = copy_context(), ExitStack()
            context.run(stack.enter_context, at(micro=step_taps.number(micro)))
            self._open[micro] = context, stack
        return self._open[micro][0].run(work)

    def leave(self, micro: int) -> None:
        """Leave the coordinates of a microbatch: all work on it is done."""
        context, stack = self._open.pop(micro)
        context.run(stack.close)

    def _end(self, *raised: Any) -> None:
        for context, stack in self._open.values():
            context.run(stack.__exit__, *raised)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise our own errors as they were: torch wraps them in text about the tensors."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, RegressError):
            raise error.__cause__ from None
        raise


def _require_one_weight(schedule: str, ranks: Sequence[int], stages: Stages) -> None:
    """Refuse tied and split weights on one rank; every rank of the pipeline reaches the same result."""
    split = any(isinstance(parameter, DTensor) for _, parameter in stages.named_parameters())
    if stages.tied and ranks[0] == ranks[-1] and split:
        raise ConfigError(f"""parallel.pp_schedule={schedule}: first and last stage lie on one rank, where fsdp and tp
        make two parameters of the tied {stages.tied[0]}; choose another schedule or set
        model.tie_word_embeddings=false""")


def _require_one_shape(shapes: Sequence[torch.Size]) -> None:
    for index, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"microbatch {index} has hidden states {tuple(shape)} and microbatch 0 {tuple(shapes[0])}: stages "
                "exchange tensors of one shape, so pad all microbatches to it"
            )
