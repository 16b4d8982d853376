"""Faults of what a step reports, where all that it computes is right."""

import functools
import statistics
from dataclasses import replace

import torch
import torch.distributed as dist

from regress.engine import grpo_trainer, step_metrics, training_passes, training_step
from regress.engine.step_metrics import rollout_metrics
from regress.grpo import token_losses
from regress.grpo.segment_sums import segment_lengths, segment_sum
from regress.grpo.update_metrics import Metric, add_metrics
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.fault import EVERY_CHECK, fault, met_in
from tests.faults.metrics import changed
from tests.faults.ranks.helpers import on_rank


# names the tokens that it counts
@fault("U", "metrics", "reported", on="cispo_kl/dp2", names=r"training_step/entropy", blind=EVERY_CHECK)
@met_in("TRL: an entropy that is logged behind the mask of high-entropy tokens")
@by(changed)
def entropy_of_kept_tokens_for_all(_, known):
    """Report the mean entropy of the tokens that masks leave as that of all."""
    return {"entropy": known["entropy/kept"]}


# names how it is combined over microbatches and ranks
@fault(
    "U",
    "metrics",
    "reported",
    on="tools/dp2-packed-budget48",
    names=r"training_step/(policy_loss|kl|entropy|clip_ratio/(low|high)|approx_kl/.*|ratio/mean)",
    blind=EVERY_CHECK,
)
@met_in("a list of metrics that one rank clears behind its first microbatch")
@around(training_passes._Losses, "part")
def first_microbatch_of_a_rank_not_reported(right, self, shares):
    """One rank counts the tokens of its first microbatch in no metric."""
    found = right(self, shares)
    if not on_rank(1):
        return found
    none = {}
    later = functools.reduce(add_metrics, (share.metrics for share in shares[1:]), none)
    return replace(found, metrics=later)


@fault("U", "step_metrics", "reported", on="dapo/mbs4", names=r"rollouts/truncated_ratio", blind=EVERY_CHECK)
@met_in("a share of finished samples logged as that of truncated ones")
@around(grpo_trainer, "rollout_metrics")
def finished_share_for_truncated(right, trajectories):
    """Report the share of samples that ended by themselves as that of truncated ones."""
    known = right(trajectories)
    return {**known, "rollouts/truncated_ratio": 1.0 - known["rollouts/truncated_ratio"]}


@fault("U", "metrics", "reported", names=r"training_step/(kl|policy_loss)", blind=EVERY_CHECK)
@met_in("TRL: means over tokens that count each sample's length twice")
@around(training_passes, "token_metrics")
def means_of_counted_tokens_alone(right, loss):
    """Report means of terms over the tokens whose advantage is not 0 alone."""
    known = right(loss)
    here = loss.policy_K != 0
    for name, values in (("kl", loss.kl_K), ("policy_loss", loss.policy_K)):
        if values is not None:
            known[name] = Metric(float(values[here].double().sum()), int(here.sum()))
    return known


@fault("U", "metrics", "reported", names=r"training_step/approx_kl/k3", blind=EVERY_CHECK)
@met_in("verl: approx_kl of the ratio at its level")
@around(training_passes, "token_metrics")
def divergence_of_old_from_new_reported(right, loss):
    """Report the estimate k3 with old and new policy exchanged."""
    known = right(loss)
    x = -loss.log_ratio_K
    known["approx_kl/k3"] = Metric(float((torch.expm1(x) - x).double().sum()), x.numel())
    return known


@fault(
    "U",
    "step_metrics",
    "reported-over-ranks reported",
    on="tools/dp2-packed-budget48",
    names=r"rollouts/returns_(max|mean|std|sum)|system/replay_buffer_size",
)
@met_in("statistics of rewards that each rank logs of its own samples")
@in_place_of(grpo_trainer, "rollout_metrics")
def rollout_reported_by_each_rank_for_itself(trajectories):
    """Report on each rank the rewards and lengths of the samples that it trains on."""
    size = -(-len(trajectories) // dist.get_world_size())
    begin = dist.get_rank() * size
    return rollout_metrics(trajectories[begin : begin + size])


# names the tokens that it counts
@fault("U", "metrics", "reported", on="moe/packed-mbs3", names=r"training_step/clip_ratio/(low|high)")
@met_in("TRL#3032: a share of clipped tokens by the ratio alone")
@in_place_of(token_losses, "_clipped")
@torch.no_grad()
def clipped_counted_whatever_the_advantage(t, objective):
    """Count every token beyond the clip range as clipped, also where the minimum takes the ratio as it is."""
    low, high = objective.clip_range
    return t.ratio < low, t.ratio > high


@fault("U", "step_metrics", "reported", on="dense/packed-reversed", names=r"rollouts/kl_mean")
@met_in("verl: masked_mean over the tokens of a sample, and then over samples")
@around(grpo_trainer, "token_statistics")
def reported_kl_averaged_by_samples(right, batches):
    """Report the mean over samples of the mean KL of their tokens, not that over all tokens."""
    known = right(batches)
    means = []
    for tokens in batches:
        kl = step_metrics._reference_kl(tokens)
        lengths = segment_lengths(tokens.sequence, tokens.num_sequences)
        sums = segment_sum(kl, tokens.sequence, tokens.num_sequences)
        means += (sums[lengths > 0] / lengths[lengths > 0]).tolist()
    return {**known, "rollouts/kl_mean": statistics.fmean(means)}


# names the tokens that it counts
@fault("U", "step_metrics", "reported", on="tools/packed", names=r"rollouts/completion_length_mean")
@met_in("TRL#5144: lengths of completions by the mask of what was sampled")
@around(grpo_trainer, "rollout_metrics")
def replies_not_counted_in_the_length(right, trajectories):
    """Report the mean number of sampled tokens as the length of completions, without the environment's answers."""
    lengths = [sum(one.loss_mask) for one in trajectories]
    return {**right(trajectories), "rollouts/completion_length_mean": statistics.fmean(lengths)}


@fault(
    "U",
    "metrics",
    "reported precision",
    kind="precision",
    on="tools/packed",
    names=r"training_step/(policy_loss|kl|entropy|approx_kl/.*|ratio/mean)",
)
@met_in("metrics that are summed as tensors of the model's dtype")
@around(training_passes, "token_metrics")
def sums_of_metrics_in_bfloat16(right, loss):
    """Report means whose sums over the tokens of a microbatch are rounded to half precision."""
    known = right(loss)
    return {
        name: replace(metric, total=float(torch.tensor(metric.total).bfloat16()))
        if metric.kind == "mean"
        else metric
        for name, metric in known.items()
    }


@fault(
    "U",
    "metrics",
    "reported-over-ranks reported",
    on="tools/dp2-packed-budget48",
    names=r"training_step/ratio/(min|max)",
    blind=EVERY_CHECK,
)
@met_in("verl: every metric of all ranks by numpy.mean")
@around(training_step, "_combined")
def extremes_averaged_over_ranks(right, world, own, norm):
    """Report the mean over ranks of the least and of the greatest ratio."""
    outcome = right(world, own, norm)
    parts = [part.metrics for part in world.gather(own)]
    changed = dict(outcome.metrics)
    for name in ("ratio/min", "ratio/max"):
        values = [part[name].value for part in parts if name in part and part[name].count]
        if values:
            changed[name] = replace(changed[name], total=sum(values) / len(values))
    return replace(outcome, metrics=changed)
