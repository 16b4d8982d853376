"""Rules for gradients, their norm, the optimizer, parameters, and values that ranks share."""

from __future__ import annotations

from regress.compare.diagnosis.divergence import Divergence
from regress.compare.diagnosis.rule import Rule
from regress.compare.diagnosis.run_context import RunContext


def _several_micros(divergence: Divergence, scene: RunContext) -> bool:
    return (scene.micros or 1) > 1


def _several_ranks(divergence: Divergence, scene: RunContext) -> bool:
    return (scene.world_size or 1) > 1


_TOKEN_GRADIENTS = ("token_gradient", "entropy_gradient", "logit_gradient")


def _all(divergence: Divergence, scene: RunContext) -> bool:
    """Return True if nearly all tensors fail: the fault is common to all modules."""
    wrong, judged = divergence.broken
    return judged > 2 and wrong >= 0.9 * judged


def _backward(divergence: Divergence, scene: RunContext) -> bool:
    """Return True if a gradient behind it holds: the fault begins within the backward pass."""
    return any(held.startswith("gradient ") for held in divergence.held)


def _few_without_gradients(divergence: Divergence, scene: RunContext) -> bool:
    """Return True if few elements are off, and neither gradients nor states were judged before them."""
    first = divergence.first
    return 10 * first.over <= first.count and not {"gradient", "optimizer"} & {*divergence.held}


