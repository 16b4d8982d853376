"""Advantages of estimators of groups against loops over plain numbers, written from the formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.argument_checks import InputError
from regress.grpo.fields import ObjectiveFields
from regress.grpo.group_statistics import group_statistics
from tests.unit.grpo.plain_advantages import (
    COMMON,
    NAN,
    Batch,
    batch,
    expected,
    found,
    of_grpo,
    of_passk,
    of_rloo,
    over_tokens,
    std,
    whitened,
)


@pytest.mark.parametrize("fields", COMMON, ids=lambda fields: "-".join(map(str, fields.values())))
@pytest.mark.parametrize(("name", "formula"), [("grpo", of_grpo), ("rloo", of_rloo)])
@pytest.mark.parametrize("missing", [False, True])
def test_estimators_of_groups(name: str, formula: Any, fields: dict[str, Any], missing: bool) -> None:
    given = batch(1, missing=missing)
    rule = "exclude" if missing else "error"
    actual = found(given, advantage=name, missing_rewards=rule, **fields)
    assert actual == pytest.approx(over_tokens(given, expected(given, formula, fields)), rel=1e-12)


@pytest.mark.parametrize("fields", COMMON, ids=lambda fields: "-".join(map(str, fields.values())))
def test_the_best_of_a_group_against_the_second_best(fields: dict[str, Any]) -> None:
    given = batch(2, missing=True)
    given.groups[3] = 2 if given.groups[3] != 2 else 5  # no group of one
    given.rewards[6] = given.rewards[7] = 9.0  # equal ones: the first is the best
    actual = found(given, advantage="grpo_passk", missing_rewards="exclude", **fields)
    assert actual == pytest.approx(over_tokens(given, expected(given, of_passk, fields)), rel=1e-12)
    given.groups[3] = 99
    with pytest.raises(InputError, match="second best"):
        found(given, advantage="grpo_passk", missing_rewards="exclude", **fields)


@pytest.mark.parametrize("missing", [False, True])
def test_gpg_scales_by_the_share_of_rewards_other_than_zero(missing: bool) -> None:
    given = batch(3, missing=missing)
    rule = "exclude" if missing else "error"
    actual = found(given, advantage="gpg", gpg_norm=3.0, single_sample="raw", missing_rewards=rule)
    known = [reward for reward in given.rewards if not math.isnan(reward)]
    alpha = len(known) / sum(reward != 0 for reward in known)
    plain = expected(given, of_grpo, {"scale": "none", "ddof": 1, "single_sample": "raw", "eps": 0.0})
    assert actual == pytest.approx(over_tokens(given, [alpha * one / 3.0 for one in plain]), rel=1e-12)
    given.rewards = [0.0] * 10
    assert found(given, advantage="gpg") == [0.0] * len(given.sequence)


@pytest.mark.parametrize("missing", [False, True])
def test_opo_weighs_rewards_by_lengths(missing: bool) -> None:
    given = batch(4, missing=missing)
    result = []
    for sample, reward in enumerate(given.rewards):
        members = given.members(sample)
        if len(members) == 1:
            result.append(0.0)
            continue
        tokens = sum(given.lengths[other] for other in members)
        weighted = math.fsum(given.lengths[other] * given.rewards[other] for other in members)
        result.append(reward - weighted / max(tokens, 1))
    rule = "exclude" if missing else "error"
    actual = found(given, advantage="opo", single_sample="zero", missing_rewards=rule)
    assert actual == pytest.approx(over_tokens(given, result), rel=1e-12)
    given.rewards = [0.1, 0.1, 0.1, 7.0, 0.3, 0.3, 0.7, 0.7, NAN if missing else 0.7, 0.7]
    assert found(given, advantage="opo", single_sample="zero", missing_rewards=rule) == [0.0] * 20


def test_whitened_group_means_leave_the_scale_to_the_tokens() -> None:
    given = batch(5)
    plain = expected(given, of_grpo, {"scale": "none", "ddof": 1, "single_sample": "zero", "eps": 0.0})
    for ddof in (0, 1):
        wanted = whitened(over_tokens(given, plain), ddof, 0.3)
        fields: dict[str, Any] = {"ddof": ddof, "whiten_eps": 0.3, "single_sample": "zero"}
        assert found(given, advantage="reinforce_plus_plus_baseline", **fields) == pytest.approx(
            wanted, rel=1e-11
        )


def test_opo_of_a_group_with_one_token() -> None:
    given = Batch([2.0, 5.0], [0, 0], [1, 0])
    given.values = given.old = given.squares = [0.0]
    assert found(given, advantage="opo") == [0.0]
    given = Batch([2.0, 5.0], [0, 0], [0, 1], values=[0.0], old=[0.0], squares=[0.0])
    assert found(given, advantage="opo") == [0.0]
    given = Batch([2.0, 5.0, 1.0], [0, 0, 0], [1, 0, 1], values=[0.0] * 2, old=[0.0] * 2, squares=[0.0] * 2)
    assert found(given, advantage="opo") == [0.5, -0.5]


@pytest.mark.parametrize("last", [0.25, 1.0])
def test_opo_normalizes_with_the_rewards_of_a_group_without_tokens(last: float) -> None:
    given = Batch([2.0, 5.0, 1.0, last], [0, 0, 1, 1], [1, 2, 0, 0], values=[0.0] * 3, old=[0.0] * 3)
    given.squares = [0.0] * 3
    raw = [2.0 - 4.0, 5.0 - 4.0, 1.0, last]  # the baseline of a group without tokens is 0
    mean = math.fsum(raw) / 4
    wanted = [(one - mean) / (std(raw, 1) + 0.5) for one in raw[:2]]
    actual = found(given, advantage="opo", normalize_advantages=True, eps=0.5)
    assert actual == pytest.approx(over_tokens(given, wanted), rel=1e-12)


def test_a_group_of_one_has_no_deviation() -> None:
    for ddof in (0, 1):
        group = group_statistics(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([4, 2, 2]), ddof)
        assert group.std[0].item() == 0.0
        assert group.std[1].item() == pytest.approx(std([1.0, 2.0], ddof))


@pytest.mark.parametrize("name", ["remax", "gae", "optimal_token_baseline", "grpo", "reinforce_plus_plus"])
def test_no_gradient_flows_through_advantages(name: str) -> None:
    given = batch(12)

    def leaf(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    result = token_advantages(
        leaf(given.rewards),
        torch.tensor(given.groups),
        torch.tensor(given.sequence),
        ObjectiveFields(advantage=name),
        leaf(given.penalties),
        baselines_N=leaf(given.rewards),
        values_K=leaf(given.values),
        old_log_probs_K=leaf(given.old),
        sum_pi_squared_K=leaf(given.squares),
    )
    assert not result.requires_grad
