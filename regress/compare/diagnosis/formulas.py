"""Hypotheses about token values: other quantities, other formulas of the same golden values, other places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.gradient_formulas import TokenGradients
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, Truth
from regress.compare.diagnosis.temperature import log_sum_exp
from regress.compare.quantities import TOKEN_GRADIENTS
from regress.dump.arrays import Array, is_float
from regress.layout import TokenFrame


def shifted(values: Array, frame: TokenFrame, by: int) -> Floats:
    """Return the value of the token ``by`` positions on, ``[frame.size, ...]``; NaN where its sample has none."""
    moved = np.full(values.shape, np.nan)
    for start, stop in zip(frame.offsets[:-1], frame.offsets[1:], strict=True):
        if stop - start > abs(by):
            if by > 0:
                moved[start : stop - by] = values[start + by : stop]
            else:
                moved[start - by : stop] = values[start : stop + by]
    return moved


@dataclass(frozen=True)
class TokenGuesses:
    """Hypotheses about one token quantity of an update, in canonical form.

    Attributes:
        loss_mask: ``[frame.size]``.
        objective: section ``algorithm`` of the configuration, as far as it is known.
    """

    truth: Truth
    frame: TokenFrame
    loss_mask: NDArray[np.bool_] | None
    objective: Mapping[str, Any]

    def of(self, quantity: str, name: str) -> Iterator[Hypothesis]:
        """Yield hypotheses about a tensor of token values."""
        values = self.truth[quantity][name]
        inside = self.loss_mask if quantity in _TOKENS else None
        known = np.where(inside, values, np.nan) if inside is not None else values
        for by in (1, -1):
            yield Hypothesis("shifted", shifted(known, self.frame, by), {"by": by})
        yield from self._others(quantity, name)
        formulas = _FORMULAS.get(quantity)
        if formulas is not None:
            yield from formulas(self)
        yield from self.gradients(quantity)

    def gradients(self, quantity: str) -> Iterator[Hypothesis]:
        """Yield hypotheses about the gradient of the loss by a token quantity; none for other quantities."""
        if quantity in TOKEN_GRADIENTS and self.loss_mask is not None:
            logits = self.logits if quantity == "logit_gradient" else None
            offsets = np.asarray(self.frame.offsets)
            known = TokenGradients(self.token, offsets, self.loss_mask, self.objective, self.clip, logits)
            yield from known.of(quantity)

    def token(self, quantity: str) -> Floats | None:
        """Return the golden values ``[frame.size]`` of a quantity with one tensor; None if they are unknown."""
        values = next(iter(self.truth.get(quantity, {}).values()), None)
        if values is None or values.shape != (self.frame.size,):
            return None
        return values.astype(np.float64)

    def _others(self, quantity: str, name: str) -> Iterator[Hypothesis]:
        shape = self.truth[quantity][name].shape
        for other, tensors in self.truth.items():
            if other == quantity or other not in _TOKENS or quantity not in _TOKENS:
                continue
            for values in tensors.values():
                if values.shape == shape and is_float(values.dtype):
                    yield Hypothesis("equals", values.astype(np.float64), {"what": other})

    def sample_means(self, values: Floats, *, total: bool = False) -> Floats:
        """Return the mean (or sum) over the loss tokens of each sample, at all tokens of the sample."""
        assert self.loss_mask is not None
        out = np.zeros(self.frame.size)
        for start, stop in zip(self.frame.offsets[:-1], self.frame.offsets[1:], strict=True):
            chosen = values[start:stop][self.loss_mask[start:stop]]
            if chosen.size:
                out[start:stop] = chosen.sum() if total else chosen.mean()
        return out

    @cached_property
    def logits(self) -> tuple[Floats, NDArray[np.int64]] | None:
        """``[frame.size, V]`` golden logits that predict each token (NaN where there are none), and the tokens."""
        outputs = self.truth.get("activations", {})
        found = next((outputs[name] for name in outputs if name.endswith("lm_head")), None)
        ids = self.truth.get("batch_inputs", {}).get("input_ids")
        if found is None or ids is None or self.loss_mask is None or found.ndim != 2:
            return None
        if found.shape[0] != int(self.loss_mask.sum()) or int(ids.max(initial=0)) >= found.shape[1]:
            return None
        rows = np.full((self.frame.size, found.shape[1]), np.nan)
        rows[self.loss_mask] = found
        return rows, ids.astype(np.int64)

    @property
    def clip(self) -> tuple[float, float] | None:
        """The range that ratios are clipped to, if the configuration tells it."""
        return clip_range(self.objective)


def clip_range(objective: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the lowest and highest ratio of a section ``algorithm``; None unless it tells both."""
    low, high = objective.get("clip_low"), objective.get("clip_high")
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return None
    if objective.get("clip_bounds", "offset") == "absolute":
        return float(low), float(high)
    return 1.0 - float(low), 1.0 + float(high)


_TOKENS = (
    *(
        "advantages",
        "log_probs",
        "entropy",
        "old_log_probs",
        "ref_log_probs",
        "sampler_weights",
        "kl",
        "ratio",
    ),
    *("policy_loss", "token_loss", "weights"),
)


Hypotheses = Iterator[Hypothesis]


