"""Cells of transformers.Trainer: batches, accumulation, ranks, shards, and what can be set of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regress.systems.protocol import Cell, Declared, Layout

_FSDP: Mapping[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}
_DDP: Mapping[str, Any] = {"wrapper": "DistributedDataParallel"}
_EVEN = "even_batches of accelerate fills the last batch of ranks with the first samples, which count again"


def _layout(name: str, ranks: int = 1, **settings: Any) -> Layout:
    return Layout(name, ranks, settings)


PADDED = _layout("padded")
ACCUMULATION = _layout("accumulation", per_device=3)
DDP = _layout("ddp2", 2, expected=_DDP)
DDP_ACCUMULATION = _layout("ddp2-accumulation", 2, per_device=2, expected=_DDP)
FSDP_ACCELERATE = _layout(
    "fsdp2-accelerate", 2, arguments=_FSDP, expected={"held": 0.5, "placement": "Shard"}
)
FSDP = _layout("fsdp2", 2, distributed={"fsdp_size": 2}, expected={"held": 0.5, "placement": "Shard"})
TP = _layout("tp2", 2, distributed={"tp_size": 2}, expected={"placement": "Shard"})
TP_ACCUMULATION = _layout(
    "tp2-accumulation", 2, per_device=4, distributed={"tp_size": 2}, expected={"placement": "Shard"}
)
HSDP = _layout(
    "hsdp2x2",
    4,
    distributed={"fsdp_size": 2, "dp_replicate_size": 2},
    expected={"placement": "Shard", "held": 0.5},
)
_SHARDED: Mapping[str, Any] = {
    "distributed": {"fsdp_size": 2},
    "expected": {"held": 0.5, "placement": "Shard"},
}
_SPLIT: Mapping[str, Any] = {"distributed": {"tp_size": 2}, "expected": {"placement": "Shard"}}
_GROUPED: Mapping[str, Any] = {"arguments": {"train_sampling_strategy": "group_by_length"}}
EP = _layout("ep2", 2, distributed={"fsdp_size": 2, "ep_size": 2}, expected={"held": 0.5})

FIRST = (
    Cell(PADDED, "sft"),
    Cell(PADDED, "sft", "moe"),
    Cell(PADDED, "sft", "gpt2"),
    Cell(PADDED, "sft", "tied"),
    Cell(ACCUMULATION, "sft", updates=3),
    Cell(_layout("one-sample-accumulation", per_device=1), "sft"),
    Cell(_layout("short-last-batch", per_device=5), "sft"),
    Cell(_layout("short-last-window", per_device=2), "sft", updates=2, batches=(8, 4)),
    Cell(_layout("checkpointing", per_device=4, arguments={"gradient_checkpointing": True}), "sft"),
    Cell(_layout("flattened", collator="flattened"), "sft"),
    Cell(_layout("flattened-accumulation", collator="flattened", per_device=4), "sft", "tied"),
    Cell(_layout("padded-to-16", collator="padded-to-16", per_device=6), "sft"),
    Cell(
        _layout("grouped-by-length", arguments={"train_sampling_strategy": "group_by_length"}, per_device=4),
        "sft",
    ),
    Cell(_layout("autocast", per_device=4, arguments={"bf16": True}), "sft", precision="bfloat16"),
    Cell(_layout("ddp2-autocast", 2, arguments={"bf16": True}, expected=_DDP), "sft", precision="bfloat16"),
    Cell(DDP, "sft", updates=2),
    Cell(DDP, "sft", "moe"),
    Cell(DDP, "sft", "gpt2"),
    Cell(DDP_ACCUMULATION, "sft", updates=2),
    Cell(DDP_ACCUMULATION, "sft", "tied"),
    Cell(_layout("ddp4", 4, expected=_DDP), "sft"),
    Cell(_layout("ddp2-flattened", 2, collator="flattened", per_device=3, expected=_DDP), "sft"),
    Cell(
        _layout(
            "ddp2-dispatched", 2, arguments={"accelerator_config": {"dispatch_batches": True}}, expected=_DDP
        ),
        "sft",
    ),
    Cell(
        _layout(
            "ddp2-split",
            2,
            arguments={"accelerator_config": {"split_batches": True}},
            per_device=4,
            expected=_DDP,
        ),
        "sft",
    ),
    Cell(
        _layout("ddp2-odd", 2, per_device=1, expected=_DDP),
        "sft",
        batches=(7,),
        declared=(Declared("coverage", _EVEN, amount=0.0), Declared("loss", _EVEN, amount=0.111)),
    ),
    Cell(FSDP_ACCELERATE, "sft", updates=2),
    Cell(FSDP_ACCELERATE, "sft", "tied"),
    Cell(FSDP, "sft", updates=2),
    Cell(
        _layout(
            "fsdp2-accumulation",
            2,
            per_device=2,
            distributed={"fsdp_size": 2},
            expected={"placement": "Shard"},
        ),
        "sft",
    ),
    Cell(FSDP, "sft", "moe"),
    Cell(HSDP, "sft"),
    Cell(TP, "sft"),
    Cell(TP, "sft", "tied"),
    Cell(TP_ACCUMULATION, "sft"),
    Cell(
        _layout("tp2-fsdp2", 4, distributed={"tp_size": 2, "fsdp_size": 2}, expected={"placement": "Shard"}),
        "sft",
        "tied",
    ),
    Cell(EP, "sft", "moe"),
)


def _more() -> Iterator[Cell]:
    """Yield further models over the layouts, and layouts that combine two of them."""
    for case in ("tied", "gpt2", "moe", "tools"):
        yield Cell(ACCUMULATION, "sft", case)
        if case != "tied":
            yield Cell(DDP_ACCUMULATION, "sft", case)
    yield Cell(PADDED, "sft", "tools")
    for case in ("tied", "tools"):
        yield Cell(DDP, "sft", case)
        yield Cell(FSDP, "sft", case)
    for case in ("tied", "tools", "moe"):
        yield Cell(_layout("flattened", collator="flattened"), "sft", case)
    for case in ("moe", "tools"):
        yield Cell(FSDP_ACCELERATE, "sft", case)
    for layout in (PADDED, ACCUMULATION, DDP, DDP_ACCUMULATION, FSDP_ACCELERATE):
        yield Cell(layout, "sft", "lora")
    yield from _flattened()
    yield from _checkpointing()
    yield from _half()
    yield from _ranks()


def _flattened() -> Iterator[Cell]:
    yield Cell(_layout("fsdp2-flattened", 2, collator="flattened", per_device=3, **_SHARDED), "sft")
    yield Cell(
        _layout("ddp2-flattened-accumulation", 2, collator="flattened", per_device=2, expected=_DDP), "sft"
    )
    yield Cell(_layout("tp2-flattened", 2, collator="flattened", **_SPLIT), "sft")


def _checkpointing() -> Iterator[Cell]:
    again = {"gradient_checkpointing": True}
    yield Cell(_layout("checkpointing", per_device=4, arguments=again), "sft", "moe")
    yield Cell(_layout("checkpointing", per_device=4, arguments=again), "sft", "gpt2")
    yield Cell(_layout("ddp2-checkpointing", 2, arguments=again, expected=_DDP), "sft")
    yield Cell(_layout("fsdp2-checkpointing", 2, arguments=again, **_SHARDED), "sft")
    yield Cell(_layout("tp2-checkpointing", 2, arguments=again, **_SPLIT), "sft")


def _half() -> Iterator[Cell]:
    half: Mapping[str, Any] = {"arguments": {"bf16": True}}
    yield Cell(_layout("autocast", per_device=4, **half), "sft", "tied", precision="bfloat16")
    yield Cell(_layout("autocast-accumulation", per_device=3, **half), "sft", updates=2, precision="bfloat16")
    yield Cell(
        _layout("ddp2-autocast-accumulation", 2, per_device=2, expected=_DDP, **half),
        "sft",
        precision="bfloat16",
    )
    yield Cell(_layout("ddp2-autocast", 2, expected=_DDP, **half), "sft", "gpt2", precision="bfloat16")


def _ranks() -> Iterator[Cell]:
    yield Cell(_layout("ddp4", 4, expected=_DDP), "sft", "tied")
    yield Cell(_layout("ddp4-accumulation", 4, per_device=1, expected=_DDP), "sft")
    yield Cell(_layout("ddp2-grouped-by-length", 2, per_device=3, expected=_DDP, **_GROUPED), "sft")
    kept = {**_FSDP, "fsdp_config": {**_FSDP["fsdp_config"], "reshard_after_forward": False}}
    expected = {"held": 0.5, "placement": "Shard"}
    yield Cell(_layout("fsdp2-unsharded-accelerate", 2, arguments=kept, expected=expected), "sft")
    yield Cell(
        _layout("fsdp2-accumulation-accelerate", 2, per_device=2, arguments=_FSDP, expected=expected),
        "sft",
        updates=2,
    )
    yield Cell(
        _layout("fsdp4", 4, distributed={"fsdp_size": 4}, expected={"held": 0.25, "placement": "Shard"}),
        "sft",
    )
    yield Cell(HSDP, "sft", "tied")
    yield Cell(TP, "sft", "tools")
    yield Cell(TP, "sft", "moe")
    yield Cell(TP_ACCUMULATION, "sft", "tied")
    yield Cell(
        _layout(
            "ep2-accumulation",
            2,
            per_device=2,
            distributed={"fsdp_size": 2, "ep_size": 2},
            expected={"held": 0.5},
        ),
        "sft",
        "moe",
    )


CELLS = (*FIRST, *_more())
