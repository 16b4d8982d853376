"""Cells of TRL: its losses with the settings of each, over layouts of accumulation and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from regress.systems.protocol import Cell, Declared, Layout

_DDP: Mapping[str, Any] = {"wrapper": "DistributedDataParallel"}
_FSDP: Mapping[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}
_HIDDEN = "TRL takes truncated completions out of the attention mask, too, so the model does not see them"
_LOCAL = "bnpo divides by the tokens of the microbatch by its definition, and the truth has one microbatch"


@dataclass(frozen=True)
class Setting:
    """Arguments of a TRL configuration, and the engine's keys for the same objective.

    Attributes:
        arguments, truth: those.
        trainer: class of TRL.
        sampled: the sampler's log-probs are given, and corrected for.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    truth: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = "GRPOTrainer"
    sampled: bool = False

    @property
    def special(self) -> bool:
        """True if it needs a layout or a case of its own, or several updates."""
        names = ("num_iterations", "router_aux_loss_coef", "mask_truncated_completions")
        return self.sampled or any(name in self.arguments for name in names)


def _loss(
    preset: str,
    loss_type: str,
    *,
    truth: Mapping[str, Any] | None = None,
    sampled: bool = False,
    **arguments: Any,
) -> Setting:
    found = {"algorithm.preset": preset, **(truth or {})}
    return Setting({"loss_type": loss_type, **arguments}, found, sampled=sampled)


