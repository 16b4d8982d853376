"""Rules for ratios, clipping, divergences, the terms of the loss and its sum."""

from __future__ import annotations

from regress.compare.diagnosis.rule import Rule

OF_GOLDEN = "invariant-alone"
"""Rule of what is wrong although every golden value holds; a dump alone has none."""

LOSS: tuple[Rule, ...] = (
    # correction for the sampler, divergence, ratio
    Rule(
        "sampler-correction-off",
        "the correction for the sampler is left out: the policy that sampled counts as the one that is trained "
        "(algorithm.sampler_correction)",
        at=("sampler_weights",),
        what="1 everywhere|equal to ratio",
    ),
    Rule(
        "sampler-mismatch",
        "the correction for the sampler is another one: its bounds (algorithm.correction_min, "
        "correction_max), truncation "
        "in place of a mask, tokens in place of sequences, or other log-probs of the sampler",
        at=("sampler_weights",),
        look="trajectory",
    ),
    Rule(
        "kl-estimator",
        "another estimator of the divergence: algorithm.kl_estimator",
        at=("kl",),
        what="equal to the estimator",
    ),
    Rule(
        "kl-direction",
        "the divergence is taken the other way round: policy and reference are exchanged",
        at=("kl",),
        what="the other way round",
    ),
    Rule(
        "kl",
        "log-probs hold and the divergence does not: its estimator, its clamps (kl_clamp, kl_log_ratio_clamp), or its "
        "correction by the ratio",
        at=("kl",),
        holds=("log_probs", "ref_log_probs"),
    ),
    Rule(
        "on-policy-ratio",
        "every ratio is 1: old log-probs are those of the forward pass itself",
        at=("ratio",),
        what="1 everywhere",
        look="old_log_probs",
    ),
    Rule(
        "ratio-level",
        "the ratio of another unit: algorithm.importance_level (token, sequence, sequence_product)",
        at=("ratio",),
        what="(of each token|mean over the sample|product over the sample)",
    ),
    Rule(
        "ratio-inverted",
        "old and new log-probs are exchanged, or the ratio is not exponentiated",
        at=("ratio",),
        what="its inverse|the log-ratio",
    ),
    Rule(
        "ratio-of-a-part",
        "the ratio of a sequence is taken over the tokens of one rank or microbatch: its sum must be "
        "completed over all "
        "ranks that hold parts of it",
        at=("ratio",),
        holds=("log_probs", "old_log_probs"),
        when=lambda _, scene: scene.mesh.get("cp", 1) > 1,
        variants="base,cp2",
    ),
    Rule(
        "ratio",
        "log-probs hold and the ratio does not: its level, its clamps (log_ratio_min, log_ratio_max), or a mask",
        at=("ratio",),
        holds=("log_probs", "old_log_probs"),
    ),
    # policy loss
    Rule(
        "clip-sides",
        "lower and upper bound of the clip range are exchanged: algorithm.clip_low and clip_high",
        at=("policy_loss",),
        what="sides swapped",
    ),
    Rule(
        "clip-left-out",
        "the ratio is not clipped",
        at=("policy_loss",),
        what="without a clip",
    ),
    Rule(
        "clip-alone",
        "the clipped term alone, without the minimum: it has no gradient where it should be pessimistic",
        at=("policy_loss",),
        what="the clipped term alone",
    ),
    Rule(
        "minimum-before-advantage",
        "the minimum is taken before the advantage is multiplied: it is pessimistic for positive advantages only",
        at=("policy_loss",),
        what="minimum taken before the advantage",
    ),
    Rule(
        "maximum-for-minimum",
        "the larger of the two terms is taken: the sign of the loss was turned, and the minimum was not",
        at=("policy_loss",),
        what="maximum in place of the minimum",
    ),
    Rule(
        "loss-without-ratio",
        "plain policy gradients: the ratio does not enter the loss",
        at=("policy_loss",),
        what="without a ratio|plain policy gradients",
    ),
    Rule(
        "sampler-weights-not-applied",
        "the policy loss is not multiplied by the sampler's weights",
        at=("policy_loss",),
        what="without the sampler's weights",
        look="sampler_weights",
    ),
    Rule(
        "clip-range",
        "only tokens at the clip are off: another clip range (algorithm.clip_low, clip_high, clip_bounds), "
        "or delta and "
        "dual_clip",
        at=("policy_loss",),
        any_of=("class:clipped", "class:clipped_negative", "class:clipped_positive", "class:stopped"),
    ),
    Rule(
        "one-sign",
        "only advantages of one sign are off: a cap for negative ones (dual_clip, delta), or a filter of samples",
        at=("policy_loss", "token_loss"),
        any_of=("class:negative", "class:positive"),
    ),
    Rule(
        "loss-sign",
        "the sign of the loss is turned: it is maximized",
        at=("policy_loss", "token_loss", "loss"),
        patterns=("sign",),
    ),
    Rule(
        "policy-loss",
        "ratios and advantages hold and the policy loss does not: algorithm.loss and its constants",
        at=("policy_loss",),
        holds=("ratio", "advantages"),
    ),
    # all terms, and their sum
    Rule(
        "coefficient",
        "another coefficient of the KL or of the entropy: algorithm.kl_coef, algorithm.entropy_coef",
        at=("token_loss",),
        patterns=("fitted",),
        holds=("policy_loss",),
    ),
    Rule(
        "term-left-out",
        "a term of the loss is left out, added twice, or has the wrong sign: KL is added, the entropy bonus taken off",
        at=("token_loss",),
        what="the policy loss alone|the loss without its|term reversed|term twice",
    ),
    Rule(
        "token-loss",
        "the policy loss holds and the whole does not: coefficients of KL and entropy, or the entropy of other logits",
        at=("token_loss", "entropy_loss"),
        holds=("policy_loss",),
    ),
    Rule(
        "loss-scale",
        "the loss is multiplied by a number: a denominator, a loss scale, or an accumulation that divides twice",
        at=("loss",),
        patterns=("scaled",),
        holds=("token_loss", "weights"),
    ),
    Rule(
        "loss-sum",
        "terms and weights hold, and their sum does not: another denominator, tokens that are left out of "
        "the sum, or a "
        "missing reduction over an axis",
        at=("loss",),
        holds=("token_loss", "weights"),
        variants="base,mbs4",
    ),
    Rule(
        "equal-log-probs-other-loss",
        "log-probs are equal and the loss is not: its mask, denominator, advantages, coefficients of KL and entropy, "
        "or a temperature other than that of the log-probs; record is_loss_debug (tap_batch) to see which",
        at=("loss",),
        when=lambda divergence, _: "token_loss" in divergence.unjudged,
        look="is_loss_debug",
    ),
    Rule(
        OF_GOLDEN,
        "every golden value holds, and what must always be true does not: the golden values were recorded "
        "from the same "
        "fault",
        at=("invariants",),
        when=lambda divergence, _: not divergence.downstream and not divergence.independent,
    ),
    Rule(
        "invariant",
        "what must be true of every update is not, whatever was recorded",
        at=("invariants",),
    ),
)
