"""Presets with what they reproduce: a paper, or a trainer's configuration that says everything it changes.

A value that a trainer merely recommends is not a part of a preset unless the configuration says it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

PAPER, TRL, TRL_RLOO, VERL = "the paper", "TRL 1.16 GRPOConfig", "TRL 1.16 RLOOConfig", "verl 0.9"


@dataclass(frozen=True)
class Recipe:
    """A preset.

    Attributes:
        values: fields of the objective that it sets.
        of: the trainer, or the paper.
        settings: what a user of the trainer writes; everything else is the trainer's default.
        note: conditions under which the two agree, and the source of a paper.
    """

    values: Mapping[str, Any]
    of: str = PAPER
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def reproduces(self) -> str:
        """Trainer and configuration, or paper, as one text."""
        if self.of == PAPER:
            return self.note
        written = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        text = f"{self.of}({written})" if self.of != VERL else f"{self.of} with {written or 'its defaults'}"
        return f"{text}; {self.note}" if self.note else text


def _paper(source: str, **values: Any) -> Recipe:
    return Recipe(values, note=source)


PAPERS: dict[str, Recipe] = {
    "grpo": _paper(
        "DeepSeekMath, arXiv 2402.03300, eq. 3 and 4", aggregation="seq-mean-token-mean", kl_coef=0.04
    ),
    "dr_grpo": _paper(
        'Dr. GRPO, "Understanding R1-Zero-like training", arXiv 2503.20783',
        scale="none",
        aggregation="seq-mean-token-sum-norm",
    ),
    "dapo": _paper("DAPO, arXiv 2503.14476", clip_high=0.28),
    "bnpo": _paper(
        "BNPO, arXiv 2506.02864: the average is over the batch of one backward pass",
        denominator_scope="microbatch",
    ),
    "gspo": _paper(
        "GSPO, arXiv 2507.18071",
        importance_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="seq-mean-token-mean",
    ),
    "cispo": _paper(
        "CISPO, MiniMax-M1, arXiv 2506.13585: only an upper bound",
        loss="cispo",
        clip_bounds="absolute",
        clip_low=0.0,
        clip_high=5.0,
    ),
    "rloo": _paper(
        "RLOO, arXiv 2402.14740: REINFORCE on whole completions, KL in the reward",
        advantage="rloo",
        scale="none",
        loss="reinforce",
        kl_coef=0.05,
        kl_estimator="k1",
        kl_placement="reward",
        aggregation="seq-mean-token-sum",
    ),
    "reinforce_plus_plus": _paper(
        "REINFORCE++, arXiv 2501.03262",
        advantage="reinforce_plus_plus",
        kl_coef=0.01,
        kl_estimator="k1",
        kl_placement="reward",
    ),
    "reinforce_plus_plus_baseline": _paper(
        "REINFORCE++-baseline, arXiv 2501.03262",
        advantage="reinforce_plus_plus_baseline",
        kl_coef=0.01,
        kl_estimator="k2",
    ),
}

_TRL_DEFAULTS: dict[str, Any] = {
    "eps": 1e-4,
    "kl_bias_correction": True,
    "entropy_aggregation": "token-mean",
    "entropy_scope": "microbatch",
    "statistics_scope": "microbatch",
    "missing_rewards": "exclude",
}
_ONE_WINDOW = "one rollout batch is one optimizer step (steps_per_generation = gradient_accumulation_steps)"


_EXPERTS = (
    "a mixture of experts has its router loss besides: model.router_coef, by default that of the model's own "
    "configuration, with model.router_scope=microbatch"
)


def _trl(settings: Mapping[str, Any], values: Mapping[str, Any], note: str = "") -> Recipe:
    return Recipe({**_TRL_DEFAULTS, **values}, TRL, settings, f"{note}; {_EXPERTS}" if note else _EXPERTS)


TRL_RECIPES: dict[str, Recipe] = {
    "trl:grpo": _trl({"loss_type": "grpo"}, {"aggregation": "seq-mean-token-mean"}),
    "trl:dapo": _trl({}, {}, _ONE_WINDOW),
    "trl:bnpo": _trl({"loss_type": "bnpo"}, {"denominator_scope": "microbatch"}),
    "trl:dr_grpo": _trl(
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"scale": "none", "aggregation": "seq-mean-token-sum-norm"},
    ),
    "trl:cispo": _trl(
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss": "cispo", "clip_bounds": "absolute", "clip_low": 0.0, "clip_high": 5.0},
        f"epsilon_high is the cap itself, by default that of epsilon, 0.2; {_ONE_WINDOW}",
    ),
    "trl:sapo": _trl({"loss_type": "sapo"}, {"loss": "sapo", "aggregation": "seq-mean-token-mean"}),
    "trl:vespo": _trl({"loss_type": "vespo"}, {"loss": "vespo"}, _ONE_WINDOW),
    "trl:gspo": _trl(
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {
            "importance_level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "seq-mean-token-mean",
        },
    ),
    "trl:luspo": _trl(
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 2e-3,
            "epsilon_high": 2.5e-3,
        },
        {
            "importance_level": "sequence",
            "clip_low": 2e-3,
            "clip_high": 2.5e-3,
            "aggregation": "seq-mean-token-sum",
        },
    ),
    "trl:rloo": Recipe(
        {
            **_TRL_DEFAULTS,
            "advantage": "rloo",
            "scale": "none",
            "importance_level": "sequence_product",
            "kl_coef": 0.05,
            "kl_estimator": "k1",
            "kl_placement": "reward",
            "kl_bias_correction": False,
            "aggregation": "seq-mean-token-mean",
        },
        TRL_RLOO,
        {},
        f"a completion without loss tokens adds a constant to the loss that it reports, and no gradient; {_EXPERTS}",
    ),
}

_VERL_DEFAULTS: dict[str, Any] = {
    "single_sample": "raw",
    "dual_clip": 3.0,
    "log_ratio_min": -20.0,
    "log_ratio_max": 20.0,
    "kl_log_ratio_clamp": 20.0,
    "kl_clamp": 10.0,
    "correction_log_clamp": 20.0,
}
_FREE: dict[str, Any] = {"dual_clip": None, "log_ratio_min": None, "log_ratio_max": None}
_ESTIMATOR = "algorithm.adv_estimator"
_MODE = "actor.policy_loss.loss_mode"
_AGGREGATION = "actor.loss_agg_mode"


def _verl(settings: Mapping[str, Any], values: Mapping[str, Any], note: str = "") -> Recipe:
    return Recipe({**_VERL_DEFAULTS, **values}, VERL, {_ESTIMATOR: "grpo", **settings}, note)


def _estimated(estimator: str, note: str = "", **values: Any) -> Recipe:
    return _verl({_ESTIMATOR: estimator}, {"advantage": estimator, **values}, note)


_BY_SAMPLE = {"aggregation": "seq-mean-token-mean"}
_PADDED = "responses padded to data.max_response_length, as in the trainer before v1"
VERL_RECIPES: dict[str, Recipe] = {
    **{
        f"verl:{mode}": _verl({_AGGREGATION: mode}, {} if mode == "token-mean" else {"aggregation": mode})
        for mode in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")
    },
    "verl:seq-mean-token-sum-norm": _verl(
        {_AGGREGATION: "seq-mean-token-sum-norm"}, {"aggregation": "seq-mean-token-sum-norm"}, _PADDED
    ),
    "verl:seq-mean-token-sum-norm-v1": _verl(
        {_AGGREGATION: "seq-mean-token-sum-norm"},
        {"aggregation": "seq-mean-token-sum-norm", "norm_rule": "longest"},
        "the trainer v1, which is the default: rows of a microbatch are padded to its longest response",
    ),
    "verl:dr_grpo": _verl(
        {"algorithm.norm_adv_by_std_in_grpo": False, _AGGREGATION: "seq-mean-token-sum-norm"},
        {"scale": "none", "aggregation": "seq-mean-token-sum-norm"},
        _PADDED,
    ),
    "verl:gspo": _verl(
        {
            _MODE: "gspo",
            "actor.clip_ratio_low": 3e-4,
            "actor.clip_ratio_high": 4e-4,
            _AGGREGATION: "seq-mean-token-mean",
        },
        {
            **_FREE,
            **_BY_SAMPLE,
            "importance_level": "sequence",
            "sequence_gradient": "token",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "log_ratio_max": 10.0,
        },
    ),
    "verl:cispo": _verl({_MODE: "cispo"}, {"loss": "cispo", "dual_clip": None}),
    "verl:sapo": _verl(
        {_MODE: "sapo", _AGGREGATION: "seq-mean-token-mean"},
        {**_BY_SAMPLE, "loss": "sapo", "dual_clip": None},
        "the policy loss has this aggregation whatever actor.loss_agg_mode says, KL and entropy have that one",
    ),
    "verl:dppo_tv": _verl(
        {_MODE: "dppo_tv"},
        {"loss": "dppo_tv", "dual_clip": None, "delta": 3.0},
        "delta is actor.clip_ratio_c",
    ),
    "verl:dppo_kl": _verl(
        {_MODE: "dppo_kl"},
        {"loss": "dppo_kl", "dual_clip": None, "delta": 3.0},
        "delta is actor.clip_ratio_c",
    ),
    "verl:clip_cov": _verl(
        {_MODE: "clip_cov"},
        {**_FREE, "loss": "clip_cov", "statistics_scope": "microbatch"},
        "which of the tokens within the bounds are left out is drawn at random in both, by cov_seed here",
    ),
    "verl:kl_cov": _verl({_MODE: "kl_cov"}, {**_FREE, "loss": "kl_cov", "statistics_scope": "microbatch"}),
    "verl:geo_mean": _verl(
        {_MODE: "geo_mean", _AGGREGATION: "seq-mean-token-mean"},
        {**_FREE, **_BY_SAMPLE, "loss": "geo_mean", "denominator_scope": "microbatch_sum"},
        "the policy loss is the mean over each microbatch, and those are added up; KL and entropy terms agree if "
        "a rank has one microbatch",
    ),
    "verl:gpg": _verl(
        {_ESTIMATOR: "gpg", _MODE: "gpg"}, {"advantage": "gpg", "loss": "reinforce", "dual_clip": None}
    ),
    "verl:bypass_mode": _verl(
        {_MODE: "bypass_mode", "algorithm.rollout_correction.bypass_mode": True}, {"old_log_probs": "sampler"}
    ),
    "verl:bypass_mode-reinforce": _verl(
        {
            _MODE: "bypass_mode",
            "algorithm.rollout_correction.bypass_mode": True,
            "algorithm.rollout_correction.loss_type": "reinforce",
        },
        {
            "loss": "reinforce",
            "dual_clip": None,
            "old_log_probs": "sampler",
            "correction_policy": "current",
            "sampler_correction": "sequence_truncate",
            "correction_max": 2.0,
            "statistics_scope": "microbatch",
        },
        "sequence weights of at most 2 are the default of rollout_correction",
    ),
    "verl:rloo": _estimated("rloo", scale="none"),
    "verl:rloo_vectorized": _verl(
        {_ESTIMATOR: "rloo_vectorized"}, {"advantage": "rloo", "scale": "none", "single_sample": "zero"}
    ),
    "verl:grpo_vectorized": _verl({_ESTIMATOR: "grpo_vectorized"}, {}),
    "verl:reinforce_plus_plus": _estimated("reinforce_plus_plus"),
    "verl:reinforce_plus_plus_baseline": _estimated("reinforce_plus_plus_baseline"),
    "verl:opo": _estimated("opo"),
    "verl:grpo_passk": _estimated("grpo_passk"),
    "verl:gdpo": _estimated(
        "gdpo", "rewards and weights are algorithm.gdpo_reward_keys and gdpo_reward_weights"
    ),
    "verl:remax": _estimated("remax"),
    "verl:gae": _estimated("gae", "values come from a critic"),
    "verl:optimal_token_baseline": _estimated("optimal_token_baseline"),
    "verl:tir_optimal_token_baseline": _estimated("tir_optimal_token_baseline"),
}

SUPERVISED: dict[str, Recipe] = {
    "sft": _paper(
        "supervised fine-tuning: the mean negative log-likelihood of the loss tokens",
        advantage="constant",
        loss="reinforce",
    )
}
RECIPES: Mapping[str, Recipe] = MappingProxyType(PAPERS | TRL_RECIPES | VERL_RECIPES | SUPERVISED)
