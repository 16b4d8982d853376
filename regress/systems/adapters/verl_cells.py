"""Cells of verl: objectives, layouts, and which of them meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regress.systems.protocol import Cell, Layout


@dataclass(frozen=True)
class Setting:
    """Options of verl's actor, and the engine's keys for the same objective.

    Attributes:
        actor: fields of `FSDPActorConfig`; ``loss_mode`` is that of its ``policy_loss``.
        truth: keys besides those of every cell.
        scaled: advantages are divided by the standard deviation of the group.
        first_token: the mask of `sft_loss` has the first token of each sample, too.
    """

    actor: Mapping[str, Any] = field(default_factory=dict)
    truth: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    scaled: bool = True
    supervised: bool = False
    first_token: bool = False


def _ppo(preset: str, truth: Mapping[str, Any] | None = None, **options: Any) -> Setting:
    own = {name: options.pop(name) for name in ("temperature", "scaled") if name in options}
    return Setting(options, {"algorithm.preset": preset, **(truth or {})}, **own)


_NORM = "seq-mean-token-sum-norm"
SETTINGS: Mapping[str, Setting] = {
    "verl:token-mean": _ppo("verl:token-mean"),
    "verl:token-sum": _ppo("verl:token-sum", loss_agg_mode="token-sum"),
    "verl:seq-mean-token-sum": _ppo("verl:seq-mean-token-sum", loss_agg_mode="seq-mean-token-sum"),
    "verl:seq-mean-token-mean": _ppo("verl:seq-mean-token-mean", loss_agg_mode="seq-mean-token-mean"),
    f"verl:{_NORM}": _ppo(f"verl:{_NORM}", loss_agg_mode=_NORM),
    "verl:dr_grpo": _ppo("verl:dr_grpo", loss_agg_mode=_NORM, scaled=False),
    "verl:gspo": _ppo(
        "verl:gspo",
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
    ),
    "verl:cispo": _ppo("verl:cispo", loss_mode="cispo"),
    "verl:sapo": _ppo("verl:sapo", loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"),
    "verl:token-mean entropy=0.01": _ppo(
        "verl:token-mean", {"algorithm.entropy_coef": 0.01}, entropy_coeff=0.01
    ),
    "verl:token-mean T=0.7": _ppo("verl:token-mean", {"rollout_worker.temperature": 0.7}, temperature=0.7),
    "verl:token-mean kl=0.05": _ppo(
        "verl:token-mean",
        {"algorithm.kl_coef": 0.05, "algorithm.kl_estimator": "k3"},
        use_kl_loss=True,
        kl_loss_coef=0.05,
        kl_loss_type="low_var_kl",
    ),
    "sft": Setting(supervised=True, truth={"algorithm.preset": "sft"}),
    "sft first-token": Setting(supervised=True, first_token=True, truth={"algorithm.preset": "sft"}),
}
"""Objective of a cell -> the settings of verl and of the engine."""


def _layout(name: str, ranks: int = 1, **settings: Any) -> Layout:
    return Layout(name, ranks, settings)


_PADDED: Mapping[str, Any] = {"use_remove_padding": False}
FP32: Mapping[str, Any] = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
_BF16: Mapping[str, Any] = {"mixed_precision": {**FP32, "param_dtype": "bf16"}}
_SP: Mapping[str, Any] = {"ulysses_sequence_parallel_size": 2}
PACKED = _layout("packed")
MICRO1 = _layout("packed-micro1", micro=1)
MICRO3 = _layout("packed-micro3", micro=3)
PADDED = _layout("padded", model=_PADDED)
PADDED3 = _layout("padded-micro3", micro=3, model=_PADDED)
DYNAMIC = _layout("dynamic", dynamic=60)
NESTED = _layout("nested", rows="nested")
NESTED1 = _layout("nested-micro1", rows="nested", micro=1)
NESTED3 = _layout("nested-micro3", rows="nested", micro=3)
WIDE = _layout("packed-to-64", micro=3, engine={"pad_to_length": True, "pad_to_length_bucket": 64})
CHECKPOINTING = _layout("checkpointing", micro=3, model={"enable_gradient_checkpointing": True})
FSDP = _layout("fsdp2", 2)
FSDP3 = _layout("fsdp2-micro3", 2, micro=3)
FSDP_AT_ONCE = _layout(
    "fsdp2-immediate-sync", 2, micro=3, engine={"use_no_sync_for_gradient_accumulation": False}
)
FSDP_PADDED = _layout("fsdp2-padded", 2, micro=3, model=_PADDED)
FSDP_DYNAMIC = _layout("fsdp2-dynamic", 2, dynamic=60)
HSDP = _layout("hsdp2x2", 4, engine={"fsdp_size": 2})
HSDP3 = _layout("hsdp2x2-micro3", 4, micro=3, engine={"fsdp_size": 2})
ULYSSES = _layout("ulysses2-flash", 2, attention="flash", engine=_SP)
ULYSSES3 = _layout("ulysses2-flash-micro3", 2, attention="flash", micro=3, engine=_SP)
ULYSSES_DP = _layout("ulysses2-flash-dp2", 4, attention="flash", micro=3, engine=_SP)
ULYSSES_SDPA = _layout("ulysses2-sdpa", 2, micro=3, engine=_SP)
ULYSSES_EAGER = _layout("ulysses2-eager", 2, micro=3, attention="eager", engine=_SP)
MIXED = _layout("packed-mixed", engine=_BF16)
MIXED_PADDED = _layout("padded-mixed", micro=3, engine=_BF16, model=_PADDED)
FSDP_MIXED = _layout("fsdp2-mixed", 2, micro=3, engine=_BF16)
ULYSSES_MIXED = _layout("ulysses2-flash-mixed", 2, attention="flash", micro=3, engine={**_BF16, **_SP})

CELLS = (
    *(Cell(PACKED, name) for name in SETTINGS if "sft" not in name),
    Cell(PACKED, "sft"),
    Cell(PACKED, "sft first-token"),
    Cell(PACKED, "verl:token-mean", "tools"),
    Cell(PACKED, "verl:token-mean", "moe"),
    Cell(PACKED, "verl:token-mean", "tied", updates=2),
    *(Cell(MICRO1, name) for name in ("verl:token-mean", f"verl:{_NORM}", "verl:gspo")),
    *(Cell(MICRO3, name) for name in ("verl:token-mean", "verl:seq-mean-token-sum", "sft")),
    Cell(PADDED, "verl:token-mean"),
    Cell(PADDED, "verl:token-mean", "tied"),
    Cell(PADDED3, "verl:token-mean entropy=0.01"),
    Cell(PADDED3, "verl:seq-mean-token-mean"),
    *(Cell(DYNAMIC, name) for name in ("verl:token-mean", "verl:seq-mean-token-mean")),
    Cell(NESTED, "verl:token-mean"),
    Cell(NESTED3, "verl:seq-mean-token-sum"),
    Cell(NESTED1, f"verl:{_NORM}"),
    Cell(NESTED3, f"verl:{_NORM}"),
    Cell(NESTED3, f"verl:{_NORM}", "tools"),
    Cell(NESTED, "verl:token-mean kl=0.05"),
    Cell(PACKED, "verl:seq-mean-token-mean", "moe"),
    Cell(MICRO3, "sft", "moe"),
    Cell(FSDP3, "sft", "moe"),
    *(Cell(layout, "verl:token-mean", "lora") for layout in (PACKED, MICRO3, DYNAMIC, NESTED, CHECKPOINTING)),
    *(Cell(layout, "verl:token-mean", "lora") for layout in (FSDP3, HSDP3, ULYSSES3)),
    Cell(PACKED, "verl:gspo", "lora", updates=2),
    Cell(PADDED3, "verl:token-mean kl=0.05", "lora"),
    Cell(FSDP_PADDED, "sft", "lora"),
    Cell(WIDE, "verl:token-mean"),
    Cell(CHECKPOINTING, "verl:token-mean"),
    Cell(FSDP, "verl:token-mean", updates=2),
    Cell(FSDP, "verl:dr_grpo"),
    Cell(FSDP, "verl:token-mean", "moe"),
    *(Cell(FSDP3, name) for name in ("verl:token-mean", "verl:gspo", "sft", "sft first-token")),
    Cell(FSDP_AT_ONCE, "verl:token-mean"),
    Cell(FSDP_PADDED, "verl:seq-mean-token-mean", "tied"),
    Cell(FSDP_DYNAMIC, "verl:token-mean"),
    Cell(HSDP, "verl:token-mean"),
    Cell(HSDP3, "verl:seq-mean-token-sum"),
    *(Cell(ULYSSES, name) for name in ("verl:token-mean", "verl:seq-mean-token-mean")),
    *(Cell(ULYSSES3, name) for name in ("verl:token-mean", "verl:token-mean T=0.7", "sft")),
    Cell(ULYSSES3, "verl:token-mean entropy=0.01"),
    Cell(ULYSSES_DP, "verl:token-mean"),
    Cell(ULYSSES_DP, "sft", "tied"),
    Cell(HSDP, "sft"),
    Cell(FSDP_AT_ONCE, "verl:gspo"),
    Cell(FSDP_DYNAMIC, "verl:seq-mean-token-mean", "tools"),
    Cell(ULYSSES_SDPA, "verl:token-mean"),
    Cell(ULYSSES_EAGER, "verl:token-mean"),
    *(Cell(MIXED, name, precision="bfloat16") for name in ("verl:token-mean", "verl:gspo", "sft")),
    Cell(MIXED, "sft", "tied", precision="bfloat16", updates=2),
    Cell(MIXED_PADDED, "sft", precision="bfloat16"),
    *(Cell(FSDP_MIXED, name, precision="bfloat16") for name in ("verl:token-mean", "sft")),
    Cell(ULYSSES_MIXED, "sft", precision="bfloat16"),
)

PINNED = (
    PACKED.name,
    MICRO3.name,
    PADDED3.name,
    NESTED3.name,
    FSDP3.name,
    ULYSSES3.name,
    ULYSSES_SDPA.name,
    FSDP_MIXED.name,
)
"""Layouts that run on verl's own pins, too."""
