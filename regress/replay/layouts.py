"""Variants on several ranks. Their names spell out their overrides, see `regress.replay.parts`.

A covering design: every strategy alone, every pair of strategies that can be combined somewhere, and with
them padded, packed and dynamic batches, microbatch sizes that do not divide the batch, and ranks without
samples. Each variant runs on the cases that can reveal the faults it is for.
"""

from __future__ import annotations

from collections.abc import Mapping

from regress.replay.parts import overrides_of
from regress.replay.variants import BOTH, SEMANTICS, Precision, Variant


def layout(
    name: str,
    why: str,
    *cases: str,
    precisions: tuple[Precision, ...] = SEMANTICS,
    twin: str | None = None,
    combines: bool = False,
) -> Variant:
    """Return a variant whose name spells out its overrides."""
    overrides = overrides_of(name)
    assert overrides is not None, name
    return Variant(name, why, overrides, precisions, cases, twin, combines=combines)


def combined(name: str, why: str, case: str, *precisions: Precision) -> Variant:
    """Return a variant that combines what others show one by one."""
    return layout(name, why, case, precisions=precisions or SEMANTICS, combines=True)


TWICE = (*BOTH, Precision.BITWISE)
RING = (Precision.BFLOAT16, *SEMANTICS)
SHARDED = (*SEMANTICS, Precision.MIXED)

_PAIRS: tuple[Variant, ...] = (
    combined("dp2-cp2-ring-ddp-noreshard-mbs3", "a ring within replicas", "@grpo"),
    combined("dp2-cp2-gather-ddp-packed", "gathered keys within replicas", "@grpo"),
    combined("dp2-cp2-zigzag-dealt", "columns out of order of samples dealt out", "@grpo"),
    combined("dp2-tp2-sp-dealt", "parts of the tokens of samples dealt out", "@grpo"),
    combined("cp2-tp2-sp-zigzag-pad8", "columns split twice, and padded", "@grpo"),
    combined("cp2-pp2-zigzag-pad8-mbs6", "padded columns out of order, handed on", "@grpo"),
    combined("fsdp2-cp2-ring-hsdp-noreshard", "a ring over shards", "@grpo", *SEMANTICS, Precision.MIXED),
    combined(
        "fsdp2-cp2-ring-reduce16", "gradients of a ring summed in half precision", "@grpo", Precision.MIXED
    ),
    combined(
        "fsdp2-cp2-gather-hsdp-noreshard-reduce16", "gathered keys over shards", "@grpo", Precision.MIXED
    ),
    combined("fsdp2-param32-reduce16-mbs3", "gradients alone in half precision", "@grpo", Precision.MIXED),
    combined("fsdp2-cp2-gather", "gathered keys over shards that are given back", "@grpo", Precision.MIXED),
    combined(
        "fsdp2-cp2-ring-hsdp-noreshard-param32-reduce32",
        "dtypes that are named and change nothing",
        "@grpo",
        Precision.FLOAT32,
    ),
    combined("fsdp2-cp2-gather-param32", "the same for gathered keys", "@grpo", Precision.FLOAT32),
    *(
        combined(f"fsdp2-pp2-{schedule}{dtype}-{size}", "stages in a dtype of their own", "@grpo", precision)
        for schedule, size in (
            ("1f1b", "mbs3"),
            ("interleaved", "mbs3"),
            ("bfs", "mbs5"),
            ("zb-noreshard", "mbs6"),
            ("zbv-noreshard", "mbs2"),
        )
        for dtype, precision in (("", Precision.MIXED), ("-param32", Precision.FLOAT32))
    ),
)
"""Pairs of settings that one function reads and that meet nowhere else."""

