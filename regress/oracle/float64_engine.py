"""Run of the engine in true float64, on one process, over samples that somebody else recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.engine_ranks import SingleProcess
from regress.engine.grpo_trainer import Trainer, UnfinishedStep
from regress.engine.optimizer import adamw, build_scheduler
from regress.engine.recorded_optimizer_state import put_state
from regress.engine.reference_policy import Reference
from regress.engine.rollout_worker import Prompt
from regress.engine.run_construction import recorded
from regress.engine.run_models import build_policy, build_reference
from regress.engine.run_provenance import provenance, trajectory_meta
from regress.engine.training_step import StepOutcome
from regress.replay.case_run import torch_settings


@dataclass(frozen=True)
class Program:
    """Training steps that the engine repeats.

    Attributes:
        config: the whole configuration; ``debug`` says what is dumped and where.
        rollouts: step -> samples in canonical order.
        advantage: that of every loss token; None: the engine computes it.
        state: ``PARAMETER/exp_avg`` and the like of AdamW before the first update; None: a new optimizer.
        rates: learning rate of each update; None: as the configuration says.
        updates: optimizer updates after which the run ends; None: all.
    """

    config: Config
    rollouts: Mapping[int, Sequence[Trajectory]]
    advantage: float | None = None
    state: Mapping[str, Array] | None = None
    rates: Sequence[float] | None = None
    updates: int | None = None


class _Enough(Exception):  # noqa: N818  # no error: the asked number of updates is made
    pass


@dataclass(frozen=True)
class _Served:
    """Rollout worker that serves given samples."""

    rollouts: Mapping[int, Sequence[Trajectory]]

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        return list(self.rollouts[step])


@dataclass(frozen=True)
class _Vocabulary:
    """Tokenizer as far as a model asks for one: token ids are given, whatever they mean."""

    pad_token_id: int = 0
    eos_token_id: int = 0

    def __len__(self) -> int:
        return 1


NO_TOKENIZER = _Vocabulary()
"""Stands for the tokenizer of a model whose samples are token ids."""


def run_program(program: Program) -> Path:
    """Make the updates of a program; return the folder of the dump.

    Raises:
        RegressError: if the model cannot be loaded or computed, or the configuration does not fit it.
    """
    config = program.config
    with torch_settings(config.threads), ExitStack() as resources:
        trainer = _trainer(program, resources)
        end = _ending(trainer, program.updates)
        try:
            for step in sorted(program.rollouts):
                if trainer.updates == program.updates:
                    break
                trainer.step(step, start=_start(trainer, program, step), after_update=end)
        except _Enough:
            pass
    return Path(config.debug.dump_dir)


def _ending(trainer: Trainer, updates: int | None) -> Callable[[StepOutcome, int, float], None]:
    """Return a function that ends a run within a step; the metrics of a step belong to a run that ends with it."""

    def after(outcome: StepOutcome, update: int, learning_rate: float) -> None:
        work = trainer.unfinished
        assert work is not None
        if update + 1 == updates and len(work.outcomes) < trainer.config.trainer.epochs * len(work.minis):
            raise _Enough

    return after


def _trainer(program: Program, resources: ExitStack) -> Trainer:
    config, world = program.config, SingleProcess()
    policy = build_policy(config, NO_TOKENIZER, world)
    frozen = build_reference(config, NO_TOKENIZER, policy)
    optimizer = _optimizer(program, policy)
    origin = provenance(config, None)
    recorded(config, policy, origin, world, resources)
    reference = None
    if config.algorithm.needs_reference:
        reference = Reference(policy, config.reference, frozen, world)
    meta = trajectory_meta(origin)
    return Trainer(
        config=config,
        world=world,
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        scheduler=_scheduler(optimizer, program),
        worker=_Served(program.rollouts),
        prompts=lambda step: [],
        trajectory_meta=lambda step: meta,
    )


def _optimizer(program: Program, policy: LocalPolicy) -> AdamW:
    chosen = program.config.optimizer
    optimizer = adamw(
        policy.named_parameters(),
        chosen.learning_rate,
        betas=(chosen.betas[0], chosen.betas[1]),
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        implementation=chosen.implementation,
    )
    if program.state is not None:
        put_state(optimizer, policy, program.state, "the recorded state of the optimizer")
    return optimizer


def _scheduler(optimizer: AdamW, program: Program) -> LRScheduler:
    """Return the schedule of the given learning rates, or that of the configuration."""
    config, rates = program.config, program.rates
    if rates is None:
        updates = len(program.rollouts) * config.updates_per_rollout
        return build_scheduler(optimizer, config.optimizer, updates=updates)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    return LambdaLR(optimizer, lambda update: rates[min(update, len(rates) - 1)])


def _start(trainer: Trainer, program: Program, step: int) -> UnfinishedStep | None:
    """Return a step with the advantage that is given; None if everything is computed."""
    if program.advantage is None:
        return None
    samples = list(program.rollouts[step])
    minis = trainer.mini_batches(samples)
    given = [torch.full((len(mini.tokens),), program.advantage, dtype=torch.float64) for mini in minis]
    return UnfinishedStep(
        samples,
        [
            replace(mini, tokens=replace(mini.tokens, advantages=own))
            for mini, own in zip(minis, given, strict=True)
        ],
    )
