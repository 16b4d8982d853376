"""A wrong value is explained by the one change of its formula that gives it, whatever the objective."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regress.compare.diagnosis.adamw_formula import AdamW
from regress.compare.diagnosis.counterfactuals import Change, Formula, affine, counterfactuals
from regress.compare.diagnosis.rules.rule_table import RULES
from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import KL_ESTIMATORS
from regress.grpo.objective_evaluation import advantages_of, gradients_of, loss_of
from regress.grpo.policy_losses import LOSSES
from tests.as_subtests import as_subtests
from tests.unit.compare.diagnosis.synthetic_update import (
    REWARDS,
    SETTINGS,
    changes,
    counterfactuals_of,
    made,
    objective_of,
    samples_of,
)

REWARDED = {"rewards": torch.tensor(REWARDS, dtype=torch.float64), "groups": torch.tensor([0, 0, 1, 1])}


def explained(
    quantity: str, wrong: np.ndarray[Any, Any], objective: Objective, *, known: bool = True
) -> list[str]:
    """Return the ids of the changes of a quantity that give these values."""
    found = counterfactuals_of(objective, made(objective), known=known).of(quantity)
    return [
        str(guess.numbers["id"])
        for guess in found
        if guess.id == "formula" and np.allclose(guess.values, wrong, rtol=1e-12, atol=1e-14)
    ]


def values_of(objective: Objective) -> dict[str, Tensor]:
    return {name: torch.from_numpy(one[name]) for name, one in made(objective).items() if name in one}


@as_subtests("loss", list(LOSSES))
def test_the_values_of_another_setting_are_explained(loss: str) -> None:
    objective = objective_of(loss=loss)
    other = replace(objective, entropy_coef=0.0)
    wrong = loss_of(values_of(objective), samples_of(), other)["token_loss"].numpy()
    assert "entropy_coef=0" in explained("token_loss", wrong, objective)


@pytest.mark.parametrize("actual", ["k1", "k2", "k3"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_gradient_of_another_estimator_is_told(estimator: str, actual: str) -> None:
    objective = objective_of(kl_estimator=estimator)
    other = gradients_of(values_of(objective), samples_of(), replace(objective, kl_estimator=actual))
    found = explained("token_gradient", other["token_gradient"].numpy(), objective)
    same = actual == estimator or (actual == "k2" and estimator.endswith("+"))  # which takes its gradient
    assert (f"kl_estimator={actual}" in found) is not same


def _clipped_term_alone(t: dict[str, Tensor], ratio: Tensor) -> Tensor:
    return -ratio.clamp(0.8, 1.2) * t["advantages"]


def _larger_term(t: dict[str, Tensor], ratio: Tensor) -> Tensor:
    return -torch.maximum(ratio * t["advantages"], ratio.clamp(0.8, 1.2) * t["advantages"])


def _minimum_first(t: dict[str, Tensor], ratio: Tensor) -> Tensor:
    return -torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * t["advantages"]


def _not_exponentiated(t: dict[str, Tensor], ratio: Tensor) -> Tensor:
    return -torch.minimum(ratio.log() * t["advantages"], ratio.log().clamp(0.8, 1.2) * t["advantages"])


@pytest.mark.parametrize("known", [True, False], ids=["configured", "hidden"])
@pytest.mark.parametrize(
    ("wrong", "id"),
    [
        (_clipped_term_alone, "op:minimum/second@ppo_clip"),
        (_larger_term, "op:minimum/maximum@ppo_clip"),
        (_minimum_first, "mistake:the_minimum_before_the_advantage"),
        (_not_exponentiated, "op:exp/none@importance_ratio"),
    ],
)
def test_a_loss_that_somebody_wrote_wrongly(
    wrong: Callable[[dict[str, Tensor], Tensor], Tensor], id: str, known: bool
) -> None:
    objective = objective_of()
    values = values_of(objective)
    found = wrong(values, (values["log_probs"] - values["old_log_probs"]).exp()).numpy()
    assert id in explained("policy_loss", found, objective, known=known)


@pytest.mark.parametrize("known", [True, False], ids=["configured", "hidden"])
@pytest.mark.parametrize(
    ("section", "change", "id"),
    [
        ({"clip_low": 0.15, "clip_high": 0.35}, {"loss": "importance_sampling"}, "loss=importance_sampling"),
        ({"kl_estimator": "k2"}, {"kl_coef": 0.0}, "kl_coef=0"),
    ],
    ids=["bounds of no preset", "no KL"],
)
def test_a_change_of_a_loss_is_told_whether_its_objective_is_known_or_found(
    section: dict[str, Any], change: dict[str, Any], id: str, known: bool
) -> None:
    objective = objective_of(**section)
    wrong = loss_of(values_of(objective), samples_of(), replace(objective, **change))["token_loss"].numpy()
    assert id in explained("token_loss", wrong, objective, known=known)


def test_a_reversed_entropy_is_told_of_a_loss_whose_coefficients_nobody_tells() -> None:
    objective = objective_of()
    without = loss_of(values_of(objective), samples_of(), replace(objective, entropy_coef=0.0))["token_loss"]
    wrong = 2 * without.numpy() - made(objective)["token_loss"]["token_loss"]
    assert {*explained("token_loss", wrong, objective, known=False)} == {
        "op:mul/reversed@_total",
        "op:sub/add@_total",
    }


def test_a_kl_that_is_missing_in_the_reward_is_told_of_advantages() -> None:
    objective = objective_of(kl_placement="reward")
    values = {**values_of(objective), **REWARDED}
    wrong = advantages_of(values, samples_of(), replace(objective, kl_coef=0.0))["advantages"].numpy()
    assert "kl_coef=0" in explained("advantages", wrong, objective)


def test_settings_that_a_quantity_does_not_depend_on_are_not_tried() -> None:
    objective = objective_of(loss="cispo", aggregation="token-sum")
    values, samples = {**values_of(objective), **REWARDED}, samples_of()
    formula = Formula(lambda known, own: advantages_of(known, samples, own), values, objective)
    read = formula.reads("advantages")
    assert {"scale", "eps", "ddof"} <= read
    assert not read & {"clip_low", "clip_high", "loss", "aggregation"}


def test_golden_values_that_the_objective_does_not_give_have_no_counterfactuals() -> None:
    objective = objective_of()
    truth = made(objective)
    truth["policy_loss"]["policy_loss"] = truth["policy_loss"]["policy_loss"] * (1 + 1e-6)
    found = counterfactuals_of(objective, truth).of("policy_loss")
    assert not [guess for guess in found if guess.id == "formula"]


@as_subtests("rule", [rule for rule in RULES if "^" in rule.what], ids=lambda rule: rule.id)
def test_every_id_that_a_rule_names_is_one_that_a_formula_gives(rule: Any) -> None:
    """Functions and expressions of formulas are renamed; rules that name them would fall silent."""
    given = {id for quantity, id in changes() if quantity in rule.at}
    for named in re.split(r"\|(?=\^)", rule.what):
        if named.startswith("^") and not named.startswith(("^rounded", "^the gradient of the last")):
            assert any(re.search(named, id) for id in given), named


# any formula


@dataclass(frozen=True)
class Line:
    slope: float = 2.0
    offset: float = 3.0


def _line(values: Any, s: Line) -> dict[str, Tensor]:
    return {"y": s.slope * values["x"] + s.offset, "z": 1 - values["x"].exp()}


LINE = Formula(
    _line, {"x": torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)}, Line(), {"offset": (0.0, 3.0)}
)


def test_each_change_is_made_by_itself_and_told_with_its_source() -> None:
    golden = LINE.values("y")
    assert golden is not None
    found = {one.id: one for one in counterfactuals(LINE, "y", golden.numpy())}
    np.testing.assert_array_equal(found["offset=0"].values, [2.0, 4.0, 8.0])
    assert found["offset=0"].change is Change.OFF
    np.testing.assert_array_equal(found["op:add/sub@_line"].values, [-1.0, 1.0, 5.0])
    assert found["op:add/sub@_line"].words == (
        'with a difference in place of `s.slope * values["x"] + s.offset of _line`'
    )
    assert "offset=3" not in found


def test_a_number_less_a_tensor_is_an_operation_too() -> None:
    golden = LINE.values("z")
    assert golden is not None
    found = {one.id: one.values for one in counterfactuals(LINE, "z", golden.numpy())}
    np.testing.assert_allclose(found["op:sub/exchanged@_line"], -golden.numpy())


def test_a_coefficient_is_told_by_its_line() -> None:
    line = affine(LINE, "y", "slope")
    assert line is not None
    np.testing.assert_array_equal(line[0], [3.0, 3.0, 3.0])
    np.testing.assert_array_equal(line[1], [1.0, 2.0, 4.0])
    assert affine(LINE, "z", "slope") is None


# large updates, and configurations that make no sense


BATCH = ("loss=clip_cov", "loss=kl_cov", "op:sum/mean@")
"""Changes that depend on all tokens at once: of a few samples they are others, and explain nothing."""


@pytest.mark.parametrize("quantity", ["policy_loss", "token_gradient", "logit_gradient"])
def test_a_few_samples_are_asked_first_and_all_of_them_say_the_same(
    quantity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = objective_of()
    truth = made(objective)
    every = [*counterfactuals_of(objective, truth).of(quantity)]
    few = 16 * math.prod(next(iter(truth[quantity].values())).shape[1:])
    monkeypatch.setattr("regress.compare.diagnosis.token_counterfactuals.FEW", few)
    asked = [one for one in counterfactuals_of(objective, truth).of(quantity) if one.rows is not None]
    assert len(asked) > 10
    for one in asked:
        assert one.partial
        whole = one.whole()
        assert whole is not None
        if not one.numbers["id"].startswith(BATCH):
            np.testing.assert_allclose(one.values, whole.values[one.rows], rtol=1e-9, atol=1e-12)
        same = [np.array_equal(whole.values, other.values) for other in every if other.numbers == one.numbers]
        assert any(same)


def test_what_explains_no_tensor_is_not_tried_on_the_next() -> None:
    objective = objective_of()
    known = counterfactuals_of(objective, made(objective))
    known.keep("policy_loss", ["loss=cispo", "op:minimum/maximum@ppo_clip"])
    known.keep("policy_loss", ["loss=cispo", "loss=sapo"])
    assert {one.numbers["id"] for one in known.of("policy_loss")} == {"loss=cispo"}


@pytest.mark.parametrize(
    "section", [{"loss": "no such loss"}, {"kl_coef": "much"}, {"clip_low": [0.2]}, {"loss": None}]
)
def test_a_configuration_that_makes_no_sense_is_none(section: dict[str, Any]) -> None:
    known = counterfactuals_of(objective_of(), made(objective_of()), known=False)
    formulas = replace(known.formulas, section=section)
    assert formulas.objective is None
    assert formulas.formula("policy_loss") is not None  # that of an objective which gives the values


@pytest.mark.parametrize(
    "wrong",
    [
        {"betas": [2.0, 0.9]},
        {"betas": [0.9, 1e308]},
        {"eps": float("nan")},
        {"weight_decay": float("inf")},
        {"learning_rate": "fast"},
    ],
)
def test_an_optimizer_that_makes_no_sense_has_no_formula(wrong: dict[str, Any]) -> None:
    assert AdamW.of({**SETTINGS, **wrong}, 4.0) is None
    assert AdamW.of({**SETTINGS, "max_grad_norm": "large"}, 4.0) is not None
    assert AdamW.of(SETTINGS, 0.0) is None
