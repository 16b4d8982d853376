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
        ("dapo", "cispo") if at > RESUMABLE else ("*",),
        at,
        before or {},
        True,
    )


RESUMABLE = 2
"""Updates that every case makes at least, with one more after them."""


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
        cases=("dense", "gpt2"),
    ),
    Variant("pad8", "columns that hold no token", _batching(pad_to_multiple_of=8), cases=("gpt2",)),
    Variant("pad64", "rows far longer than the samples", _batching(pad_to_length=64), cases=("moe",)),
    Variant(
        "pad60-pad8",
        "a least length that is no multiple",
        _batching(pad_to_length=60, pad_to_multiple_of=8),
        cases=("gpt2",),
        combines=True,
    ),
    Variant("left-pad8", "both", _batching(padding_side="left", pad_to_multiple_of=8), cases=("gpt2",)),
    # gradient accumulation
    Variant(
        "mbs1",
        "one sample a microbatch: no padding at all",
        _batching(micro_batch_size=1),
        cases=("gpt2",),
    ),
    Variant(
        "mbs3",
        "a last microbatch that is smaller",
        _batching(micro_batch_size=3),
        cases=("dr_grpo", "cispo"),
    ),
    Variant(
        "mbs4",
        "denominators of the mini-batch, not of the microbatch",
        _batching(micro_batch_size=4),
        BOTH,
        cases=("dr_grpo", "gspo"),
    ),
    Variant(
        "left-mbs3",
        "left padding of unequal width",
        _batching(padding_side="left", micro_batch_size=3),
        cases=("tools", "gpt2", "hybrid"),
    ),
    # packing
    Variant(
        "packed",
        "attention and positions across sample boundaries",
        _batching(**PACKED),
        BOTH,
        cases=("dense", "gpt2", "tools", "hybrid"),
    ),
    Variant(
        "packed-pad16",
        "padding after the last sample",
        _batching(**PACKED, pad_to_multiple_of=16),
        cases=("moe",),
    ),
    Variant(
        "packed-mbs3",
        "several packed rows",
        _batching(**PACKED, micro_batch_size=3),
        cases=("gpt2", "cispo"),
    ),
    Variant(
        "varlen",
        "attention that never sees another sample",
        {**_batching(**PACKED), "model.attn_implementation": "varlen"},
        BOTH,
        cases=("gpt2",),
    ),
    Variant(
        "varlen-mbs4",
        "the same with heads that share keys",
        {**_batching(**PACKED, micro_batch_size=4), "model.attn_implementation": "varlen"},
        BOTH,
        cases=("dense",),
    ),
    # dynamic batches
    Variant(
        "dynamic",
        "microbatches of unequal numbers of samples",
        _batching(max_tokens_per_microbatch=96),
        cases=("dr_grpo", "tools"),
    ),
    Variant(
        "packed-dynamic",
        "token budgets and packing",
        _batching(**PACKED, max_tokens_per_microbatch=48),
        BOTH,
        cases=("dense",),
    ),
    # row order
    Variant(
        "reversed",
        "samples told apart by their row",
        _batching(row_order="reversed", micro_batch_size=5),
        cases=("dapo", "gspo"),
    ),
    Variant(
        "longest-first",
        "samples sorted into microbatches by length",
        _batching(row_order="longest_first", max_tokens_per_microbatch=96),
        cases=("dr_grpo",),
    ),
    Variant(
        "packed-shortest-first",
        "sorting and packing",
        _batching(**PACKED, row_order="shortest_first", max_tokens_per_microbatch=48),
        cases=("moe",),
    ),
    Variant(
        "packed-longest-first",
        "the longest rows first",
        _batching(**PACKED, row_order="longest_first", max_tokens_per_microbatch=48),
        cases=("dr_grpo",),
        combines=True,
    ),
    Variant(
        "packed-reversed",
        "rows that end with the first samples",
        _batching(**PACKED, row_order="reversed", micro_batch_size=5),
        cases=("dense",),
        combines=True,
    ),
    # kernels and memory
    Variant(
        "eager",
        "attention with an additive mask",
        {"model.attn_implementation": "eager"},
        EVERY,
        cases=("moe",),
    ),
    Variant(
        "packed-eager",
        "the same on packed rows",
        {**_batching(**PACKED), "model.attn_implementation": "eager"},
        cases=("gpt2", "tied"),
    ),
    Variant(
        "checkpointing",
        "activations computed twice",
        {"model.gradient_checkpointing": True},
        (*SEMANTICS, Precision.BITWISE),
        twin="base",
        cases=("dense", "moe"),
    ),
    Variant(
        "chunked",
        "log-probs of a few tokens at a time",
        _batching(log_prob_chunk_size=7),
        BOTH,
        cases=("dense", "tied"),
    ),
    Variant(
        "packed-chunked-mbs4",
        "chunks that end inside a microbatch",
        _batching(**PACKED, log_prob_chunk_size=16, micro_batch_size=4),
        cases=("dr_grpo",),
    ),
    Variant(
        "vocab8",
        "softmax of a vocabulary larger than a piece, rows that are more than a block",
        _batching(vocab_chunk_size=8, softmax_block_size=64),
        EVERY,
        cases=("dr_grpo", "dense"),
    ),
    Variant(
        "chunked-vocab8",
        "both kinds of chunks",
        _batching(log_prob_chunk_size=7, vocab_chunk_size=8, softmax_block_size=64),
        cases=("kl_cov", "tied"),
    ),
    Variant(
        "threads2",
        "sums split over two threads",
        {"threads": 2},
        BOTH,
        cases=("gpt2",),
    ),
    # torch.compile
    Variant(
        "compiled",
        "fused kernels in other orders of arithmetic",
        {"model.compile": "inductor"},
        BOTH,
        cases=("dense",),
    ),
    Variant(
        "traced",
        "the graphs of torch.compile, run by eager kernels",
        {"model.compile": "aot_eager", **_batching(**PACKED, micro_batch_size=4)},
        cases=("gpt2",),
    ),
    # optimizer implementations
    Variant(
        "adamw-for-loop",
        "the plain update",
        {"optimizer.implementation": "for_loop"},
        cases=("tied", "on_policy"),
    ),
    Variant(
        "adamw-foreach",
        "many tensors at once",
        {"optimizer.implementation": "foreach"},
        (*SEMANTICS, Precision.BITWISE),
        twin="adamw-for-loop",
        cases=("tied", "on_policy"),
    ),
    Variant(
        "adamw-fused",
        "one kernel",
        {"optimizer.implementation": "fused"},
        BOTH,
        cases=("dense", "on_policy"),
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
        ("tools",),
        "base",
        program=True,
    ),
    Variant(
        "tracking-on",
        "a tracker that changes or stops the training",
        {"tracking.trackers": ["tensorboard"]},
        (Precision.BITWISE,),
        ("dense",),
        "base",
        program=True,
    ),
    Variant(
        "curriculum",
        "a stage that the program chooses by its own evaluations although a recording has gone elsewhere",
        CURRICULUM,
        (Precision.BITWISE,),
        ("dense",),
        "base",
        program=True,
    ),
    Variant(
        "resume-at2-curriculum",
        "the stage of a step after a resume",
        CURRICULUM,
        (Precision.BITWISE,),
        ("tools",),
        "base",
        resume_at=2,
        before=CURRICULUM,
        program=True,
    ),
    # two processes: everything that the second one needs is in the checkpoint
    _resumed(2, "state of the optimizer lost between two processes", "dense"),
    _resumed(3, "log-probs and advantages of an unfinished step computed again", "dapo"),
    _resumed(
        3,
        "an unfinished step laid out over other ranks",
        "cispo",
        name="-dp2-to-tp2",
        overrides={"parallel.tp": 2},
        before={"parallel.dp": 2},
    ),
    _resumed(
        2,
        "shards of the optimizer put together and split otherwise",
        "dense",
        name="-fsdp2-to-pp2",
        overrides={"parallel.pp": 2},
        before={"parallel.fsdp": 2},
    ),
    _resumed(2, "whole parameters split", "tied", name="-to-cp2", overrides={"parallel.cp": 2}),
    _resumed(2, "shards of experts put together", "moe", name="-from-ep2", before={"parallel.ep": 2}),
)
"""Variants on one process, by name."""
