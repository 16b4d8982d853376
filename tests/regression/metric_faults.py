"""Bugs of what a step reports, where all that it computes is right; a module of its own, because ranks import it.

Each function replaces a function of the engine through ``patch``, which undoes it in the process of a test and leaves
it on a rank, which lives for one replay.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from regress.dump.trajectory import Trajectory
from regress.engine import metrics, passes, step, trainer
from regress.engine.batch import LossTokens
from regress.engine.config import Config, load_config
from regress.engine.passes import Part
from regress.engine.step import StepOutcome
from regress.engine.world import World
from regress.faults.patch import Patch
from regress.grpo.losses import TokenLoss
from regress.grpo.metrics import Metric, add_metrics, token_metrics
from regress.replay.pool import shared_pool
from regress.replay.run import run_steps

Metrics = Mapping[str, Metric]


@contextmanager
def injected(fault: Any) -> Iterator[None]:
    """Break this process inside the context."""
    with ExitStack() as stack:
        fault(Patch(stack))
        yield


class Plain:
    """Sets attributes for as long as the process lives."""

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        assert hasattr(owner, name)
        setattr(owner, name, value)


class BrokenRanks:
    """Starts the ranks of a replay like the pool, each with the fault."""

    def __init__(self, fault: Any) -> None:
        self._fault = fault

    def run(self, config: Path, world_size: int, folder: Path, what: str) -> None:
        loaded = load_config(config_path=str(config), environ={}).config
        arguments = {"config": loaded, "fault": self._fault}
        shared_pool().run(run_broken, arguments, world_size, folder=folder, what=what)


def run_broken(config: Config, fault: Any) -> None:
    """Run all steps on a rank, with the fault."""
    fault(Plain())
    run_steps(config)


# of microbatches


def mean_of_means(patch: Any) -> None:
    """Average the means of microbatches, whatever their numbers of tokens."""
    right = add_metrics

    def added(first: Metrics, second: Metrics) -> dict[str, Metric]:
        if not first:
            return right(first, second)
        return {
            name: Metric(first[name].value + m.value, 2) if m.kind == "mean" else first[name] + m
            for name, m in second.items()
        }

    patch.setattr(passes, "add_metrics", added)


def last_microbatch(patch: Any) -> None:
    """Report the metrics of the last microbatch."""
    patch.setattr(passes, "add_metrics", lambda first, second: dict(second))


def loss_averaged(patch: Any) -> None:
    """Report the mean of the microbatches' shares in the loss, not their sum."""
    right = passes._Losses.part

    def part(self: Any, shares: Sequence[Any]) -> Part:
        found = right(self, shares)
        return replace(found, loss=found.loss / len(shares))

    patch.setattr(passes._Losses, "part", part)


def _changed(patch: Any, change: Any) -> None:
    right = token_metrics

    def found(loss: TokenLoss) -> dict[str, Metric]:
        known = right(loss)
        return {**known, **change(loss, known)}

    patch.setattr(passes, "token_metrics", found)


def clip_sides_swapped(patch: Any) -> None:
    """Report the share of tokens clipped from below as that from above."""

    def change(_: TokenLoss, known: Metrics) -> Metrics:
        return {"clip_ratio/low": known["clip_ratio/high"], "clip_ratio/high": known["clip_ratio/low"]}

    _changed(patch, change)


def dual_clip_with_the_low_one(patch: Any) -> None:
    """Count tokens clipped from below as dual clipped."""
    _changed(patch, lambda _, known: {"clip_ratio/dual": known["clip_ratio/low"]})


def second_estimator(patch: Any) -> None:
    """Report the estimator k2 as k3."""

    def change(loss: TokenLoss, known: Metrics) -> Metrics:
        return {"approx_kl/k3": Metric(float((loss.log_ratio_K.double() ** 2 / 2).sum()), len(loss.ratio_K))}

    _changed(patch, change)


def reversed_kl(patch: Any) -> None:
    """Report the mean of log p - log p_old."""
    _changed(
        patch, lambda _, known: {"approx_kl/k1": Metric(-known["approx_kl/k1"].total, known["kl"].count)}
    )


