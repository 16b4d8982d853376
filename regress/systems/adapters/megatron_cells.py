"""Cells of Megatron-core: tensor, sequence, pipeline and data parallelism, and what goes with them."""

from __future__ import annotations

from typing import Any

from regress.systems.protocol import Cell, Declared, Layout


def _layout(name: str, *, tp: int = 1, pp: int = 1, dp: int = 1, rows: int = 2, **settings: Any) -> Layout:
    return Layout(name, tp * pp * dp, {"tp": tp, "pp": pp, "dp": dp, "rows": rows, **settings})


_TP = _layout("tp2", tp=2)
_SP = _layout("tp2-sp", tp=2, sp=True)
_PP = _layout("pp2", pp=2)
_VPP = _layout("pp2-vpp2", pp=2, virtual=2, spread=True)
_DP = _layout("dp2", dp=2)
_DISTRIBUTED = _layout("dp2-distributed-optimizer", dp=2, distributed=True)
_PADDING = "Megatron's embedding trains the padding token, Hugging Face's (padding_idx) does not, and a sample holds it"

_TWO = (6, 6)
_FIRST = (6,)
"""Batches of cases of which a later sample holds the padding token, which Hugging Face's embedding does not train."""

CELLS = (
    Cell(_layout("single", rows=12), "grpo"),
    Cell(_layout("single", rows=12), "sft"),
    Cell(
        _layout("padding-token", rows=12),
        "grpo",
        updates=2,
        declared=(Declared("gradient", _PADDING, amount=4435.7),),
    ),
    Cell(_layout("accumulation", rows=3), "grpo", updates=2, batches=_TWO),
    Cell(_layout("accumulation", rows=3), "sequence-mean"),
    Cell(_layout("accumulation", rows=3), "grpo", "tied", batches=_FIRST),
    Cell(_layout("recompute", recompute=True), "grpo"),
    Cell(_TP, "grpo", updates=2, batches=_TWO),
    Cell(_TP, "sft", "tied", batches=_FIRST),
    Cell(_TP, "sequence-mean"),
    Cell(_SP, "grpo", updates=2, batches=_TWO),
    Cell(_SP, "grpo", "tied", batches=_FIRST),
    Cell(_layout("tp2-sp-recompute", tp=2, sp=True, recompute=True), "grpo"),
    Cell(_PP, "grpo", updates=2, batches=_TWO),
    Cell(_PP, "grpo", "tied", batches=_FIRST),
    Cell(_PP, "sequence-mean"),
    Cell(_VPP, "grpo"),
    Cell(_layout("pp2-vpp2", pp=2, virtual=2, spread=True, rows=3), "sft", "tied", batches=_FIRST),
    Cell(_layout("pp2-vpp2-batched", pp=2, virtual=2, spread=True, batched=True), "grpo"),
    Cell(_layout("pp4", pp=4, spread=True, rows=1), "grpo", "tied", batches=_FIRST),
    Cell(_layout("pp4-recompute", pp=4, spread=True, recompute=True), "grpo"),
    Cell(_DP, "grpo", updates=2, batches=_TWO),
    Cell(_DP, "sequence-mean"),
    Cell(_layout("dp2-overlap", dp=2, overlap=True), "grpo", updates=2, batches=_TWO),
    Cell(_DISTRIBUTED, "grpo", updates=2, batches=_TWO),
    Cell(_DISTRIBUTED, "sft", "tied", batches=_FIRST),
    Cell(
        _layout("dp2-distributed-optimizer-overlap", dp=2, distributed=True, overlap=True),
        "grpo",
        updates=2,
        batches=_TWO,
    ),
    Cell(_layout("dp4", dp=4, rows=1), "grpo"),
    Cell(_layout("tp2-pp2-sp", tp=2, pp=2, sp=True), "grpo", updates=2, batches=_TWO),
    Cell(_layout("tp2-dp2", tp=2, dp=2), "grpo", "tied", batches=_FIRST),
    Cell(_layout("tp2-dp2-sp-distributed-optimizer", tp=2, dp=2, sp=True, distributed=True), "grpo"),
    Cell(_layout("pp2-dp2", pp=2, dp=2, rows=1), "grpo", updates=2, batches=_TWO),
    Cell(
        _layout("pp2-dp2-distributed-optimizer", pp=2, dp=2, distributed=True, rows=1),
        "grpo",
        "tied",
        batches=_FIRST,
    ),
)
