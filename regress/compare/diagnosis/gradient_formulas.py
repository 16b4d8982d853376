"""Hypotheses about token gradients: those of a loss with a term detached, clipped or weighted otherwise.

The golden gradient by the log-prob of a token is the sum of that of the KL term, which follows from the golden values,
and that of the policy loss, the rest. So no formula depends on the objective: it removes or replaces a part, and yields
nothing where a part is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.hypotheses import Floats, Hypothesis
from regress.compare.diagnosis.temperature import log_sum_exp, temperature
from regress.compare.diagnosis.terms import Term, Terms

Token = Callable[[str], Floats | None]
_AGREES = 1e-6
"""Largest error, relative to the largest golden value, at which an unchanged formula counts as the golden one."""


@dataclass(frozen=True)
class TokenGradients:
    """Hypotheses about the gradient of the loss by each token's log-prob, entropy or logits.

    Attributes:
        token: ``[frame.size]`` golden values of a quantity, None where they are unknown.
        offsets: start of each sample among the tokens, and the end of the last.
        loss_mask: ``[frame.size]``.
        objective: section ``algorithm`` of the configuration, as far as it is known.
        clip: the range that ratios are clipped to; None where it is unknown.
        logits: ``[frame.size, V]`` golden logits that predict each token (NaN where there are none), and the tokens.
    """

    token: Token
    offsets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    objective: Mapping[str, Any]
    clip: tuple[float, float] | None
    logits: tuple[Floats, NDArray[np.int64]] | None = None

    def of(self, quantity: str) -> Iterator[Hypothesis]:
        """Yield hypotheses about the values of a quantity."""
        if quantity == "token_gradient":
            yield from self._of_log_probs()
        elif quantity == "entropy_gradient":
            yield from self._of_entropy()
        elif quantity == "logit_gradient":
            yield from self._of_logits()

    def sums(self, quantity: str) -> Iterator[Terms]:
        """Yield the values of a quantity as a sum of the gradients of the terms of the loss."""
        if quantity == "token_gradient":
            yield from self._terms()
        elif quantity == "logit_gradient":
            yield from self._parts_of_logits()

    def _terms(self) -> Iterator[Terms]:
        policy, divergence = self._policy, self._divergence
        if policy is None or divergence is None:
            return
        terms = [Term("the gradient of the policy loss", policy)]
        if divergence.any():
            terms.append(Term("the gradient of the KL term", divergence))
        yield Terms("terms", terms)

    def _parts_of_logits(self) -> Iterator[Terms]:
        known = self._at_temperature
        if known is None:
            return
        z, target, rows, t, up, of_entropy = known
        log_p, p, entropy = _softmax(z / t)
        parts = {
            "the gradient of the target's logit": up * _one_hot(target, z.shape),
            "the gradient of the normalization": -up * p,
            "the gradient of the entropy's p log p": -of_entropy * p * log_p,
            "the gradient of the entropy's normalization": -of_entropy * p * entropy,
        }
        terms = []
        for name, values in parts.items():
            if values.any():
                whole = np.full((len(self.loss_mask), z.shape[1]), np.nan)
                whole[rows] = values
                terms.append(Term(name, whole))
        yield Terms("terms", terms)

    def _of_log_probs(self) -> Iterator[Hypothesis]:
        golden = self.token("token_gradient")
        if golden is None:
            return
        divergence, policy = self._divergence, self._policy
        if divergence is not None and divergence.any():
            yield from self._other_divergence(golden, divergence)
        if policy is not None:
            rest = golden - policy
            for title, values in self._other_policy(policy):
                yield _gradient(title, rest + values)
        weights = self.token("weights")
        if weights is not None and (weights[self.loss_mask] > 0).all():
            sums = np.divide(golden, weights, out=np.zeros_like(golden), where=weights > 0)
            yield _gradient("of a sum without weights", sums)

    def _of_entropy(self) -> Iterator[Hypothesis]:
        weights = self.token("weights")
        if weights is not None:
            said = {"what": "the gradient of a loss with entropy_coef"}
            along = -weights * self.loss_mask
            yield Hypothesis("fitted", np.zeros_like(weights), said, along)

    # by log-probs

    @cached_property
    def _divergence(self) -> Floats | None:
        """Contribution of the KL term; zeros where the loss has none, None where it is unknown."""
        coefficient, weights = self.objective.get("kl_coef"), self.token("weights")
        if not isinstance(coefficient, int | float) or weights is None:
            return None
        if not coefficient or self.objective.get("kl_placement", "loss") != "loss":
            return np.zeros_like(weights)
        slope = self._slope(str(self.objective.get("kl_estimator")))
        return None if slope is None else weights * float(coefficient) * slope * self.loss_mask

    def _slope(self, estimator: str) -> Floats | None:
        """Return the derivative of a divergence estimate by the log-prob of its token; None where it is unknown."""
        policy, reference, kl = self.token("log_probs"), self.token("ref_log_probs"), self.token("kl")
        if policy is None or reference is None or kl is None:
            return None
        gap = policy - reference
        if estimator in ("k1", "k2") or estimator.endswith("+"):  # with a plus that of k2
            slope = np.ones_like(gap) if estimator == "k1" else gap
        elif estimator == "abs":
            slope = np.sign(gap)
        elif estimator == "k3":
            slope = 1.0 - np.exp(-gap)
            for values, key in ((gap, "kl_log_ratio_clamp"), (kl, "kl_clamp")):
                bound = self.objective.get(key)
                if isinstance(bound, int | float):
                    slope = np.where(np.abs(values) < bound, slope, 0.0)
        else:
            return None
        if not self.objective.get("kl_bias_correction"):
            return slope
        ratio = self.token("ratio")
        if ratio is None or self.objective.get("importance_level") != "token":
            return None
        return ratio * slope + kl

    @cached_property
    def _policy(self) -> Floats | None:
        """Contribution of the policy loss; None where it is unknown."""
        golden = self.token("token_gradient")
        return None if golden is None or self._divergence is None else golden - self._divergence

    @cached_property
    def plain(self) -> Floats | None:
        """``[frame.size]`` gradient by the log-prob of each token, made of the golden terms; None where unknown."""
        known = [self.token(name) for name in ("weights", "advantages", "ratio")]
        weights, advantages, ratio = known
        if weights is None or advantages is None or ratio is None or self._divergence is None:
            return None
        told = self.objective.get("loss", "ppo_clip"), self.objective.get("importance_level", "token")
        if self.clip is None or told != ("ppo_clip", "token"):
            return None
        low, high = self.clip
        correction = self.token("sampler_weights")
        pull = -weights * advantages * (1.0 if correction is None else correction)
        stopped = ((ratio > high) & (pull < 0)) | ((ratio < low) & (pull > 0))
        return np.asarray(self._divergence + pull * ratio * ~stopped)

    def _other_divergence(self, golden: Floats, divergence: Floats) -> Iterator[Hypothesis]:
        rest = golden - divergence
        yield _gradient("without that of its KL term", rest)
        yield _gradient("with that of its KL term reversed", rest - divergence)
        yield _gradient("with that of its KL term twice", rest + divergence)
        if rest.any():
            yield _gradient("of the KL term alone", divergence)
        weights, coefficient = self.token("weights"), float(self.objective["kl_coef"])
        for estimator in ("k1", "k2", "k3"):
            slope = self._slope(estimator)
            if estimator != self.objective.get("kl_estimator") and slope is not None and weights is not None:
                other = rest + weights * coefficient * slope * self.loss_mask
                yield _gradient(f"of the estimator {estimator}", other)
        said = {"what": "the gradient of a loss with kl_coef"}
        yield Hypothesis("fitted", rest, said, divergence / coefficient)

    def _other_policy(self, policy: Floats) -> Iterator[tuple[str, Floats]]:
        """Yield titles and values of other gradients of the policy loss."""
        known = [self.token(name) for name in ("weights", "advantages", "ratio")]
        weights, advantages, ratio = known
        if weights is None or advantages is None or ratio is None:
            return
        found, log_probs, loss = (
            self.token("sampler_weights"),
            self.token("log_probs"),
            self.token("policy_loss"),
        )
        correction = np.ones_like(ratio) if found is None else found
        pull = -weights * advantages * correction
        whole = self.objective.get("importance_level", "token") != "token"
        usual = whole or self._kept_or_stopped(policy, pull, ratio)
        if usual:
            yield "of the advantage without a ratio", pull
        if whole:
            yield from self._of_samples(policy, pull * ratio)
        elif usual:
            yield "of the loss without a clip", pull * ratio
            yield from self._clipped(policy, pull, ratio)
        if self.objective.get("loss") == "cispo" and log_probs is not None and self.clip is not None:
            low, high = self.clip
            inside = (ratio >= low) & (ratio <= high)
            yield "with that of the ratio, which is a weight", policy + pull * ratio * inside * log_probs
        if found is not None and loss is not None:
            bare = np.divide(policy, correction, out=np.zeros_like(policy), where=correction != 0)
            yield "without the sampler's weights", bare
            yield "with that of the sampler's weights", policy + weights * loss

    def _kept_or_stopped(self, policy: Floats, pull: Floats, ratio: Floats) -> bool:
        """Return True if the golden gradient of each loss token is that of its ratio, or of a clipped one, or 0."""
        bounds = [] if self.clip is None else [pull * bound for bound in self.clip]
        known = np.stack([np.abs(policy - one) for one in (pull * ratio, np.zeros_like(pull), *bounds)])
        slack = _AGREES * float(np.abs(policy[self.loss_mask]).max(initial=0.0))
        return bool((known.min(axis=0)[self.loss_mask] <= slack).all())

    def _clipped(self, policy: Floats, pull: Floats, ratio: Floats) -> Iterator[tuple[str, Floats]]:
        """Yield gradients under a clip that stops other tokens; ``pull`` has the opposite sign of the advantage."""
        if self.clip is None:
            return
        low, high = self.clip
        yield "that stops at every ratio beyond the clip range", policy * ((ratio >= low) & (ratio <= high))
        wrong = ((ratio > high) & (pull > 0)) | ((ratio < low) & (pull < 0))
        yield "that stops on the wrong side of the clip", pull * ratio * ~wrong
        swapped = ((ratio > 2.0 - low) & (pull < 0)) | ((ratio < 2.0 - high) & (pull > 0))
        yield "of a clip range with its sides swapped", pull * ratio * ~swapped

    def _of_samples(self, policy: Floats, own: Floats) -> Iterator[tuple[str, Floats]]:
        """Yield gradients of per-sample ratios that reach all tokens of a sample, or each one's own log-prob."""
        mean, longer = np.zeros_like(own), np.zeros_like(own)
        live = np.where(policy != 0, own, 0.0)
        for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            chosen = self.loss_mask[start:stop]
            if chosen.any():
                mean[start:stop][chosen] = live[start:stop][chosen].mean()
                longer[start:stop] = policy[start:stop] * int(chosen.sum())
        yield "of each token's own log-prob, not of its sample's", live
        yield "of the mean over the sample, not of each token's own log-prob", mean
        yield "of the sum over the sample by each token's own log-prob, not of its mean", longer

    # by logits

    @cached_property
    def _at_temperature(
        self,
    ) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64], float, Floats, Floats] | None:
        """Logits ``[K, V]`` and targets of the loss tokens, these tokens, the temperature, and both gradients over it.

        None where something else is done to the logits before they become log-probs.
        """
        g, h, policy = self.token("token_gradient"), self.token("entropy_gradient"), self.token("log_probs")
        if self.logits is None or g is None or policy is None:
            return None
        logits, ids = self.logits
        rows = np.flatnonzero(self.loss_mask)
        z, target = logits[rows], ids[rows]
        t, error = temperature(policy[rows], z, target)
        if error > _AGREES * max(1.0, float(np.abs(policy[rows]).max(initial=0.0))):
            return None
        of_entropy = np.zeros((len(rows), 1)) if h is None else h[rows, None] / t
        return z, target, rows, t, g[rows, None] / t, of_entropy

    def _of_logits(self) -> Iterator[Hypothesis]:
        """Yield gradients of log-softmax and entropy with one part left out or replaced."""
        known = self._at_temperature
        if known is None or self.logits is None:
            return
        z, target, rows, t, up, of_entropy = known
        for title, values in _softmax_gradients(z, target, self.logits[1], rows, t, up, of_entropy):
            whole = np.full(self.logits[0].shape, np.nan)
            whole[rows] = values
            yield _gradient(title, whole)


