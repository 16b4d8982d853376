"""Faults of what a step reports, where all that it computes is right."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from regress.dump.trajectory import Trajectory
from regress.engine import metrics, passes, step, trainer
from regress.engine.batch import LossTokens
from regress.engine.passes import Part
from regress.engine.step import StepOutcome
from regress.engine.world import World
from regress.grpo.losses import TokenLoss
from regress.grpo.metrics import Metric, add_metrics, token_metrics
from tests.faults.fault import fault
from tests.faults.patch import Patch

Metrics = Mapping[str, Metric]
BLIND = ("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3")


@fault(
    category="U",
    first="metrics",
    source="open-instruct PR#1161: metrics averaged over microbatches",
    rules=("reported",),
    blind=BLIND,
)
def metrics_averaged_over_microbatches(patch: Patch) -> None:
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


@fault(
    category="U",
    first="metrics",
    source="a dictionary of metrics that is overwritten",
    rules=("reported",),
    blind=BLIND,
)
def metrics_of_the_last_microbatch(patch: Patch) -> None:
    """Report the metrics of the last microbatch."""
    patch.setattr(passes, "add_metrics", lambda first, second: dict(second))


@fault(
    names=r"training_step/loss",
    category="U",
    first="metrics",
    source="transformers PR#34191: a loss that is logged otherwise than trained on",
    rules=("reported",),
    blind=BLIND,
)
def reported_loss_averaged(patch: Patch) -> None:
    """Report the mean of the microbatches' shares in the loss, not their sum."""
    right = passes._Losses.part

    def part(self: Any, shares: Sequence[Any]) -> Part:
        found = right(self, shares)
        return replace(found, loss=found.loss / len(shares))

    patch.setattr(passes._Losses, "part", part)


def changed(patch: Patch, change: Any) -> None:
    """Change the metrics of each microbatch by ``change(loss, known)``."""
    right = token_metrics

    def found(loss: TokenLoss) -> dict[str, Metric]:
        known = right(loss)
        return {**known, **change(loss, known)}

    patch.setattr(passes, "token_metrics", found)


@fault(
    names=r"training_step/clip_ratio/(low|high)",
    category="U",
    first="metrics",
    source="TRL#3032",
    rules=("reported",),
    blind=BLIND,
)
def clip_fractions_exchanged(patch: Patch) -> None:
    """Report the share of tokens clipped from below as that from above."""

    def change(_: TokenLoss, known: Metrics) -> Metrics:
        return {"clip_ratio/low": known["clip_ratio/high"], "clip_ratio/high": known["clip_ratio/low"]}

    changed(patch, change)


@fault(
    names=r"training_step/clip_ratio/dual",
    category="U",
    first="metrics",
    source="verl: pg_clipfrac_lower",
    rules=("reported",),
    blind=BLIND,
)
def dual_clip_fraction_of_another(patch: Patch) -> None:
    """Count tokens clipped from below as dual clipped."""
    changed(patch, lambda _, known: {"clip_ratio/dual": known["clip_ratio/low"]})


@fault(
    names=r"training_step/approx_kl/k3",
    category="U",
    first="metrics",
    source="verl: approx_kl by k2",
    rules=("reported",),
    blind=BLIND,
)
def reported_kl_of_another_estimator(patch: Patch) -> None:
    """Report the estimator k2 as k3."""

    def change(loss: TokenLoss, known: Metrics) -> Metrics:
        return {"approx_kl/k3": Metric(float((loss.log_ratio_K.double() ** 2 / 2).sum()), len(loss.ratio_K))}

    changed(patch, change)


@fault(
    names=r"training_step/approx_kl/k1",
    category="U",
    first="metrics",
    source="a KL of the other direction in the log",
    rules=("reported",),
    blind=BLIND,
)
def reported_kl_reversed(patch: Patch) -> None:
    """Report the mean of log p - log p_old."""
    changed(patch, lambda _, known: {"approx_kl/k1": Metric(-known["approx_kl/k1"].total, known["kl"].count)})


@fault(
    names=r"training_step/entropy",
    category="U",
    first="metrics",
    source="entropy averaged over masked tokens",
    rules=("reported",),
    blind=BLIND,
)
def reported_entropy_over_one_token_more(patch: Patch) -> None:
    """Divide the sum of entropies by one token more."""

    def change(_: TokenLoss, known: Metrics) -> Metrics:
        entropy = known["entropy"]
        return {"entropy": Metric(entropy.total, entropy.count + 1)}

    changed(patch, change)


@fault(
    names=r"training_step/ratio/max",
    category="U",
    first="metrics",
    source="a minimum logged as maximum",
    rules=("reported",),
    blind=BLIND,
)
def least_ratio_for_the_greatest(patch: Patch) -> None:
    """Report the least ratio as the greatest."""
    changed(
        patch,
        lambda _, known: {"ratio/max": Metric(known["ratio/min"].total, known["ratio/min"].count, "max")},
    )


