"""Every name of TRL's and verl's configuration classes is expressed, or left out for a reason."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any

import pytest
from names import KL, LEFT_OUT, NOT_THE_OBJECTIVE, TRL, VERL, compared_texts, own_keys, unknown
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl_objective import AGGREGATIONS_OF_REWARDS, LEVELS, LOSS_TYPES, MODES, SCALES
from verl.trainer.config import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.config.algorithm import FilterGroupsConfig, KLControlConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS
from verl.workers.config import ActorConfig, PolicyLossConfig

from regress.engine.config.config_schema import options
from regress.grpo.batch_resampling import PF_PPO_METHODS
from regress.grpo.objective_catalogue import ADVANTAGES, REJECTIONS
from regress.grpo.objective_presets import PRESETS, make_objective
from regress.grpo.preset_recipes import RECIPES

OF_TRL = f"TRL {version('trl')}"
OF_VERL = f"verl {version('verl')}"
SETTINGS: dict[str, set[str]] = {
    "loss_type": set(LOSS_TYPES),
    "importance_sampling_level": set(LEVELS),
    "scale_rewards": set(SCALES),
    "multi_objective_aggregation": set(AGGREGATIONS_OF_REWARDS),
    "vllm_importance_sampling_mode": set(MODES),
}
"""Values of TRL's settings that the comparisons draw from."""
CONFIGURATIONS = (
    AlgoConfig,
    FilterGroupsConfig,
    KLControlConfig,
    RolloutCorrectionConfig,
    ActorConfig,
    PolicyLossConfig,
)


def own_fields(*classes: type) -> set[str]:
    inherited = {spec.name for spec in dataclasses.fields(TrainingArguments)}
    return {spec.name for one in classes for spec in dataclasses.fields(one)} - inherited


def test_every_setting_of_trl_is_known() -> None:
    assert not unknown(OF_TRL, "settings", own_fields(GRPOConfig, RLOOConfig), TRL)


def test_every_setting_of_verl_is_known() -> None:
    found = {f"{one.__name__}.{spec.name}" for one in CONFIGURATIONS for spec in dataclasses.fields(one)}
    found = {name for name in found if not name.endswith("._target_")}
    assert not unknown(OF_VERL, "settings", found, VERL)


@pytest.mark.parametrize("table", [TRL, VERL], ids=["trl", "verl"])
def test_what_expresses_a_setting_is_a_key_of_the_configuration(table: dict[str, str]) -> None:
    keys = set(options())
    said = {value for value in table.values() if value != NOT_THE_OBJECTIVE}
    assert said <= keys


@pytest.mark.parametrize("name", SETTINGS)
def test_every_value_of_a_setting_of_trl_is_compared(name: str) -> None:
    found = compared_texts(GRPOTrainer, name)
    assert found
    assert not unknown(OF_TRL, f"values of {name}", found, SETTINGS[name])


def test_the_trainer_of_rloo_has_none_of_these_settings() -> None:
    assert not {name for name in SETTINGS if compared_texts(RLOOTrainer, name)}


def test_every_loss_type_has_a_preset() -> None:
    written = [recipe.settings for name, recipe in RECIPES.items() if name.startswith("trl:")]
    default = GRPOConfig.__dataclass_fields__["loss_type"].default
    assert own_keys(written, "loss_type", default) == compared_texts(GRPOTrainer, "loss_type")


def test_every_name_of_verl_is_known() -> None:
    estimators = {name: f"verl:{name}" for name in core_algos.ADV_ESTIMATOR_REGISTRY if name != "grpo"}
    assert all(preset in PRESETS for preset in estimators.values())
    assert {item.value for item in core_algos.AdvantageEstimator} == {*estimators, "grpo"}
    kl = compared_texts(core_algos.kl_penalty_forward)
    assert not unknown(OF_VERL, "KL estimators", kl - {"full"}, KL)
    aggregations = {name for name in compared_texts(core_algos.agg_loss) if "-" in name}
    assert all(make_objective(aggregation=name) for name in aggregations)
    assert not unknown(OF_VERL, "criteria of rejection", SUPPORTED_ROLLOUT_RS_OPTIONS, REJECTIONS)
    methods = compared_texts(core_algos.compute_pf_ppo_reweight_data)
    assert not unknown(OF_VERL, "methods of PF-PPO", methods, PF_PPO_METHODS)


def test_what_is_left_out_are_at_most_five_names_that_need_something() -> None:
    """The list follows from the packages' names and from what a training step has."""
    estimators = {
        f"verl advantage={make_objective(f'verl:{name}').advantage}"
        for name in core_algos.ADV_ESTIMATOR_REGISTRY
        if name != "grpo" and ADVANTAGES[make_objective(f"verl:{name}").advantage].needs
    }
    kl = {f"verl kl={name}" for name in compared_texts(core_algos.kl_penalty_forward) - set(KL)}
    assert estimators | kl == set(LEFT_OUT)
    assert len(LEFT_OUT) <= 5
    assert all("needs" in reason or "as " in reason for reason in LEFT_OUT.values())


def test_a_name_that_a_release_adds_is_told_in_one_sentence() -> None:
    class Newer:
        loss_type = "dapo"

        def loss(self) -> Any:
            return self.loss_type in ["grpo", "mine"] or self.loss_type == "yours"

    told = unknown("TRL 2.0", "values of loss_type", compared_texts(Newer, "loss_type"), {"grpo", "yours"})
    assert told.startswith("TRL 2.0 has the values of loss_type mine, which nothing here expresses")
    assert told.count(".") == 3  # the version's, the file's and its own
    assert "no more" in unknown("TRL 2.0", "values of loss_type", {"grpo"}, {"grpo", "yours"})
