"""Objectives and presets as configuration: readable without torch, complete, refused with the remedy."""

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from omegaconf import OmegaConf

from regress.errors import ConfigError
from regress.grpo.objective import Objective
from regress.grpo.objective_checks import check_objective
from regress.grpo.objective_presets import PRESETS, make_objective, preset_values
from regress.grpo.policy_losses import LOSSES
from tests.as_subtests import as_subtests


def test_configuration_is_read_without_torch() -> None:
    code = "import sys, regress.grpo.objective_presets; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_omegaconf_overrides_every_field_and_keeps_types() -> None:
    config = OmegaConf.structured(Objective)
    for name, value in PRESETS["verl:gspo"].items():
        config[name] = value
    config.merge_with(OmegaConf.from_dotlist(["clip_low=1e-3", "delta=null", "norm_length=null"]))
    objective = OmegaConf.to_object(config)
    assert isinstance(objective, Objective)
    assert objective.clip_low == 1e-3
    assert objective.sequence_gradient == "token"


@as_subtests("spec", fields(Objective), ids=lambda spec: spec.name)
def test_every_field_explains_itself_and_keeps_its_own_rules(spec: Any) -> None:
    assert len(spec.metadata["help"]) > 20
    if "choices" in spec.metadata:
        assert spec.default in spec.metadata["choices"]
    if spec.type is str:
        assert spec.metadata["choices"]


@as_subtests("name", PRESETS)
def test_every_preset_is_possible_and_changes_only_what_differs(name: str) -> None:
    defaults = Objective()
    objective = make_objective(name)
    for field, value in preset_values(name).items():
        assert type(value) is type(getattr(objective, field))
    assert objective != defaults or name in ("verl:token-mean",)


def test_overrides_win_over_presets_and_presets_over_defaults() -> None:
    objective = make_objective("dapo", clip_low=0.1)
    assert (objective.clip_low, objective.clip_high, objective.aggregation) == (0.1, 0.28, "token-mean")


CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"ddof": 2}, "ddof=2 is not possible: set it to 0 (population) or 1 (sample)."),
    ({"gamma": 1.5}, "gamma=1.5 is not possible: a discount is at most 1."),
    (
        {"clip_bounds": "absolute", "clip_low": 0.8, "clip_high": 0.2},
        "clip_low=0.8 with clip_high=0.2 and clip_bounds=absolute is not possible: the ratio would be "
        "clipped to [0.8, 0.2]; choose bounds that enclose 1.",
    ),
    (
        {"loss": "cispo", "delta": 4.0},
        "delta with loss=cispo is not possible: it belongs to loss=ppo_clip or dppo_tv or dppo_kl; set delta to null.",
    ),
    (
        {"loss": "reinforce", "dual_clip": 3.0},
        "dual_clip with loss=reinforce is not possible: it belongs to loss=ppo_clip; set dual_clip to null.",
    ),
    ({"dual_clip": 1.0}, "dual_clip=1 is not possible: it must be greater than 1; 3 is usual."),
    (
        {"log_ratio_min": 1.0, "log_ratio_max": 0.0},
        "log_ratio_min=1 is not possible: it must not exceed log_ratio_max.",
    ),
    (
        {"kl_coef": 0.1, "kl_placement": "reward", "kl_bias_correction": True},
        "kl_bias_correction with kl_placement=reward is not possible: it corrects the KL of the loss; "
        "use kl_placement=loss or set it to false.",
    ),
    (
        {"norm_length": 5},
        "norm_length with aggregation=token-mean is not possible: it belongs to "
        "aggregation=seq-mean-token-sum-norm; set norm_length to null.",
    ),
    (
        {"correction_max": 2.0},
        "correction_max with sampler_correction=none is not possible: choose a correction or set "
        "correction_max to null.",
    ),
    (
        {"sampler_correction": "token_mask"},
        "sampler_correction=token_mask without bounds is not possible: set correction_max or correction_min.",
    ),
    (
        {"sampler_correction": "token_mask", "correction_min": 3.0, "correction_max": 2.0},
        "correction_min=3 is not possible: it must not exceed correction_max.",
    ),
    (
        {"sampler_correction": "token_mask", "correction_max": 2.0, "old_log_probs": "sampler"},
        "sampler_correction=token_mask with old_log_probs=sampler is not possible: the ratio already runs "
        "against the sampler; use old_log_probs=recompute.",
    ),
    (
        {"old_log_probs": "current", "kl_coef": 0.1, "kl_placement": "reward"},
        "old_log_probs=current with kl_placement=reward is not possible: the reward needs log-probs from before the "
        "update; use kl_placement=loss or old_log_probs=recompute.",
    ),
    (
        {"loss": "ppo-clip"},
        f"loss='ppo-clip' is unknown: choose one of {', '.join(LOSSES)}; did you mean 'ppo_clip'?",
    ),
    ({"scale": "x"}, "scale='x' is unknown: choose one of group, batch, none."),
    ({"eps": -1.0}, "eps=-1.0 is too small: it must be a number of at least 0."),
    ({"clip_low": float("nan")}, "clip_low=nan is too small: it must be a number of at least 0."),
    ({"clip_hihg": 0.3}, "clip_hihg is not a field of the objective: the nearest is clip_high."),
]


@pytest.mark.parametrize(
    ("values", "message"), CONFLICTS, ids=lambda value: "-".join(value) if isinstance(value, dict) else ""
)
def test_impossible_objectives_name_the_field_the_rule_and_the_remedy(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        make_objective(**values)
    assert str(error.value) == message


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"preset='trl:dappo' is unknown: the nearest preset is 'trl:dapo'"):
        make_objective("trl:dappo")


def test_wrong_type_from_code_is_refused() -> None:
    objective = Objective()
    objective.eps = "1e-6"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"eps='1e-6'"):
        check_objective(objective)


def test_all_mistakes_of_an_objective_are_named() -> None:
    """Fields that are wrong alone first; what they could mean together is asked once each is right."""
    with pytest.raises(ConfigError, match=r"^loss='cispoo' is unknown") as error:
        make_objective(loss="cispoo", dual_clip="3", gamma=2.0)
    assert [note.partition(" ")[0] for note in error.value.__notes__] == ["dual_clip='3'"]
    with pytest.raises(ConfigError, match=r"^ddof=2 is not possible") as error:
        make_objective(ddof=2, gamma=2.0)
    assert error.value.__notes__ == ["gamma=2 is not possible: a discount is at most 1."]
