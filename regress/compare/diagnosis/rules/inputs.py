"""Rules for missing records, model inputs, rewards, advantages and weights."""

from __future__ import annotations

from regress.compare.diagnosis.divergence import Divergence
from regress.compare.diagnosis.rule import Rule
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.quantities import QUANTITIES, UPDATE_STAGES
from regress.compare.verdicts.verdict import Status


def _parallel(divergence: Divergence, scene: RunContext) -> bool:
    return (scene.world_size or 1) > 1


def _of_tokens(divergence: Divergence, scene: RunContext) -> bool:
    """Its places are tokens, which a layout moves."""
    return divergence.first.quantity not in (*UPDATE_STAGES, "grad_norm", "loss")


def _no_factor(divergence: Divergence) -> bool:
    return not any(p.id.startswith(("scaled", "zero", "sign", "rounded")) for p in divergence.patterns)


def _mixed_groups(divergence: Divergence, scene: RunContext) -> bool:
    """Return True for large errors without a common factor: other samples were compared with each other."""
    return _no_factor(divergence) and divergence.first.relative > MUCH


def _nearly_right(divergence: Divergence, scene: RunContext) -> bool:
    """Return True for small errors without a common factor."""
    return _no_factor(divergence) and divergence.first.relative < LITTLE


MUCH, LITTLE = 0.05, 0.01
"""Shares of the largest value: other rewards change advantages by far more, an epsilon by far less."""


COMPUTED = tuple(
    quantity.name
    for quantity in QUANTITIES
    if not quantity.exact and quantity.name not in ("advantages", "weights", "other")
)
"""Quantities that the model's dtype rounds."""


def _as_much_as_rounding(divergence: Divergence, scene: RunContext) -> bool:
    """Return True for errors that are no larger than a half-precision model may make."""
    return divergence.first.relative <= 0.5


