"""Catalogue of the objective's parts: every loss, estimator and rule, with formula and source. Imports no torch.

A part is one function and one entry, here or, of a policy loss, above its function in `regress.grpo.policy_losses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from regress.grpo.objective_part import Part, Parts
from regress.grpo.policy_losses import LOSSES


@dataclass(frozen=True)
class Advantage(Part):
    """Estimator of advantages.

    Attributes:
        home: of the estimators of one value a sample the function of its group; see
            `regress.grpo.advantage_estimators`.
        baseline: what is subtracted from a reward, in words.
        whitened: True if the values of all loss tokens are whitened together.
        by_token: True if the tokens of a sample have values of their own.
        compares: False if a sample has its value whatever the others of its group have.
        separate: True if each reward function is estimated by itself.
        knows_reward: False if the value does not depend on the reward.
        never_negative: True if no value is below 0.
    """

    baseline: str = ""
    whitened: bool = False
    by_token: bool = False
    compares: bool = True
    separate: bool = False
    knows_reward: bool = True
    never_negative: bool = False

    @property
    def one_a_sample(self) -> bool:
        """True if all tokens of a sample have one value, of which statistics over samples can be taken."""
        return not (self.whitened or self.by_token) and self.knows_reward


ADVANTAGES: Mapping[str, Advantage] = MappingProxyType(
    {
        "grpo": Advantage(
            "R - mean(R of the group)",
            "arXiv 2402.03300; verl 0.9 grpo, grpo_vectorized",
            home="advantage_estimators:grpo",
            baseline="mean reward of the group",
        ),
        "rloo": Advantage(
            "R - mean(R of the other samples of the group)",
            "arXiv 2402.14740; verl 0.9 rloo, rloo_vectorized; TRL 1.16 RLOOTrainer",
            home="advantage_estimators:rloo",
            baseline="mean reward of the others of the group",
        ),
        "reinforce_plus_plus": Advantage(
            "token-level returns, whitened over tokens",
            "arXiv 2501.03262; verl 0.9 reinforce_plus_plus",
            baseline="returns whitened over tokens",
            whitened=True,
            compares=False,
        ),
        "reinforce_plus_plus_baseline": Advantage(
            "R - mean(R of the group), whitened over tokens",
            "arXiv 2501.03262; verl 0.9 reinforce_plus_plus_baseline",
            home="advantage_estimators:group_mean",
            baseline="mean reward of the group, whitened over tokens",
            whitened=True,
        ),
        "constant": Advantage(
            "1 whatever the reward: with loss=reinforce the negative log-likelihood of supervised fine-tuning",
            "supervised fine-tuning",
            baseline="1 for every token",
            compares=False,
            knows_reward=False,
            never_negative=True,
        ),
        "opo": Advantage(
            "R - sum(length R) / sum(length) over the group, length in loss tokens",
            "arXiv 2505.23585; verl 0.9 opo",
            home="advantage_estimators:opo",
            baseline="mean reward of the group, weighted by length",
        ),
        "gpg": Advantage(
            "N / (samples with R != 0) * (R - mean(R of the group)) / gpg_norm",
            "arXiv 2504.02546; verl 0.9 gpg",
            home="advantage_estimators:gpg",
            reads=("gpg_norm",),
            baseline="mean reward of the group",
        ),
        "grpo_passk": Advantage(
            "best R of the group minus the second best, for the best sample; 0 for the others",
            "arXiv 2503.19595; verl 0.9 grpo_passk",
            home="advantage_estimators:grpo_passk",
            baseline="second best reward of the group",
            never_negative=True,
        ),
        "gdpo": Advantage(
            "each reward function by the rule of grpo in its group, weighted sum, whitened over tokens",
            "arXiv 2601.05242; verl 0.9 gdpo",
            home="advantage_estimators:grpo",
            baseline="mean of each reward in the group, whitened over tokens",
            whitened=True,
            separate=True,
        ),
        "remax": Advantage(
            "undiscounted return minus R of a greedy completion of the same prompt",
            "arXiv 2310.10505; verl 0.9 remax",
            needs=("baselines_N",),
            by_token=True,
        ),
        "gae": Advantage(
            "generalized advantage estimation from the values of a critic, whitened over tokens",
            "arXiv 1506.02438, eq. 16; verl 0.9 gae",
            home="value_loss:gae",
            reads=("lam",),
            needs=("values_K",),
            whitened=True,
        ),
        "optimal_token_baseline": Advantage(
            "R - sum(W_t R) / sum(W_t) over the group's samples at the same position t of the completion, W_t the sum "
            "of 1 - 2 p + sum of squared probabilities up to t",
            "verl 0.9 optimal_token_baseline",
            home="advantage_estimators:optimal_token_baseline",
            reads=("otb_zero_tail",),
            needs=("old_log_probs_K", "sum_pi_squared_K"),
            by_token=True,
        ),
        "tir_optimal_token_baseline": Advantage(
            "optimal_token_baseline with t the number of loss tokens so far, which leaves the answers of tools out",
            "verl 0.9 tir_optimal_token_baseline",
            home="advantage_estimators:optimal_token_baseline",
            reads=("otb_zero_tail",),
            needs=("old_log_probs_K", "sum_pi_squared_K"),
            by_token=True,
        ),
    }
)

_SCHULMAN = 'J. Schulman, "Approximating KL divergence"'
_THROUGH = "with the gradient of k2; verl 0.9 kl_penalty"
KL_ESTIMATORS: Parts = MappingProxyType(
    {
        "k1": Part("x", f"{_SCHULMAN}; verl 0.9 kl"),
        "k2": Part("x^2 / 2", f"{_SCHULMAN}; verl 0.9 mse"),
        "k3": Part("exp(-x) + x - 1", f"{_SCHULMAN}; verl 0.9 low_var_kl; TRL 1.16"),
        "abs": Part("|x|", "verl 0.9 abs"),
        "k1+": Part("value of k1", _THROUGH),
        "k3+": Part("value of k3", _THROUGH),
        "abs+": Part("value of abs", _THROUGH),
    }
)

AGGREGATIONS: Parts = MappingProxyType(
    {
        "token-mean": Part("1 / K", "DAPO, arXiv 2503.14476, eq. 8; verl 0.9 agg_loss"),
        "token-sum": Part("1", "verl 0.9 agg_loss"),
        "seq-mean-token-mean": Part("1 / (N n)", "GRPO, arXiv 2402.03300, eq. 3; verl 0.9 agg_loss"),
        "seq-mean-token-sum": Part("1 / N", "verl 0.9 agg_loss; TRL 1.16 loss_type=luspo"),
        "seq-mean-token-sum-norm": Part(
            "1 / (N length)",
            "Dr. GRPO, arXiv 2503.20783; verl 0.9 agg_loss",
            reads=("norm_length", "norm_rule"),
        ),
    }
)

REJECTIONS: Parts = MappingProxyType(
    {
        f"{level}_{k}": Part(
            f"{what} of {term}",
            "verl 0.9 compute_rollout_rejection_mask, Liu et al., richardli.xyz/rl-collapse",
        )
        for level, what in (
            ("token", "each token"),
            ("seq_sum", "sum over the sample"),
            ("seq_mean", "mean over the sample"),
            ("seq_max", "maximum over the sample"),
        )
        for k, term in (("k1", "-log w"), ("k2", "(log w)^2 / 2"), ("k3", "w - 1 - log w"))
        if (level, k) != ("seq_max", "k1")
    }
)
"""Criteria of rejection, with w = p / p_sampler of a token."""

CATALOGUE: Mapping[str, Parts] = MappingProxyType(
    {
        "advantage": ADVANTAGES,
        "loss": LOSSES,
        "kl_estimator": KL_ESTIMATORS,
        "aggregation": AGGREGATIONS,
        "rejection": REJECTIONS,
    }
)
"""Parts by the field that chooses them."""
