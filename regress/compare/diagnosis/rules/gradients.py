"""Rules for the gradient of the loss by log-probs, entropies and logits: detached, missing or scaled parts."""

from __future__ import annotations

from regress.compare.diagnosis.divergence import Divergence
from regress.compare.diagnosis.rule import Rule
from regress.compare.diagnosis.run_context import RunContext

_BY_TOKEN = ("token_gradient", "entropy_gradient")


def _of_samples_in_parts(divergence: Divergence, scene: RunContext) -> bool:
    """Return True if ratios are those of samples whose tokens lie on several ranks."""
    level = scene.setting("algorithm", "importance_level")
    return scene.mesh.get("cp", 1) > 1 and level in ("sequence", "sequence_product")


GRADIENTS: tuple[Rule, ...] = (
    # one number for all tokens
    Rule(
        "token-gradient-of-ranks",
        "the loss is multiplied or divided by the number of ranks on its way into the backward pass: a "
        "missing or doubled average over ranks",
        at=_BY_TOKEN,
        any_of=("scaled:world_size", "scaled:mesh_*"),
        variants="base,dp2,dp2-ddp",
    ),
    Rule(
        "token-gradient-of-microbatches",
        "the loss is divided by the number of microbatches on its way into the backward pass once too often, or never: "
        "the weights hold the denominator",
        at=_BY_TOKEN,
        any_of=("scaled:micros",),
        variants="base,mbs4",
    ),
    Rule(
        "token-gradient-power-of-two",
        "the loss enters the backward pass times a power of two: a loss scale that is not taken off, or a term that is "
        "added twice",
        at=_BY_TOKEN,
        patterns=("scaled:power_of_two",),
        without=("scaled:world_size", "scaled:micros", "scaled:mesh_*"),
    ),
    Rule(
        "token-gradient-scale",
        "the loss enters the backward pass times one number: a loss scale, a coefficient, or another denominator",
        at=_BY_TOKEN,
        patterns=("scaled",),
        without=("scaled:*",),
    ),
    Rule(
        "token-gradient-denominators",
        "each microbatch or rank enters the backward pass with a factor of its own: its own denominator in place of "
        "that of the mini-batch",
        at=_BY_TOKEN,
        patterns=("factors",),
        variants="base,mbs4",
    ),
    Rule(
        "token-gradient-sign",
        "the loss enters the backward pass with its sign turned: it is maximized",
        at=("token_gradient",),
        patterns=("sign",),
    ),
    Rule(
        "loss-detached",
        "no gradient reaches the log-probs: the loss is detached, or the ratio has none because old log-probs are not "
        "detached",
        at=("token_gradient",),
        patterns=("zero",),
        holds=("token_loss",),
    ),
    # the KL term
    Rule(
        "kl-detached",
        "the KL term is detached: it enters the loss, and no gradient comes back from it",
        at=("token_gradient",),
        what="the gradient without that of its KL term",
    ),
    Rule(
        "policy-loss-detached",
        "the gradient is that of the KL term alone: the policy loss is detached, or the ratio has no gradient because "
        "old log-probs are not detached",
        at=("token_gradient",),
        what="the gradient of the KL term alone",
    ),
    Rule(
        "kl-gradient",
        "the KL term enters the loss as it should, and its gradient does not: another coefficient, its sign, or added "
        "twice in the backward pass",
        at=("token_gradient",),
        what="its KL term (reversed|twice)|a loss with kl_coef",
    ),
    Rule(
        "kl-gradient-estimator",
        "the gradient of the KL term is that of another estimator than its value",
        at=("token_gradient",),
        what="the gradient of the estimator",
    ),
    # the policy loss
    Rule(
        "gradient-through-the-clip",
        "the gradient goes through the clip: clipped tokens must have none (a clamp whose backward pass lets it pass)",
        at=("token_gradient",),
        what="the gradient of the loss without a clip",
    ),
    Rule(
        "clip-stops-too-much",
        "the gradient stops at every ratio beyond the clip range: the minimum is not taken, so tokens that "
        "should be pulled back are left",
        at=("token_gradient",),
        what="stops at every ratio beyond",
    ),
    Rule(
        "clip-gradient-side",
        "the gradient stops on the wrong side of the clip: the sign of the advantage, or the sides of the range "
        "(algorithm.clip_low, clip_high)",
        at=("token_gradient",),
        what="the wrong side of the clip|a clip range with its sides swapped",
    ),
    Rule(
        "clip-gradient",
        "only tokens at the clip have another gradient: which of them it stops",
        at=("token_gradient",),
        any_of=("class:clipped", "class:clipped_negative", "class:clipped_positive", "class:stopped"),
        holds=("token_loss",),
    ),
    Rule(
        "ratio-not-in-the-gradient",
        "the gradient is that of plain policy gradients: the ratio is detached, or divided by itself",
        at=("token_gradient",),
        what="the advantage without a ratio",
    ),
    Rule(
        "ratio-not-detached",
        "the clipped ratio is a weight and must be detached: its own gradient is added",
        at=("token_gradient",),
        what="that of the ratio, which is a weight",
    ),
    Rule(
        "ratio-gradient-level",
        "the gradient of a sample's ratio reaches other tokens than it should: algorithm.sequence_gradient "
        "(sequence, token)",
        at=("token_gradient",),
        what="own log-prob",
    ),
    Rule(
        "ratio-gradient-of-a-part",
        "the gradient of a sample's ratio is that of the tokens of one rank: the sum over the ranks that hold parts of "
        "the sample has no backward pass",
        at=("token_gradient",),
        holds=("token_loss",),
        when=_of_samples_in_parts,
        variants="base,cp2",
    ),
    Rule(
        "sampler-weights-not-detached",
        "the sampler's weights must be detached: their own gradient is added",
        at=("token_gradient",),
        what="with that of the sampler's weights",
    ),
    Rule(
        "sampler-weights-not-in-the-gradient",
        "the gradient lacks the sampler's weights",
        at=("token_gradient",),
        what="without the sampler's weights",
        look="sampler_weights",
    ),
    Rule(
        "weights-not-in-the-gradient",
        "the gradient is that of a sum of token losses: weights are not applied in the backward pass",
        at=("token_gradient",),
        what="a sum without weights",
        look="weights",
    ),
    Rule(
        "gradient-of-masked-tokens",
        "tokens that the loss mask leaves out have a gradient: a term of the loss (KL, entropy) or its sum does not "
        "apply the mask",
        at=_BY_TOKEN,
        any_of=("class:prompt", "class:tool"),
    ),
    # the entropy bonus
    Rule(
        "entropy-detached",
        "the entropy bonus is detached: it enters the loss, and no gradient comes back from it",
        at=("entropy_gradient",),
        patterns=("zero",),
    ),
    Rule(
        "entropy-gradient-sign",
        "the gradient of the entropy bonus has the wrong sign: the bonus is taken off the loss",
        at=("entropy_gradient",),
        patterns=("sign",),
    ),
    Rule(
        "entropy-gradient-coefficient",
        "the gradient of the entropy bonus is that of another coefficient: algorithm.entropy_coef",
        at=("entropy_gradient",),
        what="a loss with entropy_coef",
    ),
    Rule(
        "token-gradient",
        "the loss of every token holds and its gradient does not: a term that is detached and must not be, or keeps a "
        "gradient that it must not have (advantages, old log-probs, sampler weights), or a backward pass of its own",
        at=_BY_TOKEN,
        holds=("loss",),
    ),
    # from log-probs to logits
    Rule(
        "log-softmax-backward",
        "the gradients of log-probs hold and those of the logits do not: the backward pass of log-softmax "
        "lacks a part, or takes another target or temperature",
        at=("logit_gradient",),
        what="the gradient (without that of the (normalization|target)|not divided|of a softmax without|of the token)",
        holds=("token_gradient",),
    ),
    Rule(
        "entropy-backward",
        "the gradients of log-probs and entropies hold and those of the logits do not: the backward pass of "
        "the entropy",
        at=("logit_gradient",),
        what="entropy",
        holds=("token_gradient", "entropy_gradient"),
    ),
    Rule(
        "logit-gradient-scale",
        "the gradients of log-probs hold and those of the logits are multiplied by one number: the temperature, or a "
        "scale of the logits",
        at=("logit_gradient",),
        patterns=("scaled",),
        holds=("token_gradient",),
    ),
    Rule(
        "logit-gradient-shard",
        "the gradients of log-probs hold and those of the logits do not where the vocabulary is split: each rank needs "
        "the maximum and the sum of all parts, and no sum over ranks on the way back",
        at=("logit_gradient",),
        holds=("token_gradient",),
        when=lambda _, scene: scene.mesh.get("tp", 1) > 1,
        variants="base,tp2",
    ),
    Rule(
        "logit-gradient",
        "the gradients of log-probs hold and those of the logits do not: the backward pass of log-softmax or entropy "
        "(a fused kernel, a piece of the vocabulary or of the rows, its dtype)",
        at=("logit_gradient",),
        holds=("token_gradient",),
    ),
)
