"""Metrics of an update under the names of TRL and verl, with the meaning that they have there."""

from __future__ import annotations

import torch
from torch import Tensor

from regress.grpo.fields import ObjectiveFields
from regress.grpo.policy_losses import LOSSES
from regress.grpo.segment_sums import segment_lengths, segment_sum
from regress.grpo.token_losses import TokenLoss
from regress.grpo.update_metrics import Metric


def verl_metrics(loss: TokenLoss, objective: ObjectiveFields) -> dict[str, Metric]:
    """Return ``actor/ppo_kl``, ``actor/pg_clipfrac`` and ``actor/pg_clipfrac_lower`` over the tokens of a microbatch.

    What counts as clipped depends on the loss, as in verl 0.9 ``core_algos.compute_policy_loss_*``: the side that the
    sign of the advantage clips (vanilla, gspo), any ratio outside of the range (cispo), untrusted tokens (dppo), drawn
    ones (clip_cov), either side by the sign of the advantage (geo_mean); the lower one is the dual clip, the cap of
    dppo's ratio, or geo_mean's share of negative advantages. ``ppo_kl`` is the mean of log p_old - log p, of its
    absolute value for kl_cov, with the clamp that vanilla, dppo, sapo and cispo apply to it. Means are over the tokens
    that rejection leaves in the loss mask.
    """
    x_K = loss.log_ratio_K
    if objective.importance_level == "token":
        x_K = _clamped(x_K, objective)
    entry = LOSSES[objective.loss]
    found = {"actor/ppo_kl": x_K.abs() if entry.verl_absolute_kl else -x_K}
    clipped_K, lower_K = entry.verl(loss, objective)
    found |= {"actor/pg_clipfrac": clipped_K, "actor/pg_clipfrac_lower": lower_K}
    left_K = ... if loss.accepted_K is None else loss.accepted_K
    return {name: _mean(values_K[left_K]) for name, values_K in found.items()}


def trl_metrics(
    loss: TokenLoss, sequence_K: Tensor, num_sequences: int, objective: ObjectiveFields
) -> dict[str, Metric]:
    """Return TRL's metrics of a microbatch: ``clip_ratio/*``, ``cispo_clip_ratio``, ``kl`` and ``entropy``.

    Means are over tokens, of a sequence-level ratio over samples; ``low_min`` and ``high_max`` are the extremes of the
    samples' means. Samples without loss tokens have no mean, but count as not clipped where the ratio is one of the
    sample, as TRL 1.16 counts them (but for a cap of cispo below 1, where TRL counts those of a positive advantage as
    clipped).
    """
    found: dict[str, Metric] = {}
    whole = objective.importance_level != "token"
    clips = LOSSES[objective.loss].trl
    if clips == "clip_ratio":
        sides = {"low": loss.clipped_low_K, "high": loss.clipped_high_K}
        if (
            objective.delta is not None
        ):  # TRL counts after the cap, under which no ratio may be above the range
            sides["high"] = sides["high"] & (objective.delta > objective.clip_range[1])
        sides["region"] = sides["low"] | sides["high"]
        shares = {name: _share(side, sequence_K, num_sequences, whole) for name, side in sides.items()}
        for name, side in sides.items():
            found[f"clip_ratio/{name}_mean"] = _mean(shares[name] if whole else side)
        lows, highs = (values[~values.isnan()] for values in (shares["low"], shares["high"]))
        found["clip_ratio/low_min"] = Metric(float(lows.min()) if len(lows) else 0.0, len(lows), "min")
        found["clip_ratio/high_max"] = Metric(float(highs.max()) if len(highs) else 0.0, len(highs), "max")
    elif clips:
        shared = _share(loss.clipped_high_K, sequence_K, num_sequences, whole)
        found[clips] = _mean(shared if whole else loss.clipped_high_K)
    for name, values in (("kl", loss.kl_K), ("entropy", loss.entropy_K)):
        if values is not None:
            found[name] = _mean(values)
    return found


def _share(flags_K: Tensor, sequence_K: Tensor, num_sequences: int, whole: bool) -> Tensor:
    """Return the share of each sample's tokens, [N]: of one without any NaN, or 0 where samples are judged whole."""
    lengths = segment_lengths(sequence_K, num_sequences)
    shares = segment_sum(flags_K.double(), sequence_K, num_sequences) / lengths
    return shares.nan_to_num(nan=0.0) if whole else shares


def _mean(values: Tensor) -> Metric:
    return Metric(float(values.double().sum()), values.numel())


def _clamped(x_K: Tensor, objective: ObjectiveFields) -> Tensor:
    if objective.log_ratio_min is None and objective.log_ratio_max is None:
        return x_K
    return torch.clamp(x_K, objective.log_ratio_min, objective.log_ratio_max)
