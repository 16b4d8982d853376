"""Tokens that a loss leaves out because of how they compare with others: by their entropy, or drawn by covariance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from regress.explain.aggregation_weights import scopes
from regress.explain.logits_at_temperature import ENTROPY
from regress.explain.loss_tokens import Mask
from regress.explain.policy_log_probs import Policies
from regress.explain.update_tokens import Bools, Floats, Ints

COVARIANCES = (1.0, 5.0)
"""Bounds of the covariance of advantage and log-prob between which Clip-Cov (arXiv 2505.22617) draws, by default."""
SHARE = 2e-4
"""Share of the tokens that Clip-Cov draws, by default; at least one."""
BY_ENTROPY = "keeps tokens of high entropy"
BY_COVARIANCE = "draws tokens by the covariance of advantage and log-prob (Clip-Cov)"


def without_low_entropy(mask: Mask) -> Mask:
    """Return the mask with missing tokens as left out where their entropies lie below those of all others.

    Source: arXiv 2506.01939, eq. 6, over each microbatch or the whole update.
    """
    entropy = mask.update.of_loss("forward_data/entropy", ENTROPY)
    unexplained = mask.unexplained
    if entropy is None or not unexplained.any() or np.isnan(entropy[mask.missing | mask.policy]).any():
        return mask
    for part in _partitions(mask):
        least = np.full(int(part.max()) + 1, np.inf)
        np.minimum.at(least, part[mask.policy], entropy[mask.policy])
        low = mask.missing & (entropy < least[part])
        if (low | ~unexplained).all():
            return _left_out(mask, low, BY_ENTROPY)
    return mask


def without_drawn(mask: Mask, known: Policies, advantages: Floats) -> Mask:
    """Return the mask with missing tokens as left out where Clip-Cov may have drawn them."""
    unexplained = mask.unexplained
    if not unexplained.any():
        return mask
    for candidates in _candidates(mask, known, advantages, unexplained):
        return _left_out(mask, mask.missing & candidates, BY_COVARIANCE)
    return mask


def drawable(mask: Mask, known: Policies, advantages: Floats, tokens: Bools) -> bool:
    """Return True if Clip-Cov may have drawn all of these tokens."""
    return any(True for _ in _candidates(mask, known, advantages, tokens))


def _candidates(mask: Mask, known: Policies, advantages: Floats, tokens: Bools) -> Iterator[Bools]:
    """Yield what Clip-Cov draws from, for each part of the update that it may compare, if it can have drawn these."""
    used = mask.effective | tokens
    if known.own is None or not np.isfinite(known.own[used]).all() or not np.isfinite(advantages[used]).all():
        return
    for part in _partitions(mask):
        count = np.bincount(part[used], minlength=int(part.max()) + 1)
        means = [np.bincount(part[used], own[used]) / np.maximum(count, 1) for own in (advantages, known.own)]
        covariance = (advantages - means[0][part]) * (known.own - means[1][part])
        candidates = used & (covariance > COVARIANCES[0]) & (covariance < COVARIANCES[1])
        drawn = np.bincount(part[tokens], minlength=len(count))
        if (candidates | ~tokens).all() and (drawn <= np.maximum(1, (SHARE * count).astype(np.int64))).all():
            yield candidates


def _partitions(mask: Mask) -> list[Ints]:
    found = scopes(mask)
    return [found[scope][1].part for scope in ("microbatch", "global")]


def _left_out(mask: Mask, tokens: Bools, rule: str) -> Mask:
    clipped = tokens if mask.clipped is None else mask.clipped | tokens
    return replace(mask, clipped=clipped, left_out=tokens, selection=rule)
