"""Faults of log-probs, entropies, temperatures and shifts."""

from dataclasses import replace

import torch

from regress.engine import causal_lm_policy, log_prob_projection
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.reference_policy import Reference
from regress.errors import ReplayError
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.parallel import parallel_policy as parallel_policy
from regress.parallel import vocabulary_log_probs
from regress.replay.fault_injection import around
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import LOG_PROB_CHECKS, fault, met_in
from tests.faults.fresh.inputs import PADDING


@fault("H", "log_probs", "order-not-restored log-probs-shifted", on="dense/tp2-packed-chunk7")
@met_in("Liger-Kernel: chunks that are joined in another order")
@around(log_prob_projection, "_in_chunks")
def chunks_joined_from_the_last(right, model, hidden, targets, compute, chunk):
    """Log-probs of chunks are joined from the last chunk to the first."""
    found = right(model, hidden, targets, compute, chunk)

    def turned(values):
        return torch.cat([*reversed(values.split(chunk))])

    entropy = None if found.entropy is None else turned(found.entropy)
    return TokenLogProbs(turned(found.log_probs), entropy)


SMOOTHING = 0.1


@fault("H", "log_probs log_probs", "log-softmax", on="dense/chunked")
@met_in("Megatron#737: label smoothing")
@around(causal_lm_policy, "token_log_probs")
def labels_smoothed(right, logits, targets, *, temperature=1.0, **rest):
    """A tenth of a token's log-prob is the mean log-prob of the vocabulary."""
    found = right(logits, targets, temperature=temperature, **rest)
    mean = (logits / temperature).log_softmax(-1).mean(-1)
    return replace(found, log_probs=(1 - SMOOTHING) * found.log_probs + SMOOTHING * mean)


# names a mask of the vocabulary
@fault("H", "log_probs log_probs", "log-softmax", on="dense/vocab8")
@met_in("a list of forbidden tokens that training takes over from sampling")
@around(causal_lm_policy, "token_log_probs")
def padding_left_out_of_the_softmax(right, logits, *args, **rest):
    """The token that pads has the probability 0 in training, and others share what it had."""
    padding = torch.arange(logits.shape[-1]) == PADDING
    return right(logits.masked_fill(padding, -torch.inf), *args, **rest)


# the last two name the temperature
@fault(
    "H",
    "log_probs log_probs",
    "temperature log-softmax vocabulary-parts",
    on="dr_grpo/dp2-tp2-sp-packed",
    ranks=(0, 1, 2, 3),
)
@met_in("NeMo-RL PR#935: a temperature that the path of a split vocabulary lacks")
@around(parallel_policy, "vocab_parallel_log_probs")
def temperature_not_passed_to_a_split_vocabulary(right, *args, temperature, **rest):
    """Log-probs of a split vocabulary are those of the logits as they are."""
    return right(*args, temperature=1.0, **rest)


# names what a rank does with its logits, and the dtype
@fault(
    "H",
    "log_probs log_probs",
    "log-softmax softmax-dtype vocabulary-parts precision",
    kind="precision",
    on="dense/tp2-packed-chunk7",
    ranks=(0, 1),
)
@met_in("maxtext PR#5231: a target's logit in half precision less a log-sum-exp in float32")
@around(vocabulary_log_probs, "_local_sums")
def logits_of_targets_exchanged_in_bfloat16(right, *args):
    """The rank that holds a target gives its logit to the others in half precision; the log-sum-exp is exact."""
    maximum, sums = right(*args)
    return maximum, torch.cat([sums[:2], rounded(sums[2:3]), sums[3:]])


@fault("H", "log_probs log_probs", "temperature log-softmax", on="dr_grpo/packed-chunked-mbs4")
@met_in("NeMo-RL PR#935: a temperature that one of two paths applies")
@around(LocalPolicy, "_token_log_probs")
def incomplete_chunks_without_temperature(right, self, logits, targets, entropy):
    """Chunks of tokens that are not full take a path of their own, which does not divide by the temperature."""
    known, size = self.temperature, self.log_prob_chunk_size
    if size is not None and len(targets) < size:
        self.temperature = 1.0
    try:
        return right(self, logits, targets, entropy)
    finally:
        self.temperature = known