_PLAIN: Mapping[str, Setting] = {
    "trl:grpo": _loss("trl:grpo", "grpo"),
    "trl:dapo": _loss("trl:dapo", "dapo"),
    "trl:bnpo": _loss("trl:bnpo", "bnpo"),
    "trl:dr_grpo": _loss("trl:dr_grpo", "dr_grpo", scale_rewards="none"),
    "trl:cispo": _loss("trl:cispo", "cispo", epsilon_high=5.0),
    "trl:gspo": _loss(
        "trl:gspo", "grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    ),
    "trl:luspo": _loss(
        "trl:luspo", "luspo", importance_sampling_level="sequence", epsilon=2e-3, epsilon_high=2.5e-3
    ),
    "trl:sapo": _loss("trl:sapo", "sapo"),
    "trl:vespo": _loss("trl:vespo", "vespo"),
    "trl:rloo": Setting(
        {"beta": 0.0}, {"algorithm.preset": "trl:rloo", "algorithm.kl_coef": 0.0}, "RLOOTrainer"
    ),
}
_TWICE: Mapping[str, Any] = {"trainer.epochs": 2, "algorithm.old_log_probs": "recompute"}


def _twice(setting: Setting, truth: Mapping[str, Any] | None = None, **arguments: Any) -> Setting:
    """Return a setting with two updates of each rollout batch, so that the second is off policy."""
    return Setting(
        {**setting.arguments, "num_iterations": 2, **arguments},
        {**setting.truth, **_TWICE, **(truth or {})},
        setting.trainer,
    )


def _sampled(mode: str, level: str = "trl:dapo") -> Setting:
    """Return a setting that corrects for the sampler's log-probs, which are others than the policy's."""
    plain = _PLAIN[level]
    limits = {"vllm_importance_sampling_clip_min": 0.4, "vllm_importance_sampling_clip_max": 1.5}
    keys = {
        "sampler_correction": mode,
        "correction_min": 0.4,
        "correction_max": 1.5,
        "old_log_probs": "recompute",
    }
    return Setting(
        {**plain.arguments, "vllm_importance_sampling_mode": mode, **limits},
        {**plain.truth, **{f"algorithm.{key}": value for key, value in keys.items()}},
        sampled=True,
    )


_TRUNCATED = "trl:dapo without truncated"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_WIDE: Mapping[str, Any] = {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.28}
SETTINGS: Mapping[str, Setting] = {
    **_PLAIN,
    "trl:dapo scale=batch": _loss(
        "trl:dapo", "dapo", scale_rewards="batch", truth={"algorithm.scale": "batch"}
    ),
    "trl:grpo scale=none": _loss("trl:grpo", "grpo", scale_rewards="none", truth={"algorithm.scale": "none"}),
    "trl:dapo T=1.3": _loss("trl:dapo", "dapo", temperature=1.3, truth={"rollout_worker.temperature": 1.3}),
    "trl:grpo T=0.7": _loss("trl:grpo", "grpo", temperature=0.7, truth={"rollout_worker.temperature": 0.7}),
    "trl:grpo beta=0.05": _loss("trl:grpo", "grpo", beta=0.05, truth={"algorithm.kl_coef": 0.05}),
    "trl:dapo beta=0.1 uncorrected": _loss(
        "trl:dapo",
        "dapo",
        beta=0.1,
        use_bias_correction_kl=False,
        truth={"algorithm.kl_coef": 0.1, "algorithm.kl_bias_correction": False},
    ),
    "trl:dapo entropy=0.05": _loss(
        "trl:dapo", "dapo", entropy_coef=0.05, truth={"algorithm.entropy_coef": 0.05}
    ),
    "trl:grpo top-entropy=0.4": _loss(
        "trl:grpo", "grpo", top_entropy_quantile=0.4, truth={"algorithm.top_entropy_quantile": 0.4}
    ),
    _TRUNCATED: _loss(
        "trl:dapo",
        "dapo",
        mask_truncated_completions=True,
        truth={"algorithm.mask_truncated_completions": True},
    ),
    "trl:grpo without router loss": _loss("trl:grpo", "grpo", router_aux_loss_coef=0.0),
    "trl:dapo without router loss": _loss("trl:dapo", "dapo", router_aux_loss_coef=0.0),
    "trl:rloo beta=0.05": Setting(
        {"beta": 0.05},
        {
            "algorithm.preset": "trl:rloo",
            "algorithm.kl_coef": 0.05,
            "algorithm.old_log_probs": "recompute",
        },
        "RLOOTrainer",
    ),
    "trl:rloo normalized": Setting(
        {"beta": 0.0, "normalize_advantages": True},
        {
            "algorithm.preset": "trl:rloo",
            "algorithm.kl_coef": 0.0,
            "algorithm.normalize_advantages": True,
        },
        "RLOOTrainer",
    ),
    "trl:rloo clipped rewards": Setting(
        {"beta": 0.0, "reward_clip_range": (0.2, 0.8)},
        {
            "algorithm.preset": "trl:rloo",
            "algorithm.kl_coef": 0.0,
            "algorithm.reward_min": 0.2,
            "algorithm.reward_max": 0.8,
        },
        "RLOOTrainer",
    ),
    **{f"{name} twice": _twice(_PLAIN[name]) for name in _PLAIN},
    "trl:dapo twice wide": _twice(_PLAIN["trl:dapo"], _WIDE, epsilon=0.1, epsilon_high=0.28),
    "trl:dapo twice delta=1.25": _twice(_PLAIN["trl:dapo"], {"algorithm.delta": 1.25}, delta=1.25),
    "trl:dapo twice beta=0.1": _twice(_PLAIN["trl:dapo"], {"algorithm.kl_coef": 0.1}, beta=0.1),
    "trl:dapo twice off-policy": _twice(
        _PLAIN["trl:dapo"],
        {"algorithm.off_policy_threshold": 0.01, "algorithm.off_policy_reference": "old"},
        off_policy_mask_threshold=0.01,
    ),
    **{f"trl:dapo {mode}": _sampled(mode) for mode in MODES},
    "trl:gspo sequence_mask": _sampled("sequence_mask", "trl:gspo"),
}
"""Objective of a cell -> the settings of TRL and of the engine."""


def _layout(name: str, ranks: int = 1, **settings: Any) -> Layout:
    return Layout(name, ranks, settings)


PADDED = _layout("padded")
ACCUMULATION = _layout("accumulation", per_device=3)
SINGLE = _layout("one-sample-accumulation", per_device=1)
CHECKPOINTING = _layout("checkpointing", arguments={"gradient_checkpointing": True})
WIDE = _layout("padded-to-16", arguments={"pad_to_multiple_of": 16})
DDP = _layout("ddp2", 2, expected=_DDP)
DDP_ACCUMULATION = _layout("ddp2-accumulation", 2, per_device=2, expected=_DDP)
DDP4 = _layout("ddp4", 4, expected=_DDP)
FSDP = _layout("fsdp2-accelerate", 2, arguments=_FSDP, expected={"held": 0.5, "placement": "Shard"})
FSDP_ACCUMULATION = _layout(
    "fsdp2-accelerate-accumulation",
    2,
    per_device=3,
    arguments=_FSDP,
    expected={"held": 0.5, "placement": "Shard"},
)
SAMPLED = _layout("sampled")
SAMPLED_ACCUMULATION = _layout("sampled-accumulation", per_device=3)
SAMPLED_DDP = _layout("sampled-ddp2", 2, expected=_DDP)

FIRST = (
    *(Cell(PADDED, name) for name in SETTINGS if not SETTINGS[name].special),
    Cell(PADDED, _TRUNCATED, declared=(Declared("coverage", _HIDDEN, amount=0.0),)),
    Cell(PADDED, "trl:dapo", "tied", updates=2),
    Cell(PADDED, "trl:grpo without router loss", "moe"),
    Cell(PADDED, "trl:dapo", "tools"),
    Cell(PADDED, "trl:dapo", "gpt2"),
    *(Cell(ACCUMULATION, name, updates=2) for name in ("trl:grpo", "trl:dapo", "trl:dr_grpo", "trl:cispo")),
    Cell(ACCUMULATION, "trl:bnpo", declared=(Declared("loss", _LOCAL, amount=1.189),)),
    Cell(ACCUMULATION, "trl:rloo"),
    Cell(SINGLE, "trl:dapo"),
    Cell(SINGLE, "trl:gspo"),
    Cell(CHECKPOINTING, "trl:dapo"),
    Cell(WIDE, "trl:grpo"),
    *(Cell(DDP, name) for name in ("trl:grpo", "trl:dapo", "trl:dr_grpo", "trl:luspo", "trl:rloo")),
    Cell(DDP_ACCUMULATION, "trl:dapo", updates=2),
    Cell(DDP_ACCUMULATION, "trl:dapo", "tied"),
    Cell(DDP4, "trl:grpo"),
    *(Cell(FSDP, name) for name in ("trl:grpo", "trl:dapo")),
    Cell(FSDP, "trl:dapo without router loss", "moe"),
    Cell(FSDP_ACCUMULATION, "trl:dapo", updates=2),
)


def _more() -> Iterator[Cell]:
    """Yield every loss over each layout, two updates of a batch, corrections for the sampler, and other models."""
    known = {cell.name for cell in FIRST}
    for name in _PLAIN:
        for layout in (ACCUMULATION, DDP, DDP_ACCUMULATION, FSDP, FSDP_ACCUMULATION):
            cell = Cell(layout, name)
            if name != "trl:bnpo" and cell.name not in known:
                yield cell
    for name in SETTINGS:
        if " twice" in name:
            yield Cell(PADDED, name, updates=2)
    for layout in (ACCUMULATION, DDP, FSDP):
        for name in ("trl:grpo twice", "trl:dapo twice", "trl:gspo twice"):
            yield Cell(layout, name, updates=2)
    yield Cell(PADDED, "trl:dapo twice", "tied", updates=2)
    yield Cell(DDP, "trl:rloo twice", updates=2)
    for name in SETTINGS:
        if SETTINGS[name].sampled:
            yield Cell(SAMPLED, name)
    yield Cell(SAMPLED, "trl:dapo token_truncate", "tools")
    yield Cell(SAMPLED_ACCUMULATION, "trl:dapo token_mask")
    yield Cell(SAMPLED_DDP, "trl:dapo sequence_truncate")
    for layout in (ACCUMULATION, DDP, FSDP):
        yield Cell(layout, "trl:dapo", "tools")
    for layout in (PADDED, ACCUMULATION, DDP, DDP_ACCUMULATION, FSDP):
        yield Cell(layout, "trl:dapo", "lora")
    yield Cell(PADDED, "trl:grpo beta=0.05", "lora")
    yield Cell(PADDED, "trl:gspo twice", "lora", updates=2)
    yield Cell(PADDED, "trl:rloo", "lora")
    yield Cell(ACCUMULATION, "trl:grpo", "tied")
    yield Cell(FSDP, "trl:grpo", "tied")
    yield Cell(DDP, "trl:grpo without router loss", "moe")
    yield Cell(ACCUMULATION, "trl:dapo without router loss", "moe")


CELLS = (*FIRST, *_more())