def _softmax_gradients(
    z: Floats,
    target: NDArray[np.int64],
    ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    t: float,
    up: Floats,
    of_entropy: Floats,
) -> Iterator[tuple[str, Floats]]:
    """Yield titles and values ``[K, V]`` of wrong gradients of ``t * (up * log_prob + of_entropy * entropy)``."""
    log_p, p, entropy = _softmax(z / t)
    hot = _one_hot(target, z.shape)
    spread = -of_entropy * p * (log_p + entropy)
    yield "without that of the normalization", up * hot + spread
    yield "without that of the target", -up * p + spread
    if t != 1.0:
        plain = z - log_sum_exp(z)[:, None]
        yield "not divided by the temperature", t * (up * (hot - p) + spread)
        yield "of a softmax without the temperature", up * (hot - np.exp(plain)) + spread
    for title, step in (("before", -1), ("after", 1)):
        other = _one_hot(ids[np.clip(rows + step, 0, len(ids) - 1)], z.shape)
        yield f"of the token {title} the one predicted", up * (other - p) + spread
    if of_entropy.any():
        yield "without that of the entropy", up * (hot - p)
        yield "with that of the entropy reversed", up * (hot - p) - spread
        yield "of an entropy that is not centred", up * (hot - p) - of_entropy * p * log_p


def _softmax(z: Floats) -> tuple[Floats, Floats, Floats]:
    """Return log-probs and probabilities ``[K, V]`` of logits, and their entropies ``[K, 1]``."""
    log_p = z - log_sum_exp(z)[:, None]
    p = np.exp(log_p)
    return log_p, p, -(p * log_p).sum(axis=1, keepdims=True)


def _one_hot(ids: NDArray[np.int64], shape: tuple[int, ...]) -> Floats:
    hot = np.zeros(shape)
    hot[np.arange(len(ids)), ids] = 1.0
    return hot


def _gradient(title: str, values: Floats) -> Hypothesis:
    return Hypothesis("formula", values, {"what": f"the gradient {title}"})
