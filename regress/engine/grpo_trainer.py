"""Training loop: rollouts, advantages, and one or more optimizer updates per step."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from regress.dump.taps import at, tap_trajectories
from regress.dump.trajectory import Trajectory
from regress.engine import step_taps
from regress.engine.batch_token_selection import kept_by_rejection, recorded_by_sampler, rollout_weights
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.engine_ranks import SingleProcess, World
from regress.engine.mini_batch import LossTokens, Microbatch, TokenBatch
from regress.engine.reference_policy import Reference
from regress.engine.rollout_resampling import drawn_counts
from regress.engine.rollout_worker import TRAIN, Prompt, RolloutWorker
from regress.engine.router_loss import router_loss
from regress.engine.sample_rewards import rewards_of, sample_kl
from regress.engine.step_metrics import (
    Values,
    dr_grpo_metrics,
    epoch_metrics,
    example,
    is_dr_grpo,
    loss_components,
    rollout_metrics,
    token_statistics,
    update_metrics,
)
from regress.engine.training_step import StepOutcome, train_step, weigh
from regress.engine.user_components import LossFunction
from regress.errors import ReplayError
from regress.grpo.advantage_computation import token_advantages
from regress.grpo.coefficient_controllers import Coefficients
from regress.grpo.kl_divergence import kl_penalty
from regress.grpo.loss_aggregation import entropy_weights
from regress.grpo.objective import Objective
from regress.grpo.update_metrics import Metric, add_metrics
from regress.layout import BatchPlan, RankPlan


@dataclass(frozen=True)
class MiniBatch:
    """Samples of one optimizer update: their loss tokens, and the microbatches that hold them.

    ``rejected`` is True if tokens that the trajectories train on were left out because of what the sampler said.
    """

    batch: TokenBatch
    microbatches: list[Microbatch]
    tokens: LossTokens
    rejected: bool = False


AfterUpdate = Callable[[StepOutcome, int, float], None]
"""Function ``after_update(outcome, update, learning_rate)``; ``update`` counts over the whole run, from 0."""


@dataclass(frozen=True)
class RecordedTokens:
    """Quantities of a rollout that were computed before its first update, ``[K]`` each over its loss tokens."""

    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    correction: Tensor | None


@dataclass
class UnfinishedStep:
    """Rollout of a step with the quantities of its loss, and outcomes and learning rates of the updates made so far."""

    trajectories: list[Trajectory]
    minis: list[MiniBatch]
    outcomes: list[StepOutcome] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)

    @property
    def last_update(self) -> int | None:
        """Number of the last update made; ``None`` where it is the only one of the step."""
        return len(self.outcomes) - 1 if len(self.outcomes) > 1 else None


def nothing(outcome: StepOutcome, update: int, learning_rate: float) -> None:
    pass


@dataclass
class Trainer:
    """Parts of a training step; :func:`regress.engine.training_run.build` builds them from a configuration.

    Attributes:
        trajectory_meta: metadata of the rollout of a step.
        updates: optimizer updates made so far.
        unfinished: the step that is being trained on; ``None`` between two steps.
        shares: data-parallel ranks whose shares of a batch this one process computes, one after the other; ``None``:
            its own.
    """

    config: Config
    policy: LocalPolicy
    reference: Reference | None
    optimizer: Optimizer
    scheduler: LRScheduler
    worker: RolloutWorker
    prompts: Callable[[int], Sequence[Prompt]]
    trajectory_meta: Callable[[int], Mapping[str, Any]]
    world: World = field(default_factory=SingleProcess)
    token_loss: LossFunction | None = None
    updates: int = 0
    unfinished: UnfinishedStep | None = None

    def __post_init__(self) -> None:
        self.shares: RankPlan | None = None
        self.coefficients = Coefficients.of(self.config.algorithm)
        self.router = router_loss(self.policy, self.config.model)

    def step(
        self, step: int, *, start: UnfinishedStep | None = None, after_update: AfterUpdate = nothing
    ) -> Values:
        """Roll out, then update the policy ``epochs * mini_batches`` times; returns the metrics of the step.

        Args:
            step: number of the rollout step, from 0.
            start: this step as an earlier process left it, continued after the updates that it has made; ``None``:
                a new rollout.
            after_update: called after every optimizer update and step of the schedule; `unfinished` then tells what
                the step has done.
        """
        work = self._rolled_out(step) if start is None else start
        self.unfinished = work
        with at(step=step):
            if self.world.main:
                tap_trajectories(work.trajectories, meta=self.trajectory_meta(step))
                minis = [(mini.batch, mini.tokens) for mini in work.minis]
                step_taps.before_updates(work.trajectories, minis)
            self._update(work, after_update)
            values = {**self._step_metrics(work, step), **self._update_metrics(work)}
            with at(update=work.last_update, rank=self.world.rank):
                step_taps.step_metrics(values)
        if self.reference is not None:
            self.reference.after_step(step)
        if self.config.algorithm.kl_controller == "adaptive":
            self.coefficients.after_rollout(
                *sample_kl([mini.tokens for mini in work.minis], self.config.algorithm)
            )
        self.unfinished = None
        return values

    def _rolled_out(self, step: int) -> UnfinishedStep:
        trajectories = list(self.worker.rollout(step, self.prompts(step), TRAIN))
        # outside of at(): the forward passes of the recorded log-probs are not dumped
        return UnfinishedStep(trajectories, self.mini_batches(trajectories))

    def _update(self, work: UnfinishedStep, after_update: AfterUpdate) -> None:
        """Make the updates of a step that it has not made yet."""
        total = self.config.trainer.epochs * len(work.minis)
        for number in range(len(work.outcomes), total):
            epoch, index = divmod(number, len(work.minis))
            learning_rate = float(self.scheduler.get_last_lr()[0])
            update = number if total > 1 else None
            with at(update=update, epoch=epoch, mini_batch=index, rank=self.world.rank):
                outcome = self._train_step(work.minis[index])
                step_taps.metrics({**update_metrics(outcome, learning_rate), **loss_components(outcome)})
            self._schedule(outcome)
            self._adapt(outcome)
            work.outcomes.append(outcome)
            work.learning_rates.append(learning_rate)
            self.updates += 1
            after_update(outcome, self.updates - 1, learning_rate)

    def _schedule(self, outcome: StepOutcome) -> None:
        """Go on with the learning rate, which counts the updates that are left out, too."""
        with warnings.catch_warnings():
            if outcome.skipped:  # torch believes that the optimizer was forgotten if it is the first one
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def _adapt(self, outcome: StepOutcome) -> None:
        """Let the coefficient of the entropy bonus follow the entropy of the update."""
        name = "entropy/kept" if self.config.algorithm.top_entropy_quantile < 1.0 else "entropy"
        entropy = outcome.metrics.get(name)
        if self.config.algorithm.entropy_controller == "adaptive" and entropy is not None and entropy.count:
            self.coefficients.after_update(entropy.value)

    @property
    def objective(self) -> Objective:
        """Objective of the next update: that of the configuration, with the coefficients that controllers have set."""
        objective: Objective = self.config.algorithm
        if "adaptive" not in (objective.kl_controller, objective.entropy_controller):
            return objective
        kept = self.coefficients
        return replace(objective, kl_coef=kept.kl, entropy_coef=kept.entropy_in_use)

    def _train_step(self, mini: MiniBatch) -> StepOutcome:
        return train_step(
            self.policy,
            self.optimizer,
            mini.tokens,
            mini.microbatches,
            self.objective,
            world=self.world,
            max_grad_norm=self.config.optimizer.max_grad_norm,
            target_params=self.config.debug.target_param_pattern,
            loss_function=self.token_loss,
            skip_nonfinite=self.config.trainer.on_nonfinite == "skip",
            router=self.router,
        )

    def mini_batches(self, trajectories: Sequence[Trajectory]) -> list[MiniBatch]:
        """Cut the rollout into mini-batches, with every quantity of the loss that precedes the updates."""
        minis = [self._recorded(mini) for mini in self._cut(trajectories)]
        weighted = rollout_weights([mini.tokens for mini in minis], self.config.algorithm)
        minis = [self._accepted(replace(mini, tokens=own)) for mini, own in zip(minis, weighted, strict=True)]
        advantages = self._advantages(trajectories, minis).split([len(mini.tokens) for mini in minis])
        return [
            self._drawn(replace(mini, tokens=replace(mini.tokens, advantages=own)))
            for mini, own in zip(minis, advantages, strict=True)
        ]

    def _drawn(self, mini: MiniBatch) -> MiniBatch:
        """Lay a mini-batch out again without the samples that resampling does not draw."""
        counts = drawn_counts(mini.batch.trajectories, self.config)
        return mini if counts is None else self._kept(mini, counts[mini.tokens.sequence.cpu()] > 0)

    def restored_mini_batches(
        self,
        trajectories: Sequence[Trajectory],
        known: RecordedTokens,
        masks: Sequence[Sequence[int]] | None = None,
    ) -> list[MiniBatch]:
        """Cut a rollout into mini-batches as `mini_batches` does, with quantities that were computed earlier.

        Args:
            masks: tokens that rejection kept, one list per sample; by default nothing was rejected.

        Raises:
            ReplayError: if they are those of another number of loss tokens.
        """
        minis = self._cut(trajectories, masks)
        sizes = [len(mini.tokens) for mini in minis]
        if len(known.advantages) != sum(sizes):
            raise ReplayError(f"""the rollout has {sum(sizes)} loss tokens and advantages of {len(known.advantages)};
            leave algorithm.mask_truncated_completions as it was when it was sampled""")
        tokens = [mini.tokens for mini in minis]
        for name, value in vars(known).items():
            if value is not None:
                parts = value.to(self.policy.device).split(sizes)
                tokens = [replace(one, **{name: part}) for one, part in zip(tokens, parts, strict=True)]
        return [replace(mini, tokens=own) for mini, own in zip(minis, tokens, strict=True)]

    def _cut(
        self, trajectories: Sequence[Trajectory], masks: Sequence[Sequence[int]] | None = None
    ) -> list[MiniBatch]:
        """Cut the rollout into mini-batches with what follows from trajectories and their masks alone."""
        size = self.config.trainer.mini_batch_size or len(trajectories)
        kept = self.loss_masks(trajectories) if masks is None else masks
        starts = range(0, len(trajectories), size)
        parts = [self._laid_out(trajectories[at : at + size], kept[at : at + size]) for at in starts]
        return [replace(part, rejected=masks is not None) for part in parts]

    def _laid_out(self, trajectories: Sequence[Trajectory], masks: Sequence[Sequence[int]]) -> MiniBatch:
        """Lay a mini-batch out over microbatches, with the sampler's log-probs and the loss weights."""
        objective = self.config.algorithm
        batch = TokenBatch(trajectories, loss_masks=masks, device=self.policy.device)
        plan = self.shares or self.world.plan
        ranks = [self.world.rank] if self.shares is None else range(plan.mesh.world_size)
        microbatches = [micro for rank in ranks for micro in batch.microbatches(self._plan(), plan, rank)]
        sampler = batch.sampler_log_probs(self.policy.log_prob_dtype)
        tokens = batch.loss_tokens()
        partition = batch.partition(self._plan(), plan)
        weights = weigh(
            tokens,
            partition,
            objective,
            max_completion_length=self.config.data.max_completion_length,
            ranks=plan.mesh.data_size,
            completion_lengths=[len(one.tokens) - one.prompt_length for one in trajectories],
            counts=drawn_counts(trajectories, self.config),
        )
        entropy = entropy_weights(tokens.sequence, tokens.num_sequences, objective, partition=partition)
        known: dict[str, Any] = {"weights": weights, "sampler_log_probs": sampler, "entropy_weights": entropy}
        return MiniBatch(batch, microbatches, replace(tokens, **known))

    def _accepted(self, mini: MiniBatch) -> MiniBatch:
        """Lay a mini-batch out again without the tokens that rejection leaves out."""
        kept = kept_by_rejection(mini.tokens, self.config.algorithm)
        return mini if kept is None else self._kept(mini, kept)

    def _kept(self, mini: MiniBatch, kept: Tensor) -> MiniBatch:
        """Lay a mini-batch out again with some of its loss tokens."""
        flat = mini.batch.mask.copy()
        flat[flat] = kept.cpu().numpy()
        bounds = mini.batch.offsets
        masks = [
            flat[bounds[at] : bounds[at + 1]].astype(int).tolist() for at in range(len(mini.batch.lengths))
        ]
        found = self._laid_out(mini.batch.trajectories, masks)
        names = ("advantages", "old_log_probs", "ref_log_probs", "correction")
        left: dict[str, Any] = {}
        for name in names:
            value: Tensor | None = getattr(mini.tokens, name)
            left[name] = None if value is None else value[kept.to(value.device)]
        return replace(found, tokens=replace(found.tokens, **left), rejected=True)

    def _recorded(self, mini: MiniBatch) -> MiniBatch:
        """Add the log-probs of the policy before the update and of the reference."""
        objective, tokens, microbatches = self.config.algorithm, mini.tokens, mini.microbatches
        old, ref = None, None
        if objective.old_log_probs == "sampler":
            old = recorded_by_sampler(tokens.sampler_log_probs)
        elif objective.old_log_probs == "recompute":
            old = self._collected(self.policy, microbatches, len(tokens))
        if self.reference is not None:
            ref = self._collected(self.reference, microbatches, len(tokens))
        return replace(mini, tokens=replace(tokens, old_log_probs=old, ref_log_probs=ref))

    def _collected(
        self, source: LocalPolicy | Reference, microbatches: Sequence[Microbatch], count: int
    ) -> Tensor:
        """Return log-probs of the loss tokens in the mini-batch's order, ``[K]``, computed by all ranks together."""
        out = torch.zeros(count, dtype=self.policy.log_prob_dtype, device=self.policy.device)
        for micro, values in zip(microbatches, source.log_probs(microbatches), strict=True):
            out[micro.select] = values
        return self.world.sum(out)

    def _advantages(self, trajectories: Sequence[Trajectory], minis: Sequence[MiniBatch]) -> Tensor:
        """Return the advantages ``[K]`` of the whole rollout: groups and whitening see all mini-batches."""
        objective = self.objective
        groups = {key: index for index, key in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
        starts = torch.tensor([0, *(mini.tokens.num_sequences for mini in minis)]).cumsum(0)
        sequence = torch.cat(
            [mini.tokens.sequence + int(start) for mini, start in zip(minis, starts, strict=False)]
        )
        penalty = None
        if objective.kl_in_reward:
            penalty = torch.cat([_penalty(mini.tokens, objective) for mini in minis])
        values, weights = rewards_of(trajectories, self.config)
        rewards = torch.tensor(values, dtype=torch.float64, device=self.policy.device)
        group = torch.tensor([groups[t.group_id] for t in trajectories], device=self.policy.device)
        more: dict[str, Any] = {} if weights is None else {"reward_weights": weights}
        advantages = token_advantages(rewards, group, sequence, objective, penalty, **more)
        return advantages.to(self.policy.log_prob_dtype)

    def loss_masks(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Return which tokens of each trajectory enter the loss."""
        drop = self.config.algorithm.mask_truncated_completions
        return [
            [0] * len(t.tokens) if drop and t.finish_reason == "length" else t.loss_mask for t in trajectories
        ]

    def _plan(self) -> BatchPlan:
        batching = self.config.batching
        return BatchPlan(**{f.name: getattr(batching, f.name) for f in fields(BatchPlan)})

    def _step_metrics(self, work: UnfinishedStep, step: int) -> Values:
        batches = [mini.tokens for mini in work.minis]
        values: Values = {
            **rollout_metrics(work.trajectories),
            **token_statistics(batches),
            **epoch_metrics(work.outcomes),
        }
        if is_dr_grpo(self.config.algorithm):
            values |= dr_grpo_metrics(batches, self.config.algorithm)
        if self.config.task.max_turns > 1:
            values |= example(work.trajectories, step)
        return values

    def _update_metrics(self, work: UnfinishedStep) -> dict[str, float]:
        """Return means over the updates that were made, and the number of those left out."""
        outcomes = [outcome for outcome in work.outcomes if not outcome.skipped]
        count = len(outcomes) or math.nan
        none: dict[str, Metric] = {}
        mean = StepOutcome(
            loss=sum(outcome.loss for outcome in outcomes) / count,
            grad_norm=sum(outcome.grad_norm for outcome in outcomes) / count,
            metrics=functools.reduce(add_metrics, (outcome.metrics for outcome in outcomes), none),
        )
        return {
            **update_metrics(mean, work.learning_rates[0]),
            "training/invalid_loss_count": float(len(work.outcomes) - len(outcomes)),
        }


def _penalty(tokens: LossTokens, objective: Objective) -> Tensor:
    assert tokens.old_log_probs is not None
    return kl_penalty(tokens.old_log_probs, tokens.ref_log_probs, objective)
