"""Cells of Megatron-core: tensor, sequence, pipeline and data parallelism, and what goes with them."""

from __future__ import annotations

from collections.abc import Iterator
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

FIRST = (
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


def _more() -> Iterator[Cell]:
    """Yield each objective over each layout of two ranks, further recorded batches, and what can be set of DDP."""
    known = {cell.name for cell in FIRST}
    for layout in (_TP, _SP, _PP, _VPP, _DP, _DISTRIBUTED):
        for objective in ("grpo", "sft", "sequence-mean"):
            cell = Cell(layout, objective)
            if cell.name not in known:
                yield cell
    for layout in (_TP, _SP, _PP, _DP, _DISTRIBUTED):
        yield Cell(layout, "grpo", "dr_grpo", updates=2)
    yield Cell(_layout("accumulation", rows=1), "sequence-mean", "tied", batches=_FIRST)
    yield Cell(_layout("accumulation-of-four", rows=3), "sft", "dr_grpo", updates=2)
    yield from _recomputed()
    yield from _reduced()
    yield from _combined()
    yield from _experts()


def _experts() -> Iterator[Cell]:
    """Yield mixtures of experts, one after another on a rank, and shared by the data ranks."""
    yield _mixture("single", rows=12)
    yield _mixture("accumulation", "sft")
    yield _mixture("gathered", dispatcher="allgather")
    yield _mixture("pp2", pp=2)
    yield _mixture("dp2", "sequence-mean", dp=2)
    gathered: dict[str, Any] = {
        "ep": 2,
        "dispatcher": "allgather",
    }  # the exchange of tokens needs splits from CUDA
    yield _mixture("dp2-ep2-gathered", dp=2, **gathered)
    yield _mixture("dp2-ep2-gathered", "sequence-mean", dp=2, **gathered)
    yield _mixture("dp2-ep2-gathered-unclipped", "sft", dp=2, clip=False, **gathered)
    yield _mixture("dp4-ep2-gathered", dp=4, **gathered)
    yield _mixture("pp2-dp2-ep2-gathered", pp=2, dp=2, **gathered)


def _mixture(name: str, objective: str = "grpo", rows: int = 2, **settings: Any) -> Cell:
    return Cell(_layout(f"moe-{name}", rows=rows, **settings), objective, "moe", batches=(8,), without=(0,))


def _recomputed() -> Iterator[Cell]:
    yield Cell(_layout("recompute-attention", selective=True), "grpo")
    yield Cell(_layout("tp2-recompute", tp=2, recompute=True), "grpo", "tied", batches=_FIRST)
    yield Cell(_layout("tp2-sp-recompute-attention", tp=2, sp=True, selective=True), "grpo")
    yield Cell(_layout("pp2-recompute", pp=2, recompute=True), "sequence-mean")
    yield Cell(_layout("pp2-vpp2-recompute", pp=2, virtual=2, spread=True, recompute=True), "grpo")
    yield Cell(_layout("dp2-recompute", dp=2, recompute=True), "sft")


def _reduced() -> Iterator[Cell]:
    """Yield what can be set of the reduction of gradients and of the optimizer."""
    yield Cell(_layout("dp2-averaged-in-collective", dp=2, average=True), "sequence-mean")
    yield Cell(_layout("dp2-small-buckets", dp=2, overlap=True, bucket=1024), "grpo")
    yield Cell(
        _layout("dp2-distributed-optimizer-small-buckets", dp=2, overlap=True, distributed=True, bucket=1024),
        "grpo",
        "dr_grpo",
        updates=2,
    )
    yield Cell(
        _layout("dp2-distributed-optimizer-averaged", dp=2, distributed=True, average=True), "sequence-mean"
    )
    yield Cell(_layout("dp2-unclipped", dp=2, clip=False), "grpo")
    yield Cell(_layout("tp2-unclipped", tp=2, clip=False), "grpo")
    yield Cell(_layout("dp2-distributed-optimizer-unclipped", dp=2, distributed=True, clip=False), "grpo")


def _combined() -> Iterator[Cell]:
    """Yield layouts of four ranks."""
    yield Cell(_layout("dp4-distributed-optimizer", dp=4, distributed=True, rows=1), "grpo")
    yield Cell(_layout("dp4-overlap", dp=4, overlap=True, rows=1), "sequence-mean")
    yield Cell(_layout("tp2-pp2", tp=2, pp=2), "grpo", "tied", batches=_FIRST)
    yield Cell(_layout("tp2-pp2", tp=2, pp=2), "sequence-mean")
    yield Cell(_layout("tp2-pp2-sp-recompute", tp=2, pp=2, sp=True, recompute=True), "sft")
    yield Cell(_layout("tp2-pp2-vpp2-sp", tp=2, pp=2, sp=True, virtual=2, spread=True), "grpo")
    yield Cell(_layout("pp2-dp2-vpp2", pp=2, dp=2, virtual=2, spread=True, rows=1), "grpo")
    yield Cell(_layout("tp2-dp2-overlap", tp=2, dp=2, overlap=True), "grpo", "dr_grpo", updates=2)
    yield Cell(
        _layout("tp2-dp2-distributed-optimizer-overlap", tp=2, dp=2, distributed=True, overlap=True),
        "sequence-mean",
    )
    yield Cell(_layout("pp4", pp=4, spread=True, rows=1), "sequence-mean")
    yield Cell(_layout("pp2-dp2", pp=2, dp=2, rows=1), "sft", "tied", batches=_FIRST)


CELLS = (*FIRST, *_more())
