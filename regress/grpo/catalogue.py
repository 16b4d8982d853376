"""Catalogue of the objective's parts: every loss, estimator and rule, with formula and source. Imports no torch.

A part is one function and one entry here. ``home`` names the function, ``reads`` the fields of an objective that only
parts which list them read, and ``needs`` the arguments that it asks for beyond those of every other part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Part:
    """One choice of a field of the objective.

    Attributes:
        text: formula, in the words of the field's help.
        source: paper, or package with version and function.
        home: ``module:function`` in this package that computes it; empty where the rule is a branch of another.
        reads: fields that it reads and that are refused where no chosen part reads them.
        needs: arguments beyond those of every part of its kind.
        statistics: True if it compares a token with the other tokens of the batch.
        weighs: True if the sampler's weights are in the loss already.
    """

    text: str
    source: str
    home: str = ""
    reads: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    statistics: bool = False
    weighs: bool = False

    def function(self) -> Any:
        """Import and return the function that computes the part."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(f"regress.grpo.{module}"), name)


Parts = Mapping[str, Part]

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

LOSSES: Parts = MappingProxyType(
    {
        "ppo_clip": Part(
            "-min(r A, clip(r) A)",
            "arXiv 1707.06347; separate bounds 2503.14476; delta 2505.07291; dual clip 1912.09729",
            "policy_losses:ppo_clip",
            ("delta", "dual_clip"),
        ),
        "cispo": Part(
            "-sg(clip(r)) A log p",
            "arXiv 2506.13585; TRL 1.16 loss_type=cispo; verl 0.9 cispo",
            "policy_losses:cispo",
        ),
        "importance_sampling": Part("-r A", "arXiv 1509.08731", "policy_losses:importance_sampling"),
        "reinforce": Part(
            "-A log p",
            "Williams 1992; verl 0.9 gpg, bypass_mode with loss_type=reinforce",
            "policy_losses:reinforce",
        ),
        "sapo": Part(
            "-(4 / tau) sigmoid(tau (r - 1)) A with tau = sapo_tau_pos where A > 0, else sapo_tau_neg",
            "arXiv 2511.20347; TRL 1.16 loss_type=sapo; verl 0.9 sapo",
            "policy_losses:sapo",
            ("sapo_tau_pos", "sapo_tau_neg"),
        ),
        "vespo": Part(
            "-sg(exp(lambda) w^k exp(-lambda w)) A log p with w the product of r over the sample, times that of its "
            "sampler weights; k and lambda by the sign of A",
            "arXiv 2602.10693; TRL 1.16 GRPOTrainer.get_gamma_weights",
            "policy_losses:vespo",
            ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
            weighs=True,
        ),
        "geo_mean": Part(
            "-mean(A) exp(mean of the clipped log r over the sample); log r is clipped to [-clip_low, clip_high] "
            "where that is the lesser improvement",
            "GMPO, arXiv 2507.20673, eq. 4; verl 0.9 geo_mean",
            "policy_losses:geo_mean",
            weighs=True,
        ),
        "dppo_tv": Part(
            "-sg(min(r, delta)) A log p; 0 where p - p_old is beyond clip_high (A > 0) or below -clip_low (A <= 0)",
            "arXiv 2602.04879; verl 0.9 dppo_tv",
            "policy_losses:dppo_tv",
            ("delta",),
        ),
        "dppo_kl": Part(
            "dppo_tv with the binary KL of p_old from p as the distance",
            "arXiv 2602.04879; verl 0.9 dppo_kl",
            "policy_losses:dppo_kl",
            ("delta",),
        ),
        "dro": Part(
            "-A log p + dro_beta / 2 (log r)^2",
            "arXiv 2405.19107, token by token; verl 0.9 dro",
            "policy_losses:dro",
            ("dro_beta",),
        ),
        "clip_cov": Part(
            "ppo_clip, and 0 for a share cov_fraction of tokens, drawn from those unclipped ones whose (A - mean A) "
            "(log p - mean log p) lies between cov_low and cov_high",
            "arXiv 2505.22617; verl 0.9 clip_cov",
            "policy_losses:clip_cov",
            ("cov_fraction", "cov_low", "cov_high", "cov_seed"),
            statistics=True,
        ),
        "kl_cov": Part(
            "-r A, plus cov_kl_coef |log r| for the share cov_fraction of tokens of greatest (A - mean A) "
            "(log p - mean log p)",
            "arXiv 2505.22617; verl 0.9 kl_cov",
            "policy_losses:kl_cov",
            ("cov_fraction", "cov_kl_coef"),
            statistics=True,
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


def described(parts: Parts) -> str:
    """Return the parts as one text: ``name formula, name formula``."""
    return "; ".join(f"{name} {part.text}" for name, part in parts.items())