@fault("H", "ref_log_probs ref_log_probs", "log-probs-shifted reference", on="dense/packed-dynamic")
@met_in("ms-swift PR#8196, prime-rl PR#1525: a shift of the log-probs of one model alone")
@around(Reference, "log_probs")
def reference_rolled_within_packed_rows(right, self, microbatches):
    """Log-probs of the reference are rolled by one token within each packed row."""
    return [values.roll(1) for values in right(self, microbatches)]


@fault(
    "H", "entropy entropy", "temperature entropy-of-changed-logits", on="dr_grpo/mbs4", blind=LOG_PROB_CHECKS
)
@met_in("verl#2484: entropies of other logits")
@around(causal_lm_policy, "token_log_probs")
def entropy_without_temperature(right, *args, temperature, **rest):
    """Log-probs are tempered, and entropies are those of the plain logits."""
    plain = right(*args, temperature=1.0, **rest).entropy
    return replace(right(*args, temperature=temperature, **rest), entropy=plain)


# the last one names the rejection whose log-probs differ
@fault("H", "old_log_probs old_log_probs", "temperature old-log-probs loss-mask", on="trl/base")
@met_in("TRL PR#3029, NeMo-RL PR#935")
@around(Trainer, "_collected")
def old_log_probs_without_temperature(right, self, source, *rest):
    """Log-probs that are recomputed before the first update come from plain logits, those of updates from tempered."""
    known = self.policy.temperature
    if source is self.policy:
        self.policy.temperature = 1.0
    try:
        return right(self, source, *rest)
    finally:
        self.policy.temperature = known


# the last one names the temperature of the reference
@fault("H", "ref_log_probs ref_log_probs", "temperature reference", on="trl/base", blind=("mean 1e-3",))
@met_in("miles PR#68, OpenRLHF PR#853")
def reference_without_temperature(run):
    """The reference scores by plain logits, and the policy by tempered ones."""
    if run.trainer.reference is None:
        raise ReplayError("there is no reference")
    run.trainer.reference._policy.temperature = 1.0


LEAST = -4.0
"""Log-prob below which the golden cases have a few tokens."""


# the first one names the temperature
@fault("H", "log_probs log_probs", "log-softmax temperature inputs-hold", on="dr_grpo/packed-chunked-mbs4")
@met_in("a fused kernel that tempers the logit of the target, and takes the log-sum-exp of plain logits")
@around(causal_lm_policy, "token_log_probs")
def normalizer_without_temperature(right, logits, *args, temperature, **rest):
    """The logit of a target is divided by the temperature, and the logits that normalize it are not."""
    found = right(logits, *args, temperature=temperature, **rest)
    shift = (logits / temperature).logsumexp(-1) - logits.logsumexp(-1)
    return replace(found, log_probs=found.log_probs + shift)


# names a change afterwards, and a limit of few tokens
@fault("H", "log_probs log_probs", "log-softmax single-tokens inputs-hold", on="tools/packed")
@met_in("log-probs that are held above a least one against overflow of the ratio")
@around(causal_lm_policy, "token_log_probs")
def improbable_tokens_raised(right, *args, **rest):
    """Log-probs below -4 are raised to it."""
    found = right(*args, **rest)
    return replace(found, log_probs=found.log_probs.clamp(min=LEAST))


@fault("H", "entropy entropy", "log-probs-shifted", on="dr_grpo/mbs4")
@met_in("TRL PR#5620")
@around(causal_lm_policy, "token_log_probs")
def entropy_one_token_late(right, *args, **rest):
    """The entropy of a token stands at the one behind it."""
    found = right(*args, **rest)
    return replace(found, entropy=None if found.entropy is None else found.entropy.roll(1))
