"""Catalogue of the objective's parts: every loss, estimator and rule, with formula and source. Imports no torch.

A part is one function and one entry, here or, of a policy loss, above its function in `regress.grpo.policy_losses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from regress.grpo.part import Part, Parts
from regress.grpo.policy_losses import LOSSES

ADVANTAGES: Parts = MappingProxyType(
    {
        "grpo": Part("R - mean(R of the group)", "arXiv 2402.03300; verl 0.9 grpo, grpo_vectorized"),
        "rloo": Part(
            "R - mean(R of the other samples of the group)",
            "arXiv 2402.14740; verl 0.9 rloo, rloo_vectorized; TRL 1.16 RLOOTrainer",
        ),
        "reinforce_plus_plus": Part(
            "token-level returns, whitened over tokens", "arXiv 2501.03262; verl 0.9 reinforce_plus_plus"
        ),
        "reinforce_plus_plus_baseline": Part(
            "R - mean(R of the group), whitened over tokens",
            "arXiv 2501.03262; verl 0.9 reinforce_plus_plus_baseline",
        ),
        "constant": Part(
            "1 whatever the reward: with loss=reinforce the negative log-likelihood of supervised fine-tuning",
            "supervised fine-tuning",
        ),
        "opo": Part(
            "R - sum(length R) / sum(length) over the group, length in loss tokens",
            "arXiv 2505.23585; verl 0.9 opo",
        ),
        "gpg": Part(
            "N / (samples with R != 0) * (R - mean(R of the group)) / gpg_norm",
            "arXiv 2504.02546; verl 0.9 gpg",
            reads=("gpg_norm",),
        ),
        "grpo_passk": Part(
            "best R of the group minus the second best, for the best sample; 0 for the others",
            "arXiv 2503.19595; verl 0.9 grpo_passk",
        ),
        "gdpo": Part(
            "each reward function by the rule of grpo in its group, weighted sum, whitened over tokens",
            "arXiv 2601.05242; verl 0.9 gdpo",
        ),
        "remax": Part(
            "undiscounted return minus R of a greedy completion of the same prompt",
            "arXiv 2310.10505; verl 0.9 remax",
            needs=("baselines_N",),
        ),
        "gae": Part(
            "generalized advantage estimation from the values of a critic, whitened over tokens",
            "arXiv 1506.02438, eq. 16; verl 0.9 gae",
            home="values:gae",
            reads=("lam",),
            needs=("values_K",),
        ),
        "optimal_token_baseline": Part(
            "R - sum(W_t R) / sum(W_t) over the group's samples at the same position t of the completion, W_t the sum "
            "of 1 - 2 p + sum of squared probabilities up to t",
            "verl 0.9 optimal_token_baseline",
            home="token_baselines:optimal_token_baseline",
            reads=("otb_zero_tail",),
            needs=("old_log_probs_K", "sum_pi_squared_K"),
        ),
        "tir_optimal_token_baseline": Part(
            "optimal_token_baseline with t the number of loss tokens so far, which leaves the answers of tools out",
            "verl 0.9 tir_optimal_token_baseline",
            home="token_baselines:optimal_token_baseline",
            reads=("otb_zero_tail",),
            needs=("old_log_probs_K", "sum_pi_squared_K"),
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
