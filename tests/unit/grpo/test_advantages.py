"""Advantages by hand, and what no advantage may depend on."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regress.errors import ConfigError, TaskError
from regress.grpo.advantage_computation import token_advantages
from regress.grpo.argument_checks import InputError
from regress.grpo.discounted_returns import returns_of, whiten
from regress.grpo.objective import Objective
from regress.grpo.objective_presets import make_objective

REWARDS = torch.tensor([1.0, 0.0, 0.5, 4.0, 2.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, -1, -1])
ONE_EACH = torch.arange(5)


def advantages(
    rewards: Any = REWARDS, groups: Any = GROUPS, sequence: Any = ONE_EACH, **fields: Any
) -> list[float]:
    penalty = fields.pop("kl_penalty_K", None)
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    groups, sequence = torch.as_tensor(groups), torch.as_tensor(sequence)
    objective = make_objective(**fields)
    return token_advantages(rewards, groups, sequence, objective, penalty).tolist()


def std(values: list[float], ddof: int) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def test_grpo_by_hand() -> None:
    # group 7: mean 0.5, sample std 0.5; group -1: mean 3, sample std sqrt(2)
    expected = [0.5 / 0.51, -0.5 / 0.51, 0.0, 1 / (math.sqrt(2) + 0.01), -1 / (math.sqrt(2) + 0.01)]
    assert advantages(eps=0.01) == pytest.approx(expected, rel=1e-14)


def test_population_standard_deviation() -> None:
    expected = [0.5 / math.sqrt(1 / 6), -0.5 / math.sqrt(1 / 6), 0.0, 1.0, -1.0]
    assert advantages(eps=0.0, ddof=0) == pytest.approx(expected, rel=1e-14)


def test_batch_scale_keeps_the_mean_of_the_group() -> None:
    whole = std(REWARDS.tolist(), 1) + 1e-6
    assert advantages(scale="batch") == pytest.approx([x / whole for x in (0.5, -0.5, 0, 1, -1)], rel=1e-14)


def test_dr_grpo_and_rloo_by_hand() -> None:
    assert advantages(scale="none") == [0.5, -0.5, 0.0, 1.0, -1.0]
    # reward minus the mean of the others
    assert advantages(advantage="rloo", scale="none") == pytest.approx([0.75, -0.75, 0.0, 2.0, -2.0])
    assert advantages(advantage="rloo", eps=0.0)[3] == pytest.approx(2 / math.sqrt(2))


def test_tokens_take_the_advantage_of_their_sample_and_empty_samples_count_in_their_group() -> None:
    assert advantages(sequence=[0, 0, 3, 4, 4], scale="none") == [0.5, 0.5, 1.0, -1.0, -1.0]
    assert advantages(sequence=torch.zeros(0, dtype=torch.long)) == []


def test_returns_discount_rewards_and_penalties_by_hand() -> None:
    # two samples of 3 and 1 tokens; reward on the last token, penalties on their own
    penalty = torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=torch.float64)
    raw = [-0.1 + 0.5 * (-0.2 + 0.5 * 0.6), -0.2 + 0.5 * 0.6, 1 - 0.4, 0 - 0.3]
    mean, spread = sum(raw) / 4, std(raw, 1)
    found = advantages(
        [1.0, 0.0],
        [0, 0],
        [0, 0, 0, 1],
        advantage="reinforce_plus_plus",
        gamma=0.5,
        whiten_eps=0.25,
        kl_penalty_K=penalty,
    )
    assert found == pytest.approx([(x - mean) / math.sqrt(spread**2 + 0.25) for x in raw], rel=1e-12)


def test_reinforce_plus_plus_baseline_whitens_over_tokens_not_samples() -> None:
    tokens = [0.5, 0.5, -0.5, 0.0, 1.0, -1.0, -1.0]
    mean, spread = sum(tokens) / 7, std(tokens, 0)
    found = advantages(
        sequence=[0, 0, 1, 2, 3, 4, 4], advantage="reinforce_plus_plus_baseline", whiten_eps=0.0, ddof=0
    )
    assert found == pytest.approx([(x - mean) / spread for x in tokens], rel=1e-12)


@pytest.mark.parametrize("values", [[], [0.1, 0.1, 0.1]])
def test_equal_values_are_whitened_to_exactly_zero(values: list[float]) -> None:
    assert whiten(torch.tensor(values, dtype=torch.float64), make_objective()).tolist() == [0.0] * len(values)


@pytest.mark.parametrize(
    ("advantage", "rewards", "groups", "alone"),
    [
        ("rloo", [1.0, 1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1, 2], [4]),
        ("rloo", [1.0, 0.0, 1.0, 0.5, math.nan], [0, 0, 0, 1, 1], [3, 4]),
        ("grpo", [1.0, 0.0, 1.0, 0.5], [0, 0, 0, 1], []),
        ("grpo_passk", [1.0, math.nan, 0.25, 0.5, 0.25], [0, 0, 0, 1, 1], [1]),
    ],
)
def test_samples_without_a_baseline_enter_no_statistic_of_advantages(
    advantage: str, rewards: list[float], groups: list[int], alone: list[int]
) -> None:
    rules = {"advantage": advantage, "scale": "none", "missing_rewards": "exclude", "eps": 0.0}
    raw, found = (
        token_advantages(
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(groups),
            torch.arange(len(rewards)),
            make_objective(**rules, normalize_advantages=normalize),
        )
        for normalize in (False, True)
    )
    others = [index for index in range(len(rewards)) if index not in alone]
    own = raw[others]
    wanted = torch.zeros_like(raw)
    wanted[others] = (own - own.mean()) / own.std()
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_the_best_of_a_group_gains_over_the_second_best_that_is_known() -> None:
    rewards = torch.tensor([1.0, math.nan, 0.25], dtype=torch.float64)
    objective = make_objective(advantage="grpo_passk", scale="none", missing_rewards="exclude")
    found = token_advantages(rewards, torch.zeros(3, dtype=torch.int64), torch.arange(3), objective)
    assert found.tolist() == [0.75, 0.0, 0.0]


def test_penalties_are_summed_over_the_sample_and_shift_the_baseline() -> None:
    penalty = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    found = advantages([1.0, 2.0], [0, 0], [0, 0, 1], scale="none", kl_penalty_K=penalty)
    # rewards become -0.5 and 1.75
    assert found == [-1.125, -1.125, 1.125]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_group_without_variance_is_exactly_zero(estimator: str, scale: str, eps: float) -> None:
    # the mean of three times 0.1 is not 0.1 in floating point
    found = advantages(
        [0.1] * 3 + [1.0], [0] * 3 + [1], [0, 1, 2, 3], advantage=estimator, scale=scale, eps=eps
    )
    assert found == [0.0] * 4


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_single_sample_groups(scale: str) -> None:
    alone: dict[str, Any] = {"rewards": [0.75], "groups": [0], "sequence": [0], "scale": scale}
    assert advantages(**alone) == [0.0]
    scaled = 0.75 if scale == "none" else 0.75 / 1.5
    assert advantages(**alone, single_sample="raw", eps=0.5) == [scaled]
    assert advantages(**alone | {"scale": "none"}, single_sample="raw", advantage="rloo") == [0.75]


def test_whitening_a_single_token_is_zero() -> None:
    for estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert advantages([3.0], [0], [0], advantage=estimator, single_sample="raw") == [0.0]


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    seed=st.integers(0, 10**6),
    estimator=st.sampled_from(["grpo", "rloo"]),
    scale=st.sampled_from(["group", "none"]),
)
def test_a_group_ignores_every_other_group(sizes: list[int], seed: int, estimator: str, scale: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    rewards = torch.randn(len(groups), generator=generator, dtype=torch.float64)
    everyone = torch.arange(len(groups))
    objective = Objective(advantage=estimator, scale=scale)
    before = token_advantages(rewards, groups, everyone, objective)
    others = torch.where(groups == 0, rewards, 1e6 * torch.randn_like(rewards))
    assert torch.equal(
        token_advantages(others, groups, everyone, objective)[groups == 0], before[groups == 0]
    )
    shuffled = torch.randperm(len(groups), generator=generator)
    again = token_advantages(rewards[shuffled], 5 - groups[shuffled], everyone, objective)
    torch.testing.assert_close(again, before[shuffled], rtol=1e-12, atol=1e-14)


@settings(deadline=None, max_examples=50)
@given(
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(lambda x: sum(x) > 1),
    seed=st.integers(0, 10**6),
)
def test_returns_of_a_sample_follow_the_recursion(gamma: float, lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    penalty = torch.randn(len(sequence), generator=generator, dtype=torch.float64)
    objective = Objective(advantage="reinforce_plus_plus", gamma=gamma)
    found = token_advantages(rewards, torch.zeros(len(lengths)).long(), sequence, objective, penalty)

    returns, following = [0.0] * len(sequence), 0.0
    for k in range(len(sequence) - 1, -1, -1):
        last = k + 1 == len(sequence) or sequence[k + 1] != sequence[k]
        following = float(rewards[sequence[k]]) if last else gamma * following
        following -= float(penalty[k])
        returns[k] = following
    expected = torch.tensor(returns, dtype=torch.float64)
    expected = (expected - expected.mean()) / (expected.var() + 1e-8).sqrt()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_dtype_follows_rewards_while_statistics_do_not_lose_digits() -> None:
    # in float32 the mean would be off by some 3e-5, next to a spread of 0.1
    rewards = torch.tensor([1000.1, 1000.2, 1000.4], dtype=torch.float32)
    found = token_advantages(rewards, torch.zeros(3).long(), torch.arange(3), Objective(eps=0.0))
    assert found.dtype == torch.float32
    exact = rewards.double()
    torch.testing.assert_close(found.double(), (exact - exact.mean()) / exact.std(), rtol=1e-6, atol=0)


def run(
    rewards: Tensor, groups: Tensor, sequence: Tensor, penalty: Tensor | None = None, **fields: Any
) -> Tensor:
    objective = Objective()
    for name, value in fields.items():
        setattr(objective, name, value)
    return token_advantages(rewards, groups, sequence, objective, penalty)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_reward_that_is_no_number_names_its_sample(bad: float) -> None:
    rewards = torch.tensor([0.0, 1.0, bad, bad])
    with pytest.raises(TaskError) as error:
        run(rewards, torch.zeros(4).long(), torch.arange(4))
    more = "; missing_rewards=exclude leaves such samples out" if math.isnan(bad) else ""
    assert str(error.value) == (
        f"sample 2 has reward {bad}: rewards must be finite numbers, so mend the reward function or score "
        f"such a completion 0{more}."
    )


def test_bad_input_is_named() -> None:
    two, zero = torch.zeros(2), torch.zeros(2).long()
    with pytest.raises(InputError, match=r"rewards_N is empty: advantages need at least one group"):
        run(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).long())
    with pytest.raises(InputError, match=r"groups_N has shape \(3,\) where rewards_N has \(2,\)"):
        run(two, torch.zeros(3).long(), zero)
    with pytest.raises(
        InputError, match=r"sequence_K falls from 1 to 0 at token 1: the tokens of a sample must be"
    ):
        run(two, zero, torch.tensor([1, 0]))
    with pytest.raises(
        InputError, match=r"sequence_K names sample 2, but there are 2: every index must lie in"
    ):
        run(two, zero, torch.tensor([0, 2]))
    with pytest.raises(InputError, match=r"sequence_K names sample -1, but there are 2"):
        run(two, zero, torch.tensor([-1, 1]))
    with pytest.raises(InputError, match=r"sequence_K has shape \(1, 2\) and dtype torch.int64"):
        run(two, zero, zero[None])
    with pytest.raises(InputError, match=r"kl_penalty_K has shape \(3,\) where sequence_K has \(2,\)"):
        run(two, zero, zero, torch.zeros(3))
    with pytest.raises(InputError, match=r"kl_penalty_K is nan at token 1: it must be finite"):
        run(two, zero, zero, torch.tensor([0.0, math.nan]))
    with pytest.raises(ConfigError, match=r"advantage='mean' is unknown: choose one of grpo, rloo"):
        run(two, zero, zero, advantage="mean")
    with pytest.raises(ConfigError, match=r"scale='groups' is unknown.*did you mean 'group'"):
        run(two, zero, zero, scale="groups")


def test_integer_rewards_have_advantages_of_the_default_dtype() -> None:
    found = token_advantages(
        torch.tensor([1, 0]), torch.zeros(2, dtype=torch.int64), ONE_EACH[:2], make_objective()
    )
    assert found.dtype == torch.get_default_dtype()
    assert found[0] > 0 > found[1]


def test_without_tokens_there_are_no_returns() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert returns_of(torch.zeros(0), none, 1.0, 2).tolist() == []


def test_one_reward_of_four_weighs_four_times() -> None:
    found = advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, ONE_EACH[:4], advantage="gpg", gpg_norm=1.0)
    assert found == [3.0, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("name", ["grpo", "gae", "optimal_token_baseline", "tir_optimal_token_baseline"])
def test_inputs_in_single_precision_enter_in_double(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    sequence, objective = torch.arange(5).repeat_interleave(4), make_objective(advantage=name, gamma=0.9)
    inputs = {
        key: torch.rand(20, generator=generator)
        for key in ("kl_penalty_K", "values_K", "old_log_probs_K", "sum_pi_squared_K", "correction_K")
    }
    single = token_advantages(REWARDS, GROUPS, sequence, objective, **inputs)
    double = {key: value.double() for key, value in inputs.items()}
    assert torch.equal(single, token_advantages(REWARDS, GROUPS, sequence, objective, **double))