def _formula(title: str, values: Floats) -> Hypothesis:
    return Hypothesis("formula", values, {"what": title})


def _kl(of: TokenGuesses) -> Hypotheses:
    policy, reference = of.token("log_probs"), of.token("ref_log_probs")
    if policy is not None and reference is not None:
        gap = policy - reference
        yield _formula("the estimator k1", gap)
        yield _formula("the estimator k2", 0.5 * gap**2)
        yield _formula("the estimator k3", np.exp(-gap) + gap - 1)
        yield _formula("the divergence the other way round", np.exp(gap) - gap - 1)


def _ratio(of: TokenGuesses) -> Hypotheses:
    policy, old = of.token("log_probs"), of.token("old_log_probs")
    yield _formula("1 everywhere", np.ones(of.frame.size))
    if policy is None or old is None or of.loss_mask is None:
        return
    gap = policy - old
    yield _formula("the ratio of each token", np.exp(gap))
    yield _formula("the geometric mean over the sample", np.exp(of.sample_means(gap)))
    yield _formula("the product over the sample", np.exp(np.minimum(of.sample_means(gap, total=True), 700.0)))
    yield _formula("its inverse", np.exp(-gap))
    yield _formula("the log-ratio", gap)


def _policy_loss(of: TokenGuesses) -> Hypotheses:
    ratio, advantages, policy = of.token("ratio"), of.token("advantages"), of.token("log_probs")
    if ratio is None or advantages is None:
        return
    correction = of.token("sampler_weights")
    for words, factor in (
        ("", 1.0 if correction is None else correction),
        (" without the sampler's weights", 1.0),
    ):
        if words and correction is None:
            continue
        yield _formula(f"the loss without a clip{words}", -ratio * advantages * factor)
        if of.clip is not None:
            low, high = of.clip
            cut = np.clip(ratio, low, high)
            yield _formula(
                f"the clipped loss{words}", -np.minimum(ratio * advantages, cut * advantages) * factor
            )
            yield _formula(f"the clipped term alone{words}", -cut * advantages * factor)
            yield _formula(
                f"the minimum taken before the advantage{words}",
                -np.minimum(ratio, cut) * advantages * factor,
            )
            yield _formula(
                f"the maximum in place of the minimum{words}",
                -np.maximum(ratio * advantages, cut * advantages) * factor,
            )
            other = np.clip(ratio, 2.0 - high, 2.0 - low)
            swapped = -np.minimum(ratio * advantages, other * advantages) * factor
            yield _formula(f"the clip range with its sides swapped{words}", swapped)
        yield _formula(f"the advantage without a ratio{words}", -advantages * factor)
        if policy is not None:
            yield _formula(f"the loss of plain policy gradients{words}", -policy * advantages * factor)


def _ones(of: TokenGuesses) -> Hypotheses:
    yield _formula("1 everywhere", np.ones(of.frame.size))


def _zeros(of: TokenGuesses) -> Hypotheses:
    yield _formula("0 everywhere", np.zeros(of.frame.size))


def _token_loss(of: TokenGuesses) -> Hypotheses:
    golden, policy = of.token("token_loss"), of.token("policy_loss")
    if golden is None or policy is None:
        return
    yield _formula("the policy loss alone", policy)
    terms = {
        "KL": (of.token("kl"), "kl_coef", 1.0),
        "entropy": (of.token("entropy_loss"), "entropy_coef", -1.0),
    }
    if terms["entropy"][0] is None:
        terms["entropy"] = (of.token("entropy"), "entropy_coef", -1.0)
    for title, (values, key, sign) in terms.items():
        coefficient = of.objective.get(key)
        if values is None or not isinstance(coefficient, int | float) or not coefficient:
            continue
        term = sign * float(coefficient) * values
        yield Hypothesis("fitted", golden - term, {"what": f"the loss with {key}"}, sign * values)
        yield _formula(f"the loss without its {title} term", golden - term)
        yield _formula(f"the loss with its {title} term reversed", golden - 2 * term)
        yield _formula(f"the loss with its {title} term twice", golden + term)


def _log_probs(of: TokenGuesses) -> Hypotheses:
    """Yield log-probs of other targets under the recorded logits."""
    if of.logits is None:
        return
    logits, ids = of.logits
    rows = np.flatnonzero(np.isfinite(logits[:, 0]))
    normal = logits - log_sum_exp(logits)[:, None]
    for title, step in (("of the token before the one predicted", -1), ("of the token after it", 1)):
        out = np.full(of.frame.size, np.nan)
        out[rows] = normal[rows, ids[np.clip(rows + step, 0, len(ids) - 1)]]
        yield _formula(f"log-probs {title}", out)
    unnormal = np.full(of.frame.size, np.nan)
    unnormal[rows] = logits[rows, ids[rows]]
    yield _formula("logits, not normalized", unnormal)


_FORMULAS: dict[str, Callable[[TokenGuesses], Hypotheses]] = {
    "kl": _kl,
    "ratio": _ratio,
    "policy_loss": _policy_loss,
    "token_loss": _token_loss,
    "sampler_weights": _ones,
    "advantages": _zeros,
    "log_probs": _log_probs,
}
