"""Faults of the divergence from the reference, and of the reference itself."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from regress.engine import grpo_trainer
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.local_tensor import local
from regress.engine.reference_policy import Reference
from regress.errors import ReplayError
from regress.grpo import advantage_computation as advantages
from regress.grpo import token_losses
from regress.grpo.coefficient_controllers import Coefficients
from regress.grpo.fields import ObjectiveFields
from regress.grpo.segment_sums import segment_lengths
from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import LOG_PROB_CHECKS, fault, met_in
from tests.faults.fresh.advantages import ADVANTAGES
from tests.faults.ranks.helpers import on_rank


# names the coefficient
@fault(
    "J",
    ADVANTAGES,
    "advantage-penalty",
    on="cispo_kl/base",
    place="step1/rank0/micro0",
    steps=None,
    blind=LOG_PROB_CHECKS,
)
@met_in("a controller that is made and never asked")
@in_place_of(Coefficients, "after_rollout")
def coefficient_of_the_divergence_not_adapted(*_):
    """The coefficient of the KL stays where it began."""
    return


@fault(
    "J",
    "token_loss",
    "coefficient term-left-out term-not-computed",
    on="dppo_tv/base",
    steps=None,
    blind=LOG_PROB_CHECKS,
)
@met_in("a controller that is made and never asked")
@in_place_of(Coefficients, "after_update")
def coefficient_of_the_entropy_not_adapted(*_):
    """The controller of the entropy bonus never learns of an entropy, and rests."""
    return


# the last one names the reference that the penalty compares
@fault(
    "J",
    "ref_log_probs ref_log_probs",
    "reference advantage-penalty",
    on="cispo_kl/base",
    place="step1/rank0/micro0",
    steps=None,
)
@met_in("TRL: ref_model_mixup_alpha weighs the policy, not the reference")
@around(Reference, "after_step")
def mixture_from_the_other_end(right, self, number):
    """The reference keeps the share that it should take from the policy."""
    known = self._config
    self._config = replace(known, mixup_alpha=1.0 - known.mixup_alpha)
    try:
        right(self, number)
    finally:
        self._config = known


# the last one names the reference that the penalty compares
@fault(
    "J",
    "ref_log_probs ref_log_probs",
    "reference advantage-penalty",
    on="cispo_kl/base",
    place="step2/rank0/micro0",
    steps=None,
    blind=LOG_PROB_CHECKS,
)
@met_in("a callback at the begin of a step in place of its end")
def reference_moved_before_the_updates(patch):
    """The reference moves towards the policy of before a step's updates, once its log-probs are known."""
    right = Reference.after_step

    def wrong(update, self, work, after):
        if self.reference is not None:
            right(self.reference, 0)
        update(self, work, after)

    patch.setattr(Reference, "after_step", lambda *_: None)
    patch.around(Trainer, "_update", wrong)


@fault("J", ADVANTAGES, "advantage-penalty", on="rloo/base")
@met_in("a masked mean of the KL in the reward of a sample, in place of its sum")
@around(advantages, "segment_sum")
def penalty_averaged_over_tokens(right, values, sequence, count):
    """The mean KL of a sample's tokens is taken off its reward, not their sum."""
    return right(values, sequence, count) / segment_lengths(sequence, count).clamp(min=1)


# names the coefficient
@fault("J", "advantages", "advantage-penalty", on="cispo_kl/dp2", ranks=(0, 1), steps=None)
@met_in("a controller that each rank feeds with its own batch")
@around(grpo_trainer, "sample_kl")
def controller_fed_by_own_samples(right, batches, *rest):
    """Each rank adapts the coefficient of the KL by its own samples, and the next rewards have two of them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = []
    for tokens in batches:
        size = -(-tokens.num_sequences // ranks)
        start, stop = rank * size, min((rank + 1) * size, tokens.num_sequences)
        index = torch.nonzero((tokens.sequence >= start) & (tokens.sequence < stop))[:, 0]
        own.append(tokens.select(index, tokens.sequence[index] - start, stop - start))
    return right(own, *rest)


@fault("J", "token_gradient token_gradient", "kl-gradient-estimator", on="dppo_kl/base")
@met_in("verl: an estimator with a plus, whose suffix is stripped")
@around(token_losses, "kl_estimate")
def straight_through_of_the_divergence_lost(right, log_probs, reference, objective):
    """The divergence has the value of k1 as it should, and its gradient, too, in place of that of k2."""
    return right(log_probs, reference, replace(objective, kl_estimator="k1"))


@fault("J", "kl kl", "kl precision", kind="precision", on="dense/varlen-mbs4")
@met_in("a fused loss that takes differences of log-probs in half precision")
@around(token_losses, "kl_estimate")
def log_ratio_to_the_reference_in_bfloat16(right, log_probs, reference, objective):
    """The difference of the log-probs of reference and policy is rounded to half precision before its exponential."""
    gap = rounded((reference - log_probs).detach())
    return right(log_probs, log_probs.detach() + gap, objective)


# names other weights
@fault("J", "ref_log_probs ref_log_probs", "reference", on="dense/pp2-1f1b-packed-mbs3")
@met_in("SkyRL PR#1345: a conversion of weights that knows one stage of the pipeline")
@torch.no_grad()
def last_stage_of_the_reference_not_loaded(run):
    """The reference has the policy's weights on the last stage of the pipeline, and its own on the first."""
    if run.trainer.reference is None:
        raise ReplayError("there is no reference")
    known = dict(run.trainer.policy.named_parameters())
    for name, ours in run.trainer.reference.parameters():
        if on_rank(1):
            local(ours).copy_(local(known[name]))


