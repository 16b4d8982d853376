"""Advantages of every loss token from the rewards of its sample.

Statistics are taken in float64 over a whole rollout batch, never over a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regress.grpo.advantage_estimators import TokenVariance, optimal_token_baseline, scored
from regress.grpo.argument_checks import (
    InputError,
    check_finite,
    check_rewards,
    check_same_length,
    check_sequences,
)
from regress.grpo.discounted_returns import returns_of, whiten
from regress.grpo.fields import ObjectiveFields
from regress.grpo.fields.advantage_fields import SCALES, SINGLE_SAMPLE_RULES
from regress.grpo.group_statistics import group_statistics as group_statistics
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.objective_checks import check_choice
from regress.grpo.reward_combination import combined_rewards, normalized, normalized_sum, weights_of
from regress.grpo.segment_sums import segment_lengths, segment_sum
from regress.grpo.value_loss import gae


def token_advantages(
    rewards_N: Tensor,
    groups_N: Tensor,
    sequence_K: Tensor,
    objective: ObjectiveFields,
    kl_penalty_K: Tensor | None = None,
    *,
    reward_weights: Sequence[float] | None = None,
    baselines_N: Tensor | None = None,
    values_K: Tensor | None = None,
    old_log_probs_K: Tensor | None = None,
    sum_pi_squared_K: Tensor | None = None,
    correction_K: Tensor | None = None,
    position_K: Tensor | None = None,
) -> Tensor:
    """Return the advantage of each loss token, shape [K], in the dtype of ``rewards_N`` (integers: the default one).

    Args:
        rewards_N: reward of each sample, or [N, F] of each sample by each of F reward functions.
        groups_N: which samples share a prompt; any integers, in any order.
        kl_penalty_K: subtracted from the reward: summed over the sample, or from its token under
            ``reinforce_plus_plus``, ``gae``, ``remax`` and the optimal token baselines
            (see `regress.grpo.kl_divergence.kl_penalty`).
        reward_weights: weights of the reward functions; 1 each by default.
        baselines_N: for ``remax``, the reward of a greedy completion of the sample's prompt.
        values_K: for ``gae``, the values of a critic.
        old_log_probs_K, sum_pi_squared_K: for the optimal token baselines, log-probs of the policy before the update
            and the sum of its squared probabilities over the vocabulary.
        correction_K: for the optimal token baselines, sampler correction weights; 1 by default.
        position_K: for ``optimal_token_baseline``, positions of the tokens in their completions; by default they are
            numbered, which leaves no place for the answers of tools.

    Raises:
        TaskError: a reward is not finite. InputError: shapes, order or values that cannot be used, or missing.
        ConfigError: an unknown estimator, scale or rule.

    Sources: see `regress.grpo.objective_catalogue.ADVANTAGES`.
    """
    _check(rewards_N, groups_N, sequence_K, objective, kl_penalty_K)
    dtype = rewards_N.dtype if rewards_N.is_floating_point() else torch.get_default_dtype()
    rewards_NF = rewards_N.detach().double().reshape(len(rewards_N), -1)
    weights_F = weights_of(rewards_NF, reward_weights)
    penalties = None if kl_penalty_K is None else kl_penalty_K.detach().double()
    samples = _Samples(rewards_NF, weights_F, groups_N, sequence_K, objective, penalties)
    if objective.advantage == "constant":
        advantages_K = torch.ones(len(sequence_K), dtype=torch.float64, device=sequence_K.device)
    elif objective.advantage == "gae":
        values = _given("values_K", values_K, sequence_K, objective)
        advantages_K, _ = gae(samples.token_rewards(), values, sequence_K, objective)
    elif objective.advantage == "reinforce_plus_plus":
        returns_K = returns_of(samples.token_rewards(), sequence_K, objective.gamma, len(rewards_NF))
        advantages_K = whiten(returns_K, objective)
    elif objective.advantage == "remax":
        returns_K = returns_of(samples.token_rewards(), sequence_K, 1.0, len(rewards_NF))
        advantages_K = returns_K - samples.baselines(baselines_N)[sequence_K]
    elif objective.advantage in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        old = _given("old_log_probs_K", old_log_probs_K, sequence_K, objective)
        squares = _given("sum_pi_squared_K", sum_pi_squared_K, sequence_K, objective)
        advantages_K = samples.over_optimal_baseline(old, squares, correction_K, position_K)
    else:
        advantages_K = samples.advantages()
    return advantages_K.to(dtype)


class _Samples:
    """Rewards of the samples, with the penalties of their tokens."""

    def __init__(
        self,
        rewards_NF: Tensor,
        weights_F: Tensor,
        groups_N: Tensor,
        sequence_K: Tensor,
        objective: ObjectiveFields,
        penalties_K: Tensor | None,
    ) -> None:
        self._each, self._weights, self._groups, self._sequence = rewards_NF, weights_F, groups_N, sequence_K
        self._objective, self._penalties = objective, penalties_K
        self._rewards = combined_rewards(rewards_NF, weights_F, objective)
        self._lengths = segment_lengths(sequence_K, len(rewards_NF))

    def token_rewards(self) -> Tensor:
        """Return the reward of each token: the sample's own on its last one, penalties on each; [K]."""
        rewards_K = torch.zeros(len(self._sequence), dtype=torch.float64, device=self._sequence.device)
        if self._penalties is not None:
            rewards_K = rewards_K - self._penalties
        rows = torch.nonzero(self._lengths)[:, 0]
        last = self._lengths.cumsum(0)[rows] - 1
        rewards_K[last] += self._rewards.nan_to_num()[rows]
        return rewards_K

    def over_optimal_baseline(
        self, old_K: Tensor, squares_K: Tensor, correction_K: Tensor | None, position_K: Tensor | None
    ) -> Tensor:
        """Return the reward of each token over an optimal baseline, of its position or its sample; [K]."""
        by_position = position_K if self._objective.advantage == "optimal_token_baseline" else None
        variance = TokenVariance(old_K, squares_K, correction_K, by_position)
        rewards_K = self.token_rewards()
        return optimal_token_baseline(rewards_K, self._groups, self._sequence, variance, self._objective)

    def advantages(self) -> Tensor:
        """Return the advantage of each token's sample, [K]."""
        o = self._objective
        if o.reward_aggregation == "normalize_then_sum":
            found = normalized_sum(self._each, self._weights, self._groups, o)
        elif ADVANTAGES[o.advantage].separate:
            columns = [self._estimated(column) for column in self._each.unbind(1)]
            found = combined_rewards(torch.stack(columns, 1), self._weights, ObjectiveFields())
        else:
            penalized = self._rewards
            if self._penalties is not None:
                penalized = penalized - segment_sum(self._penalties, self._sequence, len(penalized))
            found = self._estimated(penalized)
        if o.normalize_advantages:
            found = normalized(found.masked_fill(self._without_baseline(found), torch.nan), o)
        advantages_K = found.nan_to_num()[self._sequence]
        return whiten(advantages_K, o) if ADVANTAGES[o.advantage].whitened else advantages_K

    def _without_baseline(self, advantages: Tensor) -> Tensor:
        """Return the samples that have no advantage because their baseline is a mean over no other one, bool [N].

        They enter no statistic of advantages. Source: TRL 1.16 ``RLOOTrainer``, where others have a reward of None.
        """
        index = torch.unique(self._groups, return_inverse=True)[1]
        known = (~self._rewards.isnan()).double()
        alone = segment_sum(known, index, int(index.max()) + 1)[index] == 1
        return alone & (advantages == 0) & (self._objective.advantage == "rloo")

    def _estimated(self, rewards: Tensor) -> Tensor:
        samples = scored(rewards, self._groups, self._lengths, self._objective)
        found: Tensor = ADVANTAGES[self._objective.advantage].function()(samples, self._objective)
        return found

    def baselines(self, baselines_N: Tensor | None) -> Tensor:
        """Return the baselines that were given, [N]."""
        if baselines_N is None or baselines_N.shape != self._rewards.shape:
            raise InputError("""baselines_N is missing or not of shape [N]: advantage=remax subtracts the reward of a
            greedy completion of each sample's prompt; provide one value per sample.""")
        return baselines_N.detach().double()