INPUTS: tuple[Rule, ...] = (
    # records
    Rule(
        "shape",
        "the tensors are of other shapes: another padding strategy (batching.layout, pad_to), another maximum length, "
        "or another split into microbatches",
        status=(Status.SHAPE,),
        when=_of_tokens,
        variants="base,pad8",
    ),
    Rule(
        "shape-of-a-whole-tensor",
        "a tensor of the model is of another shape: another model, a transposed weight, or a part of it that has no "
        "shard layout",
        at=(*UPDATE_STAGES,),
        status=(Status.SHAPE,),
    ),
    Rule(
        "dtype",
        "it was computed or stored in another dtype: mixed precision, autocast, or a cast before the tap",
        status=(Status.DTYPE,),
    ),
    Rule(
        "precision",
        "the two runs compute in other dtypes, so that they differ by the rounding of the coarser one: model.dtype, "
        "parallel.fsdp_param_dtype, autocast",
        at=COMPUTED,
        patterns=("precision",),
        when=_as_much_as_rounding,
    ),
    Rule(
        "not-recorded",
        "the stage is in one dump only: turn on debug.enable_data_dump and debug.dump_options of that stage, and look "
        "at debug.dump_every_n_steps; of a weaver trainer set WEAVER_DEBUG_DUMP_ENABLED, WEAVER_DEBUG_DUMP_DIR, "
        "WEAVER_DEBUG_DUMP_EVERY_N and WEAVER_DEBUG_DUMP_OPTIONS; or its folder was deleted or not copied",
        status=(Status.MISSING, Status.EXTRA),
        says="recorded in the (golden|actual) dump only|was not recorded|nothing of this name was recorded|"
        "no record of this microbatch",
    ),
    Rule(
        "records-lost",
        "files of the actual dump are missing: deleted, not copied, not turned on (debug.dump_options; "
        "WEAVER_DEBUG_DUMP_OPTIONS of a weaver trainer), or never written by a rank that ended early or dumps into "
        "another folder (debug.dump_dir, WEAVER_DEBUG_DUMP_DIR); or the run has fewer ranks or microbatches",
        at=("coverage",),
        status=(Status.MISSING, Status.COVERAGE),
        says="is in the golden dump only|was produced by no microbatch|has none",
        when=lambda _, scene: bool(scene.absent),
        of_records=True,
    ),
    Rule(
        "other-samples",
        "the dumps hold other samples: another batch or seed, samples that one run filtered or left out, or records "
        "without the token ids that samples are matched by (forward_data, batch_inputs or trajectory)",
        at=("coverage",),
        status=(Status.MISSING, Status.EXTRA),
        says="sample .* is in the (golden|actual) dump only",
        when=lambda _, scene: not scene.absent,
    ),
    Rule(
        "part-not-held",
        "a part of the model is on no rank: layers counted without the offset of the stage, or a shard left out",
        status=(Status.MISSING, Status.COVERAGE),
        at=("coverage",),
        says="no rank holds",
        variants="base,pp2",
    ),
    Rule(
        "batch-left-out",
        "samples are not computed at all: the last, incomplete microbatch is dropped, or a rank reads the samples of "
        "another",
        at=("coverage",),
        says="was produced by no microbatch",
        when=lambda _, scene: not scene.absent,
        variants="base,mbs4,dp2",
    ),
    Rule(
        "batch-twice",
        "samples are computed more than once: one seed or one position in the data for all ranks, or padding copies "
        "that count",
        at=("coverage",),
        says="was produced (twice|[0-9]+ times)",
        variants="base,dp2",
    ),
    Rule(
        "recorded-twice",
        "several updates or epochs write into one file, and the last of them survives: record the update's number",
        at=("coverage",),
        says="was recorded [0-9]+ times",
    ),
    Rule(
        "not-planned",
        "the run makes other microbatches, or has other ranks, than its configuration says",
        status=(Status.EXTRA,),
        says="not part of the plan",
    ),
    Rule(
        "trained-in-one",
        "the parameter is trained in one of the runs and frozen in the other (requires_grad, the base model below an "
        "adapter, the optimizer's groups), or debug.target_param_pattern chooses it in one only",
        at=("gradient",),
        status=(Status.MISSING, Status.EXTRA),
        says="no golden of this name|only in the (golden|actual) dump",
    ),
    Rule(
        "new-tensor",
        "it is recorded now and was not when the golden values were: accept it with --update-golden, or tap less",
        status=(Status.EXTRA,),
        says="no golden of this name",
        when=lambda found, _: found.first.quantity != "gradient",
    ),
    Rule(
        "unknown-tensor",
        "a tap records a tensor under a name that belongs to no quantity",
        status=(Status.EXTRA,),
        says="belongs to no quantity",
    ),
    Rule(
        "other-rollouts",
        "these are not the recorded rollouts: another trajectory file, another tokenizer, or rollouts that "
        "were sampled "
        "again (rollout_worker.need_llm_inference, seed)",
        at=("trajectory",),
    ),
    Rule(
        "nan-padding",
        "what is computed at padding is not finite: rows without any visible token, or memory that nobody wrote; it "
        "spreads as soon as something sums over it",
        status=(Status.NONFINITE,),
        patterns=("nonfinite_padding",),
    ),
    Rule(
        "nan",
        "the first value that is not finite arises here: an overflow in half precision, a division by a deviation or a "
        "count of zero, or a softmax over nothing",
        status=(Status.NONFINITE,),
        patterns=("nonfinite",),
    ),
    # inputs of the model
    Rule(
        "position-columns",
        "position ids count the columns of the row: they do not begin again with each sample, or count left padding",
        at=("batch_inputs",),
        tensor="position_ids",
        patterns=("columns",),
        variants="base,packed,left",
    ),
    Rule(
        "position-offset",
        "position ids begin at another number, such as 1, or at that of a rank's first column",
        at=("batch_inputs",),
        tensor="position_ids",
        any_of=("offset", "shifted"),
        variants="base,cp2",
    ),
    Rule(
        "position-ids",
        "position ids are wrong where samples are packed, padded or split",
        at=("batch_inputs",),
        tensor="position_ids",
        variants="base,packed,left",
    ),
    Rule(
        "inputs-shifted",
        "inputs and labels are shifted against each other: shifted twice, or not at all",
        at=("batch_inputs",),
        patterns=("shifted",),
    ),
    Rule(
        "tool-tokens",
        "tokens that a tool wrote are trained on: the loss mask is taken from the end of the prompt on",
        at=("batch_inputs",),
        tensor="response_mask|effective_valid",
        patterns=("class:tool",),
        look="trajectory",
    ),
    Rule(
        "prompt-tokens",
        "tokens of the prompt are trained on: the mask of the response begins too early",
        at=("batch_inputs",),
        tensor="response_mask|effective_valid",
        patterns=("class:prompt",),
        look="trajectory",
    ),
    Rule(
        "last-token-masked",
        "the last token is left out of the loss, counts where it must not, or counts more than once: the end token "
        "taken for padding, since they share an id, or a mask that is shifted",
        at=("batch_inputs", "weights"),
        any_of=("class:end", "class:last_trained"),
        look="batch_inputs",
    ),
    Rule(
        "attention-mask",
        "the attention mask does not say where padding is: another side, or a token of the text with the id of padding",
        at=("batch_inputs",),
        tensor="attention_mask",
        variants="base,left",
    ),
    Rule(
        "other-tokens",
        "other token ids than recorded: decoded and encoded again, another chat template, or samples in another order",
        at=("batch_inputs",),
        tensor="input_ids",
    ),
    # rewards to advantages
    Rule(
        "deviation-ddof",
        "the standard deviation of a group is taken over N in place of N - 1 samples, or the reverse: algorithm.ddof",
        at=("advantages",),
        patterns=("scaled:ddof",),
    ),
    Rule(
        "advantage-scale",
        "advantages are normalized otherwise: algorithm.scale (group, batch, none), algorithm.eps, or a deviation of "
        "other samples",
        at=("advantages",),
        patterns=("scaled",),
        without=("scaled:ddof",),
    ),
    Rule(
        "advantage-sign",
        "the baseline is taken from the wrong side: baseline minus reward",
        at=("advantages",),
        patterns=("sign",),
    ),
    Rule(
        "advantage-zero",
        "no advantage at all: each sample is a group of its own, rewards are not passed on, or a filter drops them",
        at=("advantages",),
        any_of=("zero",),
        look="trajectory",
    ),
    Rule(
        "advantage-offset",
        "the mean of the group is not, or of other samples, taken off: a baseline that leaves samples out",
        at=("advantages",),
        any_of=("offset",),
    ),
    Rule(
        "advantage-epsilon",
        "each group is off by a little, and by another factor: what is added to its deviation (algorithm.eps), or "
        "statistics in a lower precision",
        at=("advantages",),
        when=_nearly_right,
        look="trajectory",
    ),
    Rule(
        "advantage-groups",
        "advantages are normalized otherwise: by statistics of other samples than the group's own (the whole batch, "
        "another group, the part of the group on each rank), with another constant beside the deviation "
        "(algorithm.eps), or they are changed afterwards (a limit, a sign)",
        at=("advantages",),
        when=_mixed_groups,
        variants="base,dp2-dealt",
        look="trajectory",
    ),
    Rule(
        "advantage-of-a-rank",
        "statistics are taken over the samples of one rank: a group whose samples lie on several must be "
        "gathered first",
        at=("advantages",),
        any_of=("rank", "mesh:*"),
        when=_parallel,
        variants="base,dp2-dealt",
    ),
    # weights
    Rule(
        "weights-world-size",
        "the denominator is counted on one rank while the gradient is summed over ranks, or divided by their number "
        "once too often",
        at=("weights", "loss", "token_loss", "policy_loss"),
        any_of=("scaled:world_size", "scaled:mesh_*"),
        variants="base,dp2",
        look="weights",
    ),
    Rule(
        "weights-microbatches",
        "each microbatch is divided by the number of microbatches once too often (or never): accumulation divides, "
        "and the weights hold the denominator already",
        at=("weights", "loss"),
        any_of=("scaled:micros",),
        variants="base,mbs4",
        look="weights",
    ),
    Rule(
        "mean-of-means",
        "denominators are counted in each microbatch or on each rank, and then averaged: algorithm.denominator_scope "
        "must be global",
        at=("weights",),
        patterns=("factors",),
        variants="base,mbs4,dp2",
    ),
    Rule(
        "weights-denominator",
        "another denominator: algorithm.aggregation (token-mean, seq-mean-token-mean, ...), norm_length, or the tokens "
        "that are counted in it",
        at=("weights",),
        variants="base,mbs4",
    ),
)
