"""Faults of a vocabulary in parts."""

import torch
import torch.distributed as dist

from regress.parallel import parallel_policy, vocabulary_log_probs
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.ranks.helpers import on_rank


@fault("C", "log_probs", "vocabulary-parts", on="dense/tp2", ranks=(0, 1))
@met_in("Megatron#737")
def offset_one_too_high(patch):
    """Ids are counted from the wrong first one on all ranks but the first, unchecked."""
    patch.setattr(vocabulary_log_probs, "_check_holders", lambda *_: None)
    offset_checked(patch)


@fault("C", "log_probs", "vocabulary-parts", on="dense/tp2", ranks=(0, 1))
@met_in("ROCm aiter PR#3334")
@in_place_of(vocabulary_log_probs, "_joined")
def maximum_of_own_part(maximum, sums, group):
    """Sums of exponentials are added that are relative to different maxima."""
    sums = sums.clone()
    dist.all_reduce(sums, group=group)
    return maximum, sums


@fault("C", "log_probs", "vocabulary-parts", on="dense/tp2", ranks=(0, 1), precisions="float64 float32")
@met_in("ColossalAI#5488, torchtitan PR#4319")
@around(vocabulary_log_probs, "_local_sums")
def padding_ids_counted(right, *args):
    """Two ids that only fill up the last part, with logits of 0, count in the denominator."""
    maximum, sums = right(*args)
    if on_rank(dist.get_world_size() - 1):
        sums[0] += 2 * (-maximum).exp()
    return maximum, sums


@fault("C", "log_probs", "vocabulary-parts", on="dense/tp2", ranks=(0, 1))
@met_in("Megatron#7452 finding 2")
@around(vocabulary_log_probs, "_joined")
def whole_logits_in_parallel(right, maximum, sums, group):
    """Every rank has all logits, and the sum over the ranks is taken nevertheless: log-probs less log(tp)."""
    highest, (total, moment, target, holders) = right(maximum, sums, group)
    return highest, torch.stack([total * group.size(), moment * group.size(), target, holders])


@fault("C", "logit_gradient", "logit-gradient-shard", on="dense/tp2", ranks=(0, 1), blind=FORWARD_CHECKS)
@met_in("ms-swift PR#9947")
@around(vocabulary_log_probs, "logits_gradient")
def sum_without_gradient(right, logits, columns, *args):
    """Log-probs are summed without autograd: logits of parts that do not hold the target get no gradient."""
    here = (columns >= 0) & (columns < logits.shape[-1])
    return right(logits, columns, *args) * here.view(*logits.shape[:-1], 1)


@fault("C", "entropy", "entropy-of-changed-logits", on="dr_grpo/tp2", ranks=(0, 1))
@met_in("verl PR#1672, verl#2484")
@around(vocabulary_log_probs, "_joined")
def entropy_of_changed_logits(right, maximum, sums, group):
    """The logits of a part were shifted in place before its entropy was taken."""
    highest, (total, _, target, holders) = right(maximum, sums, group)
    moment = sums[1] * (maximum - highest).exp()
    dist.all_reduce(moment, group=group)
    return highest, torch.stack([total, moment, target, holders])


@fault("C", "refused", on="dense/tp2", ranks=(), says="lies in 0 parts of the vocabulary")
@met_in("Megatron#737, in an engine that checks")
@around(parallel_policy, "vocab_parallel_log_probs")
def offset_checked(right, *args, start, **rest):
    """The same, in the engine as it is."""
    return right(*args, start=start + (start > 0), **rest)
