"""A preset says what a user of the trainer writes, and sets nothing that this configuration does not say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from names import TRL
from trl import GRPOConfig, RLOOConfig
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
from verl.workers.config import ActorConfig, PolicyLossConfig

from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import AGGREGATIONS, LOSSES
from regress.grpo.objective_presets import make_objective
from regress.grpo.preset_recipes import RECIPES

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_NUMBERS = {"loss_type", "scale_rewards", "importance_sampling_level", "multi_objective_aggregation"}
"""Settings of TRL whose values have other names here, and are held apart."""
OFF_WITHOUT_VLLM = {name for name in TRL if name.startswith("vllm_importance_sampling")}
LEVEL = {"token": "token", "sequence": "sequence"}


def said_by_trl(config: Any, objective: Objective) -> dict[str, tuple[Any, Any]]:
    """Return what TRL's configuration says and what the objective has, by the objective's field."""
    found = {}
    for name, key in TRL.items():
        section, _, field = key.partition(".")
        own = section == "algorithm" and hasattr(config, name)
        if own and name not in NOT_NUMBERS | OFF_WITHOUT_VLLM:
            found[field] = (getattr(config, name), getattr(objective, field))
    return found


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("trl:")])
def test_trl(name: str, tmp_path: Path) -> None:
    recipe, objective = RECIPES[name], make_objective(name)
    kind = RLOOConfig if name == "trl:rloo" else GRPOConfig
    config: Any = kind(output_dir=str(tmp_path), use_cpu=True, bf16=False, **recipe.settings)
    said = said_by_trl(config, objective)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    low = 0.0 if objective.loss == "cispo" else config.epsilon
    said |= {"clip_low": (low, objective.clip_low), "clip_high": (high, objective.clip_high)}
    said["entropy_controller"] = (
        "adaptive" if getattr(config, "use_adaptive_entropy", False) else "fixed",
        objective.entropy_controller,
    )
    if kind is RLOOConfig:
        said["reward_max"] = (config.reward_clip_range, objective.reward_max)
    else:
        said["scale"] = (config.scale_rewards, objective.scale)
        said["importance_level"] = (LEVEL[config.importance_sampling_level], objective.importance_level)
        said["reward_aggregation"] = (config.multi_objective_aggregation, objective.reward_aggregation)
    assert {field: pair for field, pair in said.items() if pair[0] != pair[1]} == {}
    assert objective.sampler_correction == "none"
    for setting in recipe.settings:
        assert setting in TRL, f"{name} writes {setting}, which TRL has not"
        assert f"{setting}={recipe.settings[setting]!r}" in recipe.reproduces


def default(kind: type, name: str) -> Any:
    return next(spec.default for spec in dataclasses.fields(kind) if spec.name == name)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("verl:")])
def test_verl(name: str) -> None:
    recipe, o = RECIPES[name], make_objective(name)
    rest = dict(recipe.settings)

    def said(key: str, kind: type) -> Any:
        return rest.pop(key, default(kind, key.rpartition(".")[2]))

    rest.pop("algorithm.adv_estimator")
    mode = said("actor.policy_loss.loss_mode", PolicyLossConfig)
    aggregation = said("actor.loss_agg_mode", ActorConfig)
    bypass = said("algorithm.rollout_correction.bypass_mode", RolloutCorrectionConfig)
    kind = said("algorithm.rollout_correction.loss_type", RolloutCorrectionConfig)
    norm = said("algorithm.norm_adv_by_std_in_grpo", AlgoConfig)
    low, high = said("actor.clip_ratio_low", ActorConfig), said("actor.clip_ratio_high", ActorConfig)
    assert not rest, f"{name} writes {', '.join(rest)}, which says nothing of the objective"
    losses = {"vanilla": "ppo_clip", "gspo": "ppo_clip", "gpg": "reinforce", "bypass_mode": kind}
    loss = losses.get(mode, mode)
    cap = default(ActorConfig, "clip_ratio_c")
    expected: dict[str, Any] = {
        "loss": loss,
        "aggregation": aggregation,
        "clip_low": low,
        "clip_high": high,
        "dual_clip": cap if mode in ("vanilla", "bypass_mode") and loss == "ppo_clip" else None,
        "delta": cap if mode.startswith("dppo") else None,
        "kl_coef": 0.0 if not default(ActorConfig, "use_kl_loss") else None,
        "entropy_coef": default(ActorConfig, "entropy_coeff"),
        "gamma": default(AlgoConfig, "gamma"),
        "lam": default(AlgoConfig, "lam"),
        "sapo_tau_pos": default(ActorConfig, "tau_pos"),
        "sapo_tau_neg": default(ActorConfig, "tau_neg"),
        "cov_fraction": default(PolicyLossConfig, "clip_cov_ratio"),
        "cov_low": default(PolicyLossConfig, "clip_cov_lb"),
        "cov_high": default(PolicyLossConfig, "clip_cov_ub"),
        "cov_kl_coef": default(PolicyLossConfig, "ppo_kl_coef"),
        "old_log_probs": "sampler" if bypass else "recompute",
    }
    if mode == "bypass_mode" and kind == "reinforce":
        expected["correction_max"] = default(RolloutCorrectionConfig, "rollout_is_threshold")
    if o.advantage == "grpo":
        expected["scale"] = "group" if norm else "none"
    assert {
        field: (value, getattr(o, field)) for field, value in expected.items() if getattr(o, field) != value
    } == {}
    assert loss in LOSSES
    assert aggregation in AGGREGATIONS
