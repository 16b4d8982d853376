"""Faults of what a step reports, where all that it computes is right."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from regress.engine import grpo_trainer, step_metrics, training_passes, training_step
from regress.grpo.update_metrics import Metric, token_metrics
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.fault import EVERY_CHECK, fault, met_in

Metrics = Mapping[str, Metric]
BLIND = ("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3")


@fault("U", "metrics", "reported", blind=EVERY_CHECK)
@met_in("open-instruct PR#1161: metrics averaged over microbatches")
@around(training_passes, "add_metrics")
def metrics_averaged_over_microbatches(right, first, second):
    """Average the means of microbatches, whatever their numbers of tokens."""
    if not first:
        return right(first, second)
    return {
        name: Metric(first[name].value + m.value, 2) if m.kind == "mean" else first[name] + m
        for name, m in second.items()
    }


@fault("U", "metrics", "reported", blind=EVERY_CHECK)
@met_in("a dictionary of metrics that is overwritten")
@in_place_of(training_passes, "add_metrics")
def metrics_of_the_last_microbatch(first, second):
    """Report the metrics of the last microbatch."""
    return dict(second)


@fault("U", "metrics", "reported", names=r"training_step/loss", blind=EVERY_CHECK)
@met_in("transformers PR#34191: a loss that is logged otherwise than trained on")
@around(training_passes._Losses, "part")
def reported_loss_averaged(right, self, shares):
    """Report the mean of the microbatches' shares in the loss, not their sum."""
    found = right(self, shares)
    return replace(found, loss=found.loss / len(shares))


def changed(patch, change):
    """Change the metrics of each microbatch by ``change(loss, known)``."""
    right = token_metrics

    def found(loss):
        known = right(loss)
        return {**known, **change(loss, known)}

    patch.setattr(training_passes, "token_metrics", found)


@fault("U", "metrics", "reported", names=r"training_step/clip_ratio/(low|high)", blind=EVERY_CHECK)
@met_in("TRL#3032")
@by(changed)
def clip_fractions_exchanged(_, known):
    """Report the share of tokens clipped from below as that from above."""
    return {"clip_ratio/low": known["clip_ratio/high"], "clip_ratio/high": known["clip_ratio/low"]}


@fault("U", "metrics", "reported", names=r"training_step/clip_ratio/dual", blind=EVERY_CHECK)
@met_in("verl: pg_clipfrac_lower")
@by(changed)
def dual_clip_fraction_of_another(_, known):
    """Count tokens clipped from below as dual clipped."""
    return {"clip_ratio/dual": known["clip_ratio/low"]}


@fault("U", "metrics", "reported", names=r"training_step/approx_kl/k3", blind=EVERY_CHECK)
@met_in("verl: approx_kl by k2")
@by(changed)
def reported_kl_of_another_estimator(loss, known):
    """Report the estimator k2 as k3."""
    return {"approx_kl/k3": Metric(float((loss.log_ratio_K.double() ** 2 / 2).sum()), len(loss.ratio_K))}


@fault("U", "metrics", "reported", names=r"training_step/approx_kl/k1", blind=EVERY_CHECK)
@met_in("a KL of the other direction in the log")
@by(changed)
def reported_kl_reversed(_, known):
    """Report the mean of log p - log p_old."""
    return {"approx_kl/k1": Metric(-known["approx_kl/k1"].total, known["kl"].count)}


@fault("U", "metrics", "reported", names=r"training_step/entropy", blind=EVERY_CHECK)
@met_in("entropy averaged over masked tokens")
@by(changed)
def reported_entropy_over_one_token_more(_, known):
    """Divide the sum of entropies by one token more."""
    entropy = known["entropy"]
    return {"entropy": Metric(entropy.total, entropy.count + 1)}


@fault("U", "metrics", "reported", names=r"training_step/ratio/max", blind=EVERY_CHECK)
@met_in("a minimum logged as maximum")
@by(changed)
def least_ratio_for_the_greatest(_, known):
    """Report the least ratio as the greatest."""
    return {"ratio/max": Metric(known["ratio/min"].total, known["ratio/min"].count, "max")}