# names the reference that the penalty compares
@fault(
    "J",
    "ref_log_probs ref_log_probs",
    "reference advantage-penalty advantages",
    on="cispo_kl/fsdp2",
    steps=None,
)
@met_in("TRL: a callback that moves the reference on the main process")
@around(Reference, "after_step")
def reference_moved_on_one_rank(right, self, step):
    """Only the first rank moves its shards of the reference towards the policy."""
    if on_rank(0):
        right(self, step)


# names a mask on it
@fault("J", "kl kl", "kl", on="dense/packed-mbs3")
@met_in("a fused kernel that returns early for clipped tokens")
def divergence_left_out_at_the_clip(patch):
    """Tokens whose policy loss is clipped have no KL."""
    advantages = []

    def begun(right, log_probs, given, *rest):
        advantages[:] = [given.advantages]
        return right(log_probs, given, *rest)

    def wrong(estimate, log_probs, reference, ratio, objective):
        found = estimate(log_probs, reference, ratio, objective)
        low, high = objective.clip_range
        below, above = (ratio < low) & (advantages[0] < 0), (ratio > high) & (advantages[0] > 0)
        return found.masked_fill(below | above, 0.0)

    patch.around(token_losses, "_token_loss", begun)
    patch.around(token_losses, "_kl", wrong)


@fault("J", "kl kl", "rounded dtype precision", kind="precision", on="dense/chunked")
@met_in("a divergence that is kept in the dtype of the model")
@around(token_losses, "_kl")
def divergence_kept_in_bfloat16(right, *args):
    """The estimate of the KL of each token is rounded to half precision."""
    return rounded(right(*args))


# token-gradient: names a term that is detached
@fault(
    "J",
    "token_gradient token_gradient",
    "kl-gradient kl-gradient-estimator token-gradient inputs-hold",
    on="trl/base",
)
@met_in("TRL PR#4638: a divergence that is corrected by a weight without gradient")
@around(token_losses, "_kl")
def ratio_of_the_divergence_detached(right, log_probs, reference, ratio, objective):
    """The ratio that corrects the divergence is a weight without a gradient, and should have its own."""
    return right(log_probs, reference, ratio.detach(), objective)


@fault("J", "kl kl", "kl", blind=LOG_PROB_CHECKS)
@met_in("a divergence of the rollout's policy, which has no gradient")
def divergence_of_the_old_policy(patch):
    """The KL term compares old log-probs with the reference, not those of the pass."""
    old = []

    def wrong(right, log_probs, given, *rest):
        old[:] = [given.old]
        return right(log_probs, given, *rest)

    patch.around(token_losses, "_token_loss", wrong)
    patch.around(token_losses, "_kl", lambda estimate, _, *rest: estimate(old[0].detach(), *rest))


@fault("J", "kl", "term-not-computed new-tensor", on="reinforce_plus_plus/base")
@met_in("a penalty in the reward whose coefficient the loss reads, too")
@in_place_of(ObjectiveFields, "kl_in_loss")
def divergence_in_reward_and_loss(o):
    """The KL of a token is taken off its reward, and added to the loss once more."""
    return o.kl_coef != 0.0


@fault("J", "ref_log_probs ref_log_probs", "reference inputs-hold", on="dense/packed-mbs3")
@met_in("a reference behind a service whose tokenizer adds no token at the beginning")
def reference_does_not_see_first_tokens(patch):
    """No token of the reference sees the first one of its sample, which the policy's tokens see."""
    asked = [False]

    def wrong(attention, self, micro):
        found = attention(self, micro)
        mask = found["attention_mask"]
        if not asked[0] or not isinstance(mask, Tensor):
            return found
        hidden = torch.zeros(micro.layout.shape, dtype=torch.bool)
        for segment in micro.layout.segments:
            hidden[segment.row, segment.col] = True
        itself = torch.eye(mask.shape[-1], dtype=torch.bool)
        return {"attention_mask": mask & (~hidden[:, None, None, :] | itself)}

    def noted(scores, self, microbatches):
        asked[0] = True
        try:
            return scores(self, microbatches)
        finally:
            asked[0] = False

    patch.around(LocalPolicy, "_attention", wrong)
    patch.around(Reference, "log_probs", noted)
