"""Variants of this package: a row each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regress.replay.variants import BASE, BOTH, EVERY, SEMANTICS, Precision, Variant


def _rows(*variants: Variant) -> dict[str, Variant]:
    return {variant.name: variant for variant in variants}


def _resumed(
    at: int,
    why: str,
    *cases: str,
    name: str = "",
    overrides: Mapping[str, Any] | None = None,
    before: Mapping[str, Any] | None = None,
) -> Variant:
    """Return a variant that goes on from a checkpoint: bit for bit, unless the layout changes there."""
    same = overrides is None and before is None
    return Variant(
        f"resume-at{at}{name}",
        why,
        overrides or {},
        (Precision.BITWISE,) if same else SEMANTICS,
        cases,
        "base" if same else None,
        resume_at=at,
        before=before or {},
        program=True,
    )


def _batching(**values: Any) -> dict[str, Any]:
    return {f"batching.{key}": value for key, value in values.items()}


PACKED = {"layout": "packed"}

CURRICULUM = {
    "curriculum.enable": True,
    "evaluation.every_n_steps": 1,
    "rollout_worker.need_llm_inference": True,
}
"""Overrides of variants whose rollouts are retold as those of a curriculum, see `regress.replay.staged`."""

VARIANTS: Mapping[str, Variant] = _rows(
    BASE,
    # padding
    Variant(
        "left",
        "position ids and masks that count from the left",
        _batching(padding_side="left"),
        BOTH,
        cases=("@grpo", "@absolute", "@any"),
    ),
    Variant("pad8", "columns that hold no token", _batching(pad_to_multiple_of=8), cases=("@absolute",)),
    Variant("pad64", "rows far longer than the samples", _batching(pad_to_length=64), cases=("@experts",)),
    Variant(
        "pad60-pad8",
        "a least length that is no multiple",
        _batching(pad_to_length=60, pad_to_multiple_of=8),
        cases=("@absolute",),
        combines=True,
    ),
    Variant("left-pad8", "both", _batching(padding_side="left", pad_to_multiple_of=8), cases=("@absolute",)),
    # gradient accumulation
    Variant(
        "mbs1",
        "one sample a microbatch: no padding at all",
        _batching(micro_batch_size=1),
        cases=("@absolute",),
    ),
    Variant(
        "mbs3",
        "a last microbatch that is smaller",
        _batching(micro_batch_size=3),
        cases=("@sums", "@cispo", "@any"),
    ),
    Variant(
        "mbs4",
        "denominators of the mini-batch, not of the microbatch",
        _batching(micro_batch_size=4),
        BOTH,
        cases=("@sums", "@sequences"),
    ),
    Variant(
        "left-mbs3",
        "left padding of unequal width",
        _batching(padding_side="left", micro_batch_size=3),
        cases=("@turns", "@absolute", "@recurrent"),
    ),
    # packing
    Variant(
        "packed",
        "attention and positions across sample boundaries",
        _batching(**PACKED),
        BOTH,
        cases=("@grpo", "@absolute", "@turns", "@recurrent", "@any"),
    ),
    Variant(
        "packed-pad16",
        "padding after the last sample",
        _batching(**PACKED, pad_to_multiple_of=16),
        cases=("@experts",),
    ),
    Variant(
        "packed-mbs3",
        "several packed rows",
        _batching(**PACKED, micro_batch_size=3),
        cases=("@absolute", "@cispo", "@any"),
    ),
    Variant(
        "varlen",
        "attention that never sees another sample",
        {**_batching(**PACKED), "model.attn_implementation": "varlen"},
        BOTH,
        cases=("@absolute",),
    ),
    Variant(
        "varlen-mbs4",
        "the same with heads that share keys",
        {**_batching(**PACKED, micro_batch_size=4), "model.attn_implementation": "varlen"},
        BOTH,
        cases=("@grpo",),
    ),
    # dynamic batches
    Variant(
        "dynamic",
        "microbatches of unequal numbers of samples",
        _batching(max_tokens_per_microbatch=96),
        cases=("@sums", "@turns"),
    ),
    Variant(
        "packed-dynamic",
        "token budgets and packing",
        _batching(**PACKED, max_tokens_per_microbatch=48),
        BOTH,
        cases=("@grpo",),
    ),
    # row order
    Variant(
        "reversed",
        "samples told apart by their row",
        _batching(row_order="reversed", micro_batch_size=5),
        cases=("@reused", "@sequences"),
    ),
    Variant(
        "longest-first",
        "samples sorted into microbatches by length",
        _batching(row_order="longest_first", max_tokens_per_microbatch=96),
        cases=("@sums",),
    ),
    Variant(
        "packed-shortest-first",
        "sorting and packing",
        _batching(**PACKED, row_order="shortest_first", max_tokens_per_microbatch=48),
        cases=("@experts",),
    ),
    Variant(
        "packed-longest-first",
        "the longest rows first",
        _batching(**PACKED, row_order="longest_first", max_tokens_per_microbatch=48),
        cases=("@sums",),
        combines=True,
    ),
    Variant(
        "packed-reversed",
        "rows that end with the first samples",
        _batching(**PACKED, row_order="reversed", micro_batch_size=5),
        cases=("@grpo",),
        combines=True,
    ),
    # kernels and memory
    Variant(
        "eager",
        "attention with an additive mask",
        {"model.attn_implementation": "eager"},
        EVERY,
        cases=("@experts",),
    ),
    Variant(
        "packed-eager",
        "the same on packed rows",
        {**_batching(**PACKED), "model.attn_implementation": "eager"},
        cases=("@absolute", "@tied"),
    ),
    Variant(
        "checkpointing",
        "activations computed twice",
        {"model.gradient_checkpointing": True},
        (*SEMANTICS, Precision.BITWISE),
        twin="base",
        cases=("@grpo", "@experts"),
    ),
    Variant(
        "chunked",
        "log-probs of a few tokens at a time",
        _batching(log_prob_chunk_size=7),
        BOTH,
        cases=("@grpo", "@tied"),
    ),
    Variant(
        "packed-chunked-mbs4",
        "chunks that end inside a microbatch",
        _batching(**PACKED, log_prob_chunk_size=16, micro_batch_size=4),
        cases=("@sums",),
    ),
    Variant(
        "vocab8",
        "softmax of a vocabulary larger than a piece, rows that are more than a block",
        _batching(vocab_chunk_size=8, softmax_block_size=64),
        EVERY,
        cases=("@sums", "@grpo"),
    ),
    Variant(
        "chunked-vocab8",
        "both kinds of chunks",
        _batching(log_prob_chunk_size=7, vocab_chunk_size=8, softmax_block_size=64),
        cases=("@covariance", "@tied"),
    ),
    Variant(
        "threads2",
        "sums split over two threads",
        {"threads": 2},
        BOTH,
        cases=("@absolute",),
    ),
    # torch.compile
    Variant(
        "compiled",
        "fused kernels in other orders of arithmetic",
        {"model.compile": "inductor"},
        BOTH,
        cases=("@grpo",),
    ),
    Variant(
        "traced",
        "the graphs of torch.compile, run by eager kernels",
        {"model.compile": "aot_eager", **_batching(**PACKED, micro_batch_size=4)},
        cases=("@absolute",),
    ),
    # optimizer implementations
    Variant(
        "adamw-for-loop",
        "the plain update",
        {"optimizer.implementation": "for_loop"},
        cases=("@tied", "@current"),
    ),
    Variant(
        "adamw-foreach",
        "many tensors at once",
        {"optimizer.implementation": "foreach"},
        (*SEMANTICS, Precision.BITWISE),
        twin="adamw-for-loop",
        cases=("@tied", "@current"),
    ),
    Variant(
        "adamw-fused",
        "one kernel",
        {"optimizer.implementation": "fused"},
        BOTH,
        cases=("@grpo", "@current"),
    ),
    # the whole program: what goes on between the steps
    Variant(
        "eval-on",
        "evaluation that draws from the training's generator, or leaves the model changed",
        {
            "evaluation.every_n_steps": 1,
            "evaluation.samples_per_prompt": 2,
            "rollout_worker.need_llm_inference": True,
        },
        (Precision.BITWISE,),
        ("@turns",),
        "base",
        program=True,
    ),
    Variant(
        "tracking-on",
        "a tracker that changes or stops the training",
        {"tracking.trackers": ["tensorboard"]},
        (Precision.BITWISE,),
        ("@grpo",),
        "base",
        program=True,
    ),
    Variant(
        "curriculum",
        "a stage that the program chooses by its own evaluations although a recording has gone elsewhere",
        CURRICULUM,
        (Precision.BITWISE,),
        ("@grpo",),
        "base",
        program=True,
    ),
    Variant(
        "resume-at2-curriculum",
        "the stage of a step after a resume",
        CURRICULUM,
        (Precision.BITWISE,),
        ("@turns",),
        "base",
        resume_at=2,
        before=CURRICULUM,
        program=True,
    ),
    # two processes: everything that the second one needs is in the checkpoint
    _resumed(2, "state of the optimizer lost between two processes", "@grpo"),
    _resumed(3, "log-probs and advantages of an unfinished step computed again", "@reused"),
    _resumed(
        3,
        "an unfinished step laid out over other ranks",
        "@cispo",
        name="-dp2-to-tp2",
        overrides={"parallel.tp": 2},
        before={"parallel.dp": 2},
    ),
    _resumed(
        2,
        "shards of the optimizer put together and split otherwise",
        "@grpo",
        name="-fsdp2-to-pp2",
        overrides={"parallel.pp": 2},
        before={"parallel.fsdp": 2},
    ),
    _resumed(2, "whole parameters split", "@tied", name="-to-cp2", overrides={"parallel.cp": 2}),
    _resumed(2, "shards of experts put together", "@experts", name="-from-ep2", before={"parallel.ep": 2}),
)
"""Variants on one process, by name."""