def entropy_of_prompts(patch: Any) -> None:
    """Divide the sum of entropies by one token more."""

    def change(_: TokenLoss, known: Metrics) -> Metrics:
        entropy = known["entropy"]
        return {"entropy": Metric(entropy.total, entropy.count + 1)}

    _changed(patch, change)


def greatest_ratio_absolute(patch: Any) -> None:
    """Report the least ratio as the greatest."""
    _changed(
        patch,
        lambda _, known: {"ratio/max": Metric(known["ratio/min"].total, known["ratio/min"].count, "max")},
    )


# of an update


def norm_after_clipping(patch: Any) -> None:
    """Report the norm of the clipped gradient."""
    right = step.train_step

    def made(*args: Any, **kwargs: Any) -> StepOutcome:
        outcome = right(*args, **kwargs)
        return replace(outcome, grad_norm=min(outcome.grad_norm, kwargs["max_grad_norm"] or math.inf))

    patch.setattr(trainer, "train_step", made)


def next_learning_rate(patch: Any) -> None:
    """Report another learning rate than that of the update."""
    right = metrics.update_metrics
    patch.setattr(trainer, "update_metrics", lambda outcome, rate: right(outcome, rate * (1 - 1e-6)))


def terms_without_coefficients(patch: Any) -> None:
    """Report the terms of the loss without their coefficients."""
    right = passes._terms
    patch.setattr(
        passes,
        "_terms",
        lambda micro, loss, weights, objective: right(
            micro, loss, weights, replace(objective, kl_coef=1.0) if objective.kl_coef else objective
        ),
    )


# of a rollout step


def population_deviation(patch: Any) -> None:
    """Divide by N in standard deviations."""
    patch.setattr(metrics, "_std", lambda values: statistics.pstdev(values))


def advantages_by_token(patch: Any) -> None:
    """Average advantages over tokens, not samples."""

    def means(tokens: LossTokens) -> list[float]:
        assert tokens.advantages is not None
        return [float(value) for value in tokens.advantages.double().tolist()]

    patch.setattr(metrics, "_sample_means", means)


def length_with_the_prompt(patch: Any) -> None:
    """Count the prompt to the completion."""
    right = metrics.rollout_metrics

    def found(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        longer = statistics.fmean(len(one.tokens) for one in trajectories)
        return right(trajectories) | {"rollouts/completion_length_mean": longer}

    patch.setattr(trainer, "rollout_metrics", found)


def first_update_only(patch: Any) -> None:
    """Report the first update of a step as the mean of all."""
    right = metrics.epoch_metrics
    patch.setattr(trainer, "epoch_metrics", lambda outcomes: right(outcomes[:1]))


# of ranks


def own_metrics(patch: Any) -> None:
    """Report on each rank the metrics of its own samples."""
    right = step._combined

    def combined(world: World, own: Part, grad_norm: Any) -> StepOutcome:
        return replace(right(world, own, grad_norm), metrics=dict(own.metrics))

    patch.setattr(step, "_combined", combined)


def first_rank_only(patch: Any) -> None:
    """Report on all ranks the metrics of the first one."""
    right = step._combined

    def combined(world: World, own: Part, grad_norm: Any) -> StepOutcome:
        return replace(right(world, own, grad_norm), metrics=dict(world.gather(own)[0].metrics))

    patch.setattr(step, "_combined", combined)


def mean_over_ranks(patch: Any) -> None:
    """Average the means of ranks."""
    right = add_metrics

    def added(first: Metrics, second: Metrics) -> dict[str, Metric]:
        both = right(first, second)
        return both | {
            name: Metric(first[name].value + second[name].value, 2)
            for name, m in both.items()
            if m.kind == "mean"
        }

    patch.setattr(step, "add_metrics", added)


def every_rank_counted(patch: Any) -> None:
    """Count the loss of each tensor-parallel rank."""
    right = step._combined

    def combined(world: World, own: Part, grad_norm: Any) -> StepOutcome:
        outcome = right(world, own, grad_norm)
        return replace(outcome, loss=math.fsum(part.loss for part in world.gather(own)))

    patch.setattr(step, "_combined", combined)
