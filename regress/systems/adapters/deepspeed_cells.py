"""Cells of DeepSpeed: stages of ZeRO with what can be set of them, AutoTP and Ulysses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regress.systems.protocol import Cell, Layout


def _layout(name: str, ranks: int = 2, **settings: Any) -> Layout:
    return Layout(name, ranks, {"stage": 0, "per_device": 1, **settings})


def _zero(
    stage: int,
    name: str = "",
    ranks: int = 2,
    per_device: int = 1,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Layout:
    title = f"zero{stage}-dp{ranks}" + (f"-{name}" if name else "")
    return _layout(title, ranks, stage=stage, per_device=per_device, zero=options, **(settings or {}))


_PERSIST: Mapping[str, Any] = {"stage3_param_persistence_threshold": 0}
_OFFLOAD: Mapping[str, Any] = {"device": "cpu"}

FIRST = (
    Cell(_zero(0), "grpo", updates=2),
    Cell(_zero(1), "grpo", updates=2),
    Cell(_zero(2), "grpo", updates=2),
    Cell(_zero(3), "grpo", updates=2),
    Cell(_zero(3, "sharded", **_PERSIST), "grpo", updates=2),
    Cell(_zero(1, "batches", per_device=2), "grpo"),
    Cell(_zero(2, "batches", per_device=3), "grpo", "tied"),
    Cell(_zero(3, "batches", per_device=3, **_PERSIST), "grpo", "tied"),
    Cell(_zero(2, "overlap", overlap_comm=True), "grpo"),
    Cell(_zero(2, "non-contiguous", contiguous_gradients=False), "grpo"),
    Cell(_zero(1, "small-buckets", reduce_bucket_size=512, allgather_bucket_size=512), "grpo"),
    Cell(_zero(2, "small-buckets", reduce_bucket_size=512), "grpo"),
    Cell(_zero(1, ranks=4), "grpo"),
    Cell(_zero(2, ranks=4), "grpo", "tied"),
    Cell(_zero(3, ranks=4), "grpo"),
    Cell(_zero(1), "grpo", "gpt2"),
    Cell(_zero(2), "grpo", "gpt2"),
    Cell(_zero(3, "sharded", **_PERSIST), "grpo", "gpt2"),
    Cell(_zero(2), "grpo", "moe"),
    Cell(_zero(2), "sft", updates=2),
    Cell(_zero(3, "sharded", **_PERSIST), "sft", "tied"),
)


def _more() -> Iterator[Cell]:
    """Yield cells of each stage with other models, and what can be set of a stage."""
    for stage in (0, 1, 3):
        yield Cell(_zero(stage), "grpo", "tied")
        yield Cell(_zero(stage), "grpo", "moe")
    for stage in (0, 1, 2, 3):
        yield Cell(_zero(stage), "grpo", "tools")
        yield Cell(_zero(stage, "unclipped", settings={"clip": False}), "grpo")
        yield Cell(_zero(stage, "whole-batch", per_device=6), "grpo")
    yield Cell(_zero(0), "grpo", "gpt2")
    for stage in (1, 2, 3):
        yield Cell(_zero(stage, "offload", offload_optimizer=_OFFLOAD), "grpo")
        yield Cell(_zero(stage, "bf16"), "grpo", precision="bfloat16")
    yield Cell(
        _zero(3, "offload-all", offload_optimizer=_OFFLOAD, offload_param=_OFFLOAD, **_PERSIST), "grpo"
    )
    yield Cell(_zero(3, "overlap", overlap_comm=True, **_PERSIST), "grpo", "tied")
    yield Cell(_zero(1, "overlap", overlap_comm=True), "grpo", "gpt2")
    yield Cell(_zero(1, "all-reduce", reduce_scatter=False), "grpo")
    yield Cell(_zero(2, "all-reduce", reduce_scatter=False), "grpo")
    yield Cell(_zero(3, "subgroups", sub_group_size=256, **_PERSIST), "grpo")
    yield Cell(_zero(3, "small-buckets", reduce_bucket_size=512, stage3_prefetch_bucket_size=512), "grpo")
    yield Cell(_zero(3, "two-level", 4, zero_hpz_partition_size=2, **_PERSIST), "grpo")
    yield Cell(_zero(2, "batches", 4, 3), "grpo")
    yield Cell(_zero(1, ranks=4), "grpo", "gpt2")
    yield Cell(_zero(2, "round-robin", round_robin_gradients=True), "grpo")


def _tensor() -> Iterator[Cell]:
    """Yield cells of AutoTP, with a head in the vocabulary's parts and its own loss, too."""
    tp = _layout("autotp2", tensor=2)
    for case in ("dense", "tied", "tools"):
        yield Cell(tp, "grpo", case)
    # One update: the second one's log-probs were at 1.24 times the tolerance. Its parameters are AdamW's of its own
    # recorded gradients to 1.7e-5 of a step; one of 6,704, whose gradient of 3e-9 is rounding, lies 0.04 of a step off
    # the truth, and from its own parameters the second update's log-probs are at 0.08 times the tolerance.
    yield Cell(tp, "sft")
    yield Cell(_layout("autotp2-batches", tensor=2, per_device=4), "grpo")
    yield Cell(_layout("autotp2-zero1", tensor=2, stage=1), "grpo", "tied")
    yield Cell(_layout("autotp2-zero1", tensor=2, stage=1), "grpo")
    yield Cell(_layout("autotp2-zero2", tensor=2, stage=2), "grpo")
    yield Cell(_layout("autotp2-zero2-dp2", 4, tensor=2, stage=2), "grpo", "tied")
    yield Cell(_layout("autotp2-zero1-dp2", 4, tensor=2, stage=1), "grpo")
    yield Cell(_layout("autotp2-vocabulary", tensor=2, own_loss=True, per_device=4), "sft", "tied")
    yield Cell(_layout("autotp2-vocabulary-zero1", tensor=2, own_loss=True, stage=1), "sft", "tied")


def _sequence() -> Iterator[Cell]:
    """Yield cells of Ulysses, the sequence parallelism of DeepSpeed, around the sdpa attention of transformers."""
    for stage in (1, 2, 3):
        yield Cell(_layout(f"ulysses2-zero{stage}", sequence=2, stage=stage), "grpo")
    whole = {"reduce_scatter": False}
    yield Cell(_layout("ulysses2-zero3-all-reduce", sequence=2, stage=3, zero=whole), "grpo")
    yield Cell(_layout("ulysses2-zero1-batches", sequence=2, stage=1, per_device=3), "grpo", updates=2)
    yield Cell(_layout("ulysses2-zero2", sequence=2, stage=2), "grpo", "tied")
    yield Cell(_layout("ulysses2-zero2", sequence=2, stage=2), "grpo", "tools")
    yield Cell(_layout("ulysses2-zero2-dp2", 4, sequence=2, stage=2), "grpo")
    yield Cell(_layout("ulysses2-zero2", sequence=2, stage=2), "sft")
    yield Cell(_layout("ulysses2-zero1-packed", sequence=2, stage=1, per_device=3, packed=True), "grpo")


CELLS = (*FIRST, *_more(), *_tensor(), *_sequence())