UPDATE: tuple[Rule, ...] = (
    Rule(
        "undecided-update",
        "few elements are off, and nothing tells what they were made of: rounding of gradients that are nearly zero, "
        "which AdamW divides by their own size, or a fault of the update; record gradient or optimizer of every update "
        "(debug.dump_options)",
        at=("param",),
        when=_few_without_gradients,
        look="gradient",
    ),
    # gradients
    Rule(
        "gradient-averaged-over-ranks",
        "gradients are averaged where shares of the loss must be summed (or summed where they must be averaged): the "
        "factor is the number of ranks",
        at=("gradient",),
        any_of=("scaled:world_size", "scaled:mesh_*"),
        variants="base,dp2,fsdp2",
    ),
    Rule(
        "gradient-divided-by-microbatches",
        "accumulation divides by the number of microbatches once too often, or never: the weights hold the denominator",
        at=("gradient",),
        any_of=("scaled:micros",),
        variants="base,mbs4",
    ),
    Rule(
        "gradient-power-of-two",
        "gradients are off by a power of two: a loss scale that is not taken off, or a sum that is taken twice",
        at=("gradient",),
        patterns=("scaled:power_of_two",),
        without=("scaled:world_size", "scaled:micros", "scaled:mesh_*"),
    ),
    Rule(
        "gradient-scale",
        "all gradients are multiplied by one number: a loss scale, a denominator, or a clip before they were recorded",
        at=("gradient",),
        patterns=("scaled",),
        without=("scaled:*", "names:*"),
    ),
    Rule(
        "gradient-sign",
        "gradients point the other way: the loss is maximized",
        at=("gradient",),
        patterns=("sign",),
    ),
    Rule(
        "gradient-zero",
        "no gradient arrives: detached, frozen, or zeroed after the backward pass",
        at=("gradient",),
        patterns=("zero",),
    ),
    Rule(
        "norms-not-summed",
        "gradients of norms are not summed over the ranks that see a part of the tokens each (sequence parallelism)",
        at=("gradient",),
        any_of=("names:norms", "names:norms of heads", "names:norms of hidden states"),
        when=_several_ranks,
        variants="base,tp2,tp2-sp",
    ),
    Rule(
        "experts-reduced",
        "gradients of experts are reduced over the wrong group, or multiplied by the number of ranks that "
        "share experts",
        at=("gradient",),
        any_of=("names:experts", "expert"),
        variants="base,ep2",
    ),
    Rule(
        "router-gradient",
        "the router has no gradient, or only that of a part of the tokens",
        at=("gradient",),
        patterns=("names:routers",),
        variants="base,ep2,tp2-sp",
    ),
    Rule(
        "tied-embeddings",
        "gradients of tied embeddings: the copies on first and last stage are not summed, summed twice, or untied",
        at=("gradient",),
        any_of=(
            "names:embeddings",
            "names:embeddings and the output projection",
            "names:the output projection",
        ),
        variants="base,pp2,tp2",
    ),
    Rule(
        "not-reduced",
        "some ranks alone have wrong gradients: they were not reduced, a rank stayed away from the sum, or "
        "its buffer was "
        "not empty",
        at=("gradient",),
        any_of=("rank", "mesh:*"),
        variants="base,dp2",
    ),
    Rule(
        "gradient-dtype",
        "gradients are accumulated or reduced in half precision: their values fit into the narrower dtype",
        at=("gradient",),
        patterns=("rounded",),
    ),
    Rule(
        "gradient-of-one-layer",
        "the gradients of one layer alone are off: a hook, a freeze or a scale on that layer",
        at=("gradient",),
        patterns=("layer",),
    ),
    Rule(
        "gradient-of-one-tensor",
        "the gradient of one tensor alone is off: a hook or a scale on it, or a part of its gradient that is not added",
        at=("gradient",),
        when=lambda divergence, _: divergence.broken[0] == 1 < divergence.broken[1],
    ),
    Rule(
        "backward-of-a-module",
        "the loss holds, and gradients are off from this module on backwards: its backward pass (a kernel, a "
        "collective "
        "without its gradient, a detach)",
        at=("gradient",),
        holds=("loss",),
        when=_backward,
        variants="base,eager",
    ),
    Rule(
        "accumulation",
        "the loss of every microbatch holds and all gradients are off: accumulation over microbatches (a "
        "buffer that is "
        "overwritten or zeroed, gradients clipped or summed in each microbatch)",
        at=("gradient",),
        holds=("loss", "token_gradient"),
        when=lambda d, s: _all(d, s) and _several_micros(d, s),
        without=("scaled",),
        variants="base,mbs4",
    ),
    Rule(
        "reduction",
        "the loss holds and all gradients are off, with several ranks: a sum over ranks that is left out, "
        "taken twice, or "
        "taken in every microbatch",
        at=("gradient",),
        holds=("loss", "token_gradient"),
        when=lambda d, s: _all(d, s) and _several_ranks(d, s),
        without=("scaled",),
        variants="base,dp2",
    ),
    Rule(
        "backward-or-accumulation",
        "the loss holds and all gradients are off: a term of the loss that is detached, the backward pass, or what "
        "becomes of gradients over microbatches and ranks; record token_gradient to see which",
        at=("gradient",),
        holds=("loss",),
        when=lambda d, s: _all(d, s) and not {*_TOKEN_GRADIENTS} & {*d.held},
        without=("scaled",),
        look="token_gradient",
    ),
    # the norm
    Rule(
        "norm-of-a-part",
        "gradients hold and their norm does not: each rank takes that of its own shard, counts what several ranks hold "
        "more than once, or leaves sharded parameters (experts) out",
        at=("grad_norm",),
        holds=("gradient",),
        when=_several_ranks,
        variants="base,fsdp2,tp2",
    ),
    Rule(
        "norm",
        "gradients hold and their norm does not: it is taken before the last of them was added, or after a clip",
        at=("grad_norm",),
        holds=("gradient",),
    ),
    # the optimizer
    Rule(
        "clip-of-gradients-left-out",
        "the gradient was not clipped before the update: optimizer.max_grad_norm",
        at=("optimizer",),
        what="not clipped",
    ),
    Rule(
        "clip-of-gradients",
        "the gradient that entered the update was multiplied by another number: another "
        "optimizer.max_grad_norm, a clip "
        "by the norm of a part, or one for each microbatch",
        at=("optimizer",),
        what="the state after the gradient times",
    ),
    Rule(
        "betas",
        "the moments decay otherwise: optimizer.betas",
        at=("optimizer",),
        what="a decay of",
    ),
    Rule(
        "step-counter",
        "the optimizer counts its updates otherwise: a synthetic first step to allocate its state, or a "
        "counter that was "
        "not restored; bias correction depends on it",
        at=("optimizer",),
        tensor="/step$",
    ),
    Rule(
        "no-update",
        "the state is that from before the update: the optimizer holds other parameters than the model (built before "
        "they were wrapped), or its step was skipped",
        at=("optimizer", "param"),
        what="before this update|a gradient of zero|the weight decay alone",
    ),
    Rule(
        "state-of-a-rank",
        "some ranks alone have another optimizer state or parameter: a shard exchanged, not restored, or an "
        "update that "
        "is lost there",
        at=("optimizer", "param"),
        any_of=("rank", "mesh:*"),
        variants="base,fsdp2,dp2",
    ),
    Rule(
        "state-of-a-rank-unclipped",
        "gradients and their norm hold and the moments do not: clipping by another norm than the one reported, or "
        "something added to the gradient that enters them",
        at=("optimizer",),
        holds=("gradient", "grad_norm"),
    ),
    Rule(
        "weight-decay-in-the-gradient",
        "weight decay is added to the gradient, so that the moments hold it: L2 regularization in place of AdamW's "
        "decay",
        at=("optimizer",),
        what="the gradient plus its parameters times",
        holds=("gradient", "grad_norm"),
    ),
    Rule(
        "weight-decay",
        "another weight decay: optimizer.weight_decay, or decay of norms and biases that should have none "
        "(or the reverse)",
        at=("param",),
        what="weight decay (twice|of)|without weight decay",
    ),
    Rule(
        "optimizer-eps",
        "eps is added elsewhere: inside of the bias correction of the second moment, not beside it",
        at=("param",),
        what="eps inside",
    ),
    Rule(
        "bias-correction",
        "moments are not corrected for their bias, or for another number of updates",
        at=("param",),
        what="bias correction$|one ahead|one behind",
    ),
    Rule(
        "update-sign",
        "the update goes uphill, or is made twice",
        at=("param",),
        what="update twice|its sign reversed",
    ),
    Rule(
        "learning-rate",
        "another learning rate: optimizer.learning_rate, its schedule stepped per microbatch or per rank, or a warm-up",
        at=("param",),
        what="the golden update times",
    ),
    Rule(
        "param-dtype",
        "parameters are kept or updated in half precision: no master weights",
        at=("param",),
        patterns=("rounded",),
    ),
    Rule(
        "optimizer-settings",
        "the optimizer's state holds and parameters do not: weight decay, eps, learning rate or bias correction",
        at=("param",),
        holds=("optimizer",),
    ),
    Rule(
        "replicas-drift",
        "ranks that must hold the same drift apart, by less than the tolerance so far: weights that were not "
        "broadcast, "
        "or a sum whose order depends on the rank",
        at=("replicas",),
        variants="base,dp2,tp2",
    ),
)
