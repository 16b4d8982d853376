"""Named objectives: the papers' under plain names, engines' under ``engine:name``. Imports no torch.

``trl:*`` reproduce TRL 1.16 (``GRPOTrainer`` with ``loss_type=name``; ``trl:rloo`` is its ``RLOOTrainer``),
where one rollout batch is one optimizer step. ``verl:*`` reproduce verl 0.9 (``loss_agg_mode=name``, or the
policy loss or advantage estimator of that name). Tests that run those packages hold both to it.
"""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from regress.errors import ConfigError
from regress.grpo.checks import check_objective
from regress.grpo.objective import Objective

_PAPERS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300, eq. 3 and 4
    "grpo": {"aggregation": "seq-mean-token-mean", "kl_coef": 0.04},
    # "Understanding R1-Zero-like training", arXiv 2503.20783
    "dr_grpo": {"scale": "none", "aggregation": "seq-mean-token-sum-norm"},
    # arXiv 2503.14476
    "dapo": {"clip_high": 0.28},
    # arXiv 2506.02864: the average is over the batch of one backward pass
    "bnpo": {"denominator_scope": "microbatch"},
    # arXiv 2507.18071
    "gspo": {
        "importance_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
    },
    # MiniMax-M1, arXiv 2506.13585: only an upper bound
    "cispo": {"loss": "cispo", "clip_bounds": "absolute", "clip_low": 0.0, "clip_high": 5.0},
    # arXiv 2402.14740: REINFORCE on whole completions, KL in the reward
    "rloo": {
        "advantage": "rloo",
        "scale": "none",
        "loss": "reinforce",
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "kl_placement": "reward",
        "aggregation": "seq-mean-token-sum",
    },
    # arXiv 2501.03262
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus",
        "kl_coef": 0.01,
        "kl_estimator": "k1",
        "kl_placement": "reward",
    },
    "reinforce_plus_plus_baseline": {
        "advantage": "reinforce_plus_plus_baseline",
        "kl_coef": 0.01,
        "kl_estimator": "k2",
    },
}

_TRL: dict[str, Any] = {"eps": 1e-4, "kl_bias_correction": True}

_TRL_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": "seq-mean-token-mean"},
    "dapo": {},
    "bnpo": {"denominator_scope": "microbatch"},
    # with scale_rewards="none", as its documentation asks
    "dr_grpo": {"scale": "none", "aggregation": "seq-mean-token-sum-norm"},
    # epsilon_high is the cap itself, and there is no lower bound
    "cispo": {"loss": "cispo", "clip_bounds": "absolute", "clip_low": 0.0, "clip_high": 5.0},
    # loss_type="grpo", importance_sampling_level="sequence"
    "gspo": {
        "importance_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
    },
    "luspo": {
        "importance_level": "sequence",
        "clip_low": 2e-3,
        "clip_high": 2.5e-3,
        "aggregation": "seq-mean-token-sum",
    },
    "rloo": {
        "advantage": "rloo",
        "scale": "none",
        "importance_level": "sequence_product",
        "kl_coef": 0.05,
        "kl_estimator": "k1",
        "kl_placement": "reward",
        "kl_bias_correction": False,
        "aggregation": "seq-mean-token-mean",
    },
}

_VERL: dict[str, Any] = {
    "single_sample": "raw",
    "dual_clip": 3.0,
    "log_ratio_min": -20.0,
    "log_ratio_max": 20.0,
    "kl_log_ratio_clamp": 20.0,
    "kl_clamp": 10.0,
}

_VERL_MODES: dict[str, dict[str, Any]] = {
    "token-mean": {},
    "token-sum": {"aggregation": "token-sum"},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {"aggregation": "seq-mean-token-sum-norm"},
    # norm_adv_by_std_in_grpo=False
    "dr_grpo": {"scale": "none", "aggregation": "seq-mean-token-sum-norm"},
    "gspo": {
        "importance_level": "sequence",
        "sequence_gradient": "token",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "dual_clip": None,
        "log_ratio_min": None,
        "log_ratio_max": 10.0,
        "aggregation": "seq-mean-token-mean",
    },
    "cispo": {"loss": "cispo", "dual_clip": None},
    "rloo": {"advantage": "rloo", "scale": "none"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline"},
}

_SUPERVISED: dict[str, dict[str, Any]] = {
    # the mean negative log-likelihood of the loss tokens
    "sft": {"advantage": "constant", "loss": "reinforce"},
}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    _PAPERS
    | {f"trl:{name}": _TRL | values for name, values in _TRL_LOSSES.items()}
    | {f"verl:{name}": _VERL | values for name, values in _VERL_MODES.items()}
    | _SUPERVISED
)


def preset_values(name: str) -> Mapping[str, Any]:
    """Return the fields that preset ``name`` sets; `ConfigError` names the nearest preset if there is none."""
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"preset={name!r} is unknown: the nearest preset is {near!r}, of {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def make_objective(preset: str | None = None, **overrides: Any) -> Objective:
    """Return a checked `Objective`: defaults, then the preset's fields, then ``overrides``. Raises
    `ConfigError`.
    """
    known = [spec.name for spec in fields(Objective)]
    for name in overrides:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{name} is no field of the objective: the nearest is {near}.")
    values = dict(preset_values(preset)) if preset is not None else {}
    objective = Objective(**(values | overrides))
    check_objective(objective)
    return objective