@fault(
    names=r"training_step/grad_norm",
    category="U",
    first="metrics",
    source="miles_diffusion PR#35",
    cases=("gpt2",),
    steps=None,
    rules=("reported",),
    blind=BLIND,
)
def norm_reported_after_clipping(patch: Patch) -> None:
    """Report the norm of the clipped gradient."""
    right = step.train_step

    def made(*args: Any, **kwargs: Any) -> StepOutcome:
        outcome = right(*args, **kwargs)
        return replace(outcome, grad_norm=min(outcome.grad_norm, kwargs["max_grad_norm"] or math.inf))

    patch.setattr(trainer, "train_step", made)


@fault(
    names=r"training_step/learning_rate",
    category="U",
    first="metrics",
    source="lightning#1772: a rate read after the schedule",
    rules=("reported",),
    blind=BLIND,
)
def learning_rate_reported_otherwise(patch: Patch) -> None:
    """Report another learning rate than that of the update."""
    right = metrics.update_metrics
    patch.setattr(trainer, "update_metrics", lambda outcome, rate: right(outcome, rate * (1 - 1e-6)))


@fault(
    names=r"training_step/dr_component_kl",
    category="U",
    first="metrics",
    source="a KL term logged without its coefficient",
    rules=("reported",),
    blind=BLIND,
)
def terms_reported_without_coefficients(patch: Patch) -> None:
    """Report the terms of the loss without their coefficients."""
    right = passes._terms
    patch.setattr(
        passes,
        "_terms",
        lambda micro, loss, weights, objective: right(
            micro, loss, weights, replace(objective, kl_coef=1.0) if objective.kl_coef else objective
        ),
    )


@fault(
    names=r"rollouts/(advantages|returns)_std",
    category="U",
    first="step_metrics",
    source="numpy.std in place of torch.std",
    rules=("reported",),
    blind=BLIND,
)
def reported_deviation_over_n(patch: Patch) -> None:
    """Divide by N in standard deviations."""
    patch.setattr(metrics, "_std", lambda values: statistics.pstdev(values))


@fault(
    names=r"rollouts/advantages_(mean|std)",
    category="U",
    first="step_metrics",
    source="verl: advantages averaged over tokens",
    rules=("reported",),
    blind=BLIND,
)
def reported_advantages_by_token(patch: Patch) -> None:
    """Average advantages over tokens, not samples."""

    def means(tokens: LossTokens) -> list[float]:
        assert tokens.advantages is not None
        return [float(value) for value in tokens.advantages.double().tolist()]

    patch.setattr(metrics, "_sample_means", means)


@fault(
    names=r"rollouts/completion_length_mean",
    category="U",
    first="step_metrics",
    source="a length that counts the prompt",
    rules=("reported",),
    blind=BLIND,
)
def reported_length_with_the_prompt(patch: Patch) -> None:
    """Count the prompt to the completion."""
    right = metrics.rollout_metrics

    def found(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        longer = statistics.fmean(len(one.tokens) for one in trajectories)
        return right(trajectories) | {"rollouts/completion_length_mean": longer}

    patch.setattr(trainer, "rollout_metrics", found)


@fault(
    category="U",
    first="step_metrics",
    source="metrics of the first of several updates",
    cases=("cispo",),
    rules=("reported",),
    blind=BLIND,
)
def first_update_for_all(patch: Patch) -> None:
    """Report the first update of a step as the mean of all."""
    right = metrics.epoch_metrics
    patch.setattr(trainer, "epoch_metrics", lambda outcomes: right(outcomes[:1]))


@fault(
    category="U",
    first="metrics",
    source="metrics that no rank reduces",
    variants=("dp2",),
    rules=("reported",),
    blind=BLIND,
)
def metrics_of_own_rank(patch: Patch) -> None:
    """Report on each rank the metrics of its own samples."""
    right = step._combined

    def combined(world: World, own: Part, grad_norm: Any) -> StepOutcome:
        return replace(right(world, own, grad_norm), metrics=dict(own.metrics))

    patch.setattr(step, "_combined", combined)


@fault(
    category="U",
    first="metrics",
    source="metrics logged on rank 0 alone",
    variants=("cp2",),
    rules=("reported",),
    blind=BLIND,
)
def metrics_of_the_first_rank(patch: Patch) -> None:
    """Report on all ranks the metrics of the first one."""
    right = step._combined

    def combined(world: World, own: Part, grad_norm: Any) -> StepOutcome:
        return replace(right(world, own, grad_norm), metrics=dict(world.gather(own)[0].metrics))

    patch.setattr(step, "_combined", combined)


@fault(
    category="U",
    first="metrics",
    source="prime-rl PR#2359: a mean over ranks of means",
    variants=("dp2",),
    rules=("reported",),
    blind=BLIND,
)
def metrics_averaged_over_ranks(patch: Patch) -> None:
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


@fault(
    names=r"training_step/loss",
    category="U",
    first="metrics",
    source="Megatron#7452: a loss summed over tensor-parallel ranks",
    variants=("tp2",),
    rules=("reported",),
    blind=BLIND,
)
def reported_loss_of_every_rank(patch: Patch) -> None:
    """Count the loss of each tensor-parallel rank."""
    right = step._combined

    def combined(world: World, own: Part, grad_norm: Any) -> StepOutcome:
        outcome = right(world, own, grad_norm)
        return replace(outcome, loss=math.fsum(part.loss for part in world.gather(own)))

    patch.setattr(step, "_combined", combined)