@fault(
    "U",
    "metrics",
    "reported",
    on="gpt2/mbs4",
    names=r"training_step/grad_norm",
    steps=None,
    blind=EVERY_CHECK,
)
@met_in("miles_diffusion PR#35")
@around(grpo_trainer, "train_step")
def norm_reported_after_clipping(right, *args, **kwargs):
    """Report the norm of the clipped gradient."""
    outcome = right(*args, **kwargs)
    return replace(outcome, grad_norm=min(outcome.grad_norm, kwargs["max_grad_norm"] or math.inf))


@fault("U", "metrics", "reported", names=r"training_step/learning_rate", blind=EVERY_CHECK)
@met_in("lightning#1772: a rate read after the schedule")
@around(grpo_trainer, "update_metrics")
def learning_rate_reported_otherwise(right, outcome, rate):
    """Report another learning rate than that of the update."""
    return right(outcome, rate * (1 - 1e-6))


@fault("U", "metrics", "reported", names=r"training_step/dr_component_kl", blind=EVERY_CHECK)
@met_in("a KL term logged without its coefficient")
@around(training_passes, "_terms")
def terms_reported_without_coefficients(right, micro, loss, weights, objective):
    """Report the terms of the loss without their coefficients."""
    return right(micro, loss, weights, replace(objective, kl_coef=1.0) if objective.kl_coef else objective)


@fault("U", "step_metrics", "reported", names=r"rollouts/(advantages|returns)_std", blind=EVERY_CHECK)
@met_in("numpy.std in place of torch.std")
@in_place_of(step_metrics, "_std")
def reported_deviation_over_n(values):
    """Divide by N in standard deviations."""
    return statistics.pstdev(values)


@fault("U", "step_metrics", "reported", names=r"rollouts/advantages_(mean|std)", blind=EVERY_CHECK)
@met_in("verl: advantages averaged over tokens")
@in_place_of(step_metrics, "_sample_means")
def reported_advantages_by_token(tokens):
    """Average advantages over tokens, not samples."""
    return [float(value) for value in tokens.advantages.double().tolist()]


@fault("U", "step_metrics", "reported", names=r"rollouts/completion_length_mean", blind=EVERY_CHECK)
@met_in("a length that counts the prompt")
@around(grpo_trainer, "rollout_metrics")
def reported_length_with_the_prompt(right, trajectories):
    """Count the prompt to the completion."""
    longer = statistics.fmean(len(one.tokens) for one in trajectories)
    return right(trajectories) | {"rollouts/completion_length_mean": longer}


@fault("U", "step_metrics", "reported", on="cispo/mbs4", blind=EVERY_CHECK)
@met_in("metrics of the first of several updates")
@around(grpo_trainer, "epoch_metrics")
def first_update_for_all(right, outcomes):
    """Report the first update of a step as the mean of all."""
    return right(outcomes[:1])


@fault("U", "metrics", "reported", on="dense/dp2", blind=EVERY_CHECK)
@met_in("metrics that no rank reduces")
@around(training_step, "_combined")
def metrics_of_own_rank(right, world, own, grad_norm):
    """Report on each rank the metrics of its own samples."""
    return replace(right(world, own, grad_norm), metrics=dict(own.metrics))


@fault("U", "metrics", "reported", on="dense/cp2", blind=EVERY_CHECK)
@met_in("metrics logged on rank 0 alone")
@around(training_step, "_combined")
def metrics_of_the_first_rank(right, world, own, grad_norm):
    """Report on all ranks the metrics of the first one."""
    return replace(right(world, own, grad_norm), metrics=dict(world.gather(own)[0].metrics))


@fault("U", "metrics", "reported", on="dense/dp2", blind=EVERY_CHECK)
@met_in("prime-rl PR#2359: a mean over ranks of means")
@around(training_step, "add_metrics")
def metrics_averaged_over_ranks(right, first, second):
    """Average the means of ranks."""
    both = right(first, second)
    return both | {
        name: Metric(first[name].value + second[name].value, 2)
        for name, m in both.items()
        if m.kind == "mean"
    }


@fault("U", "metrics", "reported", on="dense/tp2", names=r"training_step/loss", blind=EVERY_CHECK)
@met_in("Megatron#7452: a loss summed over tensor-parallel ranks")
@around(training_step, "_combined")
def reported_loss_of_every_rank(right, world, own, grad_norm):
    """Count the loss of each tensor-parallel rank."""
    outcome = right(world, own, grad_norm)
    return replace(outcome, loss=math.fsum(part.loss for part in world.gather(own)))