_ROWS: tuple[Variant, ...] = (
    # data parallelism: denominators over ranks, gradients summed and not averaged
    layout("dp2", "loss weights counted per rank", "@grpo", "@microbatches", "@any"),
    layout("dp2-mbs2", "denominators and statistics of a microbatch, or of a rank", "@batch", "@any"),
    layout("dp2-ddp", "gradients averaged over replicas", "@grpo", precisions=TWICE, twin="dp2-ddp"),
    layout("dp2-ddp-mbs2", "gradients synchronized in every microbatch, or in none", "@grpo"),
    layout("dp2-accelerate-mbs2", "the loss divided by accumulation steps", "@grpo"),
    layout("dp2-left-mbs5", "microbatches that do not divide the samples of a rank", "@absolute"),
    layout("dp2-packed-budget48", "microbatches whose number differs between ranks", "@turns", "@recurrent"),
    layout("dp3-dealt", "samples dealt out one by one: groups split over ranks", "@reused"),
    layout("dp4-packed-mbs2", "packed rows of other samples on each rank", "@grpo"),
    layout("dp5", "a rank without samples", "@sums"),
    layout("dp8-mbs1", "ranks that run out of microbatches", "@cispo"),
    # sharded data parallelism
    layout(
        "fsdp2",
        "gradients divided by the number of ranks; blocks in bfloat16",
        "@tied",
        "@any",
        precisions=SHARDED,
    ),
    layout(
        "fsdp4-mbs2", "shards of unequal size, and empty ones", "@grpo", precisions=TWICE, twin="fsdp4-mbs2"
    ),
    layout("fsdp2-noreshard-packed-budget64", "parameters that stay gathered over the update", "@grpo"),
    layout("fsdp2-checkpointing-mbs4", "parameters gathered again for the second forward pass", "@grpo"),
    layout("fsdp5", "a rank without samples, which all others wait for", "@experts", precisions=SHARDED),
    layout("fsdp8-dealt", "more ranks than rows of a parameter", "@grpo"),
    layout("dp2-fsdp2", "sums over shards and over replicas", "@grpo"),
    layout("dp2-fsdp2-hsdp-mbs3", "the same by torch's two-dimensional mesh", "@grpo", precisions=SHARDED),
    # tensor parallelism
    layout(
        "tp2", "matrix products split over ranks; partial gradients of norms", "@tied", "@experts", "@any"
    ),
    layout("tp2-mbs3", "partial gradients summed once, or in every microbatch", "@grpo"),
    layout("tp2-packed-chunk7", "log-probs by chunks over a split vocabulary", "@grpo"),
    layout("tp2-checkpointing", "collectives in the second forward pass", "@grpo"),
    layout(
        "tp2-sp",
        "norms that see a part of the tokens; factors of adapters, split or whole",
        "@grpo",
        "@adapters",
    ),
    layout("tp2-sp-packed-budget64", "the same on packed rows", "@grpo"),
    layout("tp2-sp-left", "padding at the side where the sequence is split", "@experts"),
    layout("tp2-hf", "the plan of transformers", "@grpo"),
    layout("tp4", "a vocabulary that the ranks do not divide", "@absolute"),
    # pipeline parallelism
    layout("pp2", "hidden states handed on; a gradient of embeddings at the far end", "@absolute", "@any"),
    layout("pp2-mbs4", "gradients averaged over microbatches", "@tied"),
    layout("pp4-mbs3", "stages without blocks", "@grpo"),
    layout("pp2-1f1b-packed-mbs3", "backward passes between forward passes", "@grpo"),
    layout("pp2-interleaved-mbs3", "two stages on each rank", "@absolute"),
    layout("pp2-bfs-left-mbs5", "microbatches that do not divide the batch", "@tied"),
    layout("pp2-zb-mbs6", "gradients of weights after those of inputs", "@grpo"),
    layout("pp2-zbv-mbs2", "first and last stage on one rank", "@tied"),
    layout("pp2-checkpointing-mbs6", "a second forward pass within a stage", "@experts"),
    # context parallelism
    layout(
        "cp2",
        "heads exchanged for tokens; positions of the second half",
        "@grpo",
        "@absolute",
        "@any",
        precisions=BOTH,
    ),
    layout("cp2-packed", "samples across the border between ranks", "@turns"),
    layout("cp2-zigzag-packed-mbs4", "columns out of order", "@grpo"),
    layout("cp2-mbs1", "samples so short that a rank holds one token, or none", "@grpo"),
    layout("cp2-left", "ranks that begin with padding", "@absolute"),
    layout("cp2-gather", "keys and values gathered", "@grpo"),
    layout("cp2-ring-packed", "partial softmax merged round the ring", "@grpo", precisions=BOTH),
    layout("cp2-ring", "partial softmax merged in half precision", "@grpo", precisions=RING),
    layout("cp2-checkpointing", "collectives in the second forward pass", "@grpo"),
    layout("cp4", "fewer heads of keys than ranks", "@sequences"),
    layout("cp4-ring-zigzag", "a ring over columns out of order", "@absolute"),
    layout("cp3-gather-packed-budget96", "three parts of a row", "@tied"),
    # expert parallelism
    layout("ep2", "rows sent to experts and back", "@experts", precisions=BOTH),
    layout("ep4-packed", "one expert on each rank", "@experts"),
    layout("ep2-mbs1", "experts and ranks without tokens", "@experts"),
    layout("ep2-checkpointing-budget96", "rows sent again in the second forward pass", "@experts"),
    # combinations
    layout("dp2-tp2", "sums over data, not over the parts of a product", "@grpo", precisions=BOTH),
    layout("dp2-tp2-sp-packed", "partial gradients of norms over both", "@grpo"),
    layout("dp2-pp2-mbs2", "replicas of stages", "@tied"),
    layout("dp2-cp2-packed", "samples and tokens split", "@grpo"),
    layout("dp2-cp2-ddp", "gradients averaged over parts of samples, too", "@grpo"),
    layout("dp2-ep2", "experts replicated over a part of the ranks", "@experts"),
    layout("fsdp2-tp2-mbs3", "a parameter sharded twice", "@grpo", precisions=BOTH),
    layout("fsdp2-tp2-sp", "the same under sequence parallelism", "@tied"),
    layout("fsdp2-pp2-budget72", "sharded stages", "@grpo"),
    layout("fsdp2-cp2-zigzag", "shards and columns", "@grpo"),
    layout("fsdp2-ep2", "experts sharded twice", "@experts"),
    layout("tp2-pp2-mbs4", "a split vocabulary on the last stage", "@tied", precisions=BOTH),
    layout("tp2-pp2-1f1b-packed-mbs3", "the same between backward passes", "@grpo"),
    layout("tp2-sp-pp2", "parts of hidden states handed on", "@absolute"),
    layout("cp2-tp2", "heads shared twice", "@grpo"),
    layout("cp2-pp2-ring-mbs6", "columns handed on", "@absolute"),
    layout("ep2-tp2", "experts and matrix products", "@experts"),
    layout("ep2-cp2-packed", "rows from parts of a sequence", "@experts"),
    layout("ep2-pp2-mbs3", "experts of a stage", "@experts"),
    layout("dp2-tp2-pp2-mbs2", "three ways at once", "@grpo"),
    combined("dp2-fsdp2-tp2", "replicas of shards of parts", "@grpo"),
    combined("dp2-cp2-tp2-zigzag-packed", "samples, tokens and heads", "@grpo"),
    combined("fsdp2-tp2-pp2-mbs3", "shards of parts of stages", "@tied"),
    *_PAIRS,
)

LAYOUTS: Mapping[str, Variant] = {row.name: row for row in _ROWS}
"""Variants on several ranks, by name."""