def _given(name: str, values_K: Tensor | None, sequence_K: Tensor, objective: ObjectiveFields) -> Tensor:
    if values_K is None:
        raise InputError(
            f"{name} is missing: advantage={objective.advantage} needs it; provide one value per loss token."
        )
    check_same_length(sequence_K=sequence_K, **{name: values_K})
    check_finite(name, values_K)
    return values_K.detach().double()


def _check(
    rewards_N: Tensor,
    groups_N: Tensor,
    sequence_K: Tensor,
    objective: ObjectiveFields,
    kl_penalty_K: Tensor | None,
) -> None:
    check_choice("advantage", objective.advantage, ADVANTAGES)
    check_choice("scale", objective.scale, SCALES)
    check_choice("single_sample", objective.single_sample, SINGLE_SAMPLE_RULES)
    check_rewards(rewards_N, groups_N, missing=objective.missing_rewards == "exclude")
    check_sequences(sequence_K, len(rewards_N))
    if kl_penalty_K is not None:
        check_same_length(sequence_K=sequence_K, kl_penalty_K=kl_penalty_K)
        check_finite("kl_penalty_K", kl_penalty_K)
    elif objective.kl_in_reward:
        raise InputError(f"""kl_penalty_K is missing: kl_placement=reward subtracts kl_coef={objective.kl_coef:g} times
        the KL from the rewards; give what regress.grpo.kl_divergence.kl_penalty returns or set kl_coef=0.""")
