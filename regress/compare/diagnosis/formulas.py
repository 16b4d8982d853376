"""Hypotheses about token values: other quantities, other formulas of the same golden values, other places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.batch_formulas import advantage_guesses, rounded_inputs, weight_guesses
from regress.compare.diagnosis.beside import NOTHING, Beside
from regress.compare.diagnosis.gradient_formulas import TokenGradients
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, Truth, told_apart
from regress.compare.diagnosis.logit_formulas import entropy_guesses, log_prob_guesses
from regress.compare.diagnosis.plain_formulas import PlainFormulas
from regress.compare.diagnosis.terms import Term, Terms
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
        beside: further facts about the update.
    """

    truth: Truth
    frame: TokenFrame
    loss_mask: NDArray[np.bool_] | None
    objective: Mapping[str, Any]
    beside: Beside = NOTHING

    def of(self, quantity: str, name: str) -> Iterator[Hypothesis]:
        """Yield hypotheses about a tensor of token values, each where it changes what the objective makes of them."""
        plain = self._plain.of(quantity, name)
        for guess in self._changes(quantity, name):
            yield told_apart(guess, plain)

    @cached_property
    def _plain(self) -> PlainFormulas:
        sampler, first = self.beside.sampler, self.beside.first
        sampler = self.token("sampler_log_probs") if sampler is None else sampler
        return PlainFormulas(
            self.token, self.sample_means, self.frame, self.objective, self.clip, sampler, first
        )

    def _changes(self, quantity: str, name: str) -> Iterator[Hypothesis]:
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
        known = self._token_gradients(quantity)
        if known is not None:
            plain = known.plain if quantity == "token_gradient" else None
            yield from (told_apart(guess, plain) for guess in known.of(quantity))

    def sums(self, quantity: str) -> Iterator[Terms]:
        """Yield decompositions of a token quantity into terms of the loss."""
        known = self._token_gradients(quantity)
        if known is not None:
            yield from known.sums(quantity)
        elif quantity == "token_loss" and self.loss_mask is not None:
            yield from _loss_terms(self)

    def _token_gradients(self, quantity: str) -> TokenGradients | None:
        if quantity not in TOKEN_GRADIENTS or self.loss_mask is None:
            return None
        logits = self.logits if quantity == "logit_gradient" else None
        offsets = np.asarray(self.frame.offsets)
        return TokenGradients(self.token, offsets, self.loss_mask, self.objective, self.clip, logits)

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
        yield _formula("its absolute log-ratio", np.abs(gap))
        ratio, golden = of.token("ratio"), of.token("kl")
        if ratio is not None and golden is not None and of.loss_mask is not None:
            bare = np.divide(golden, ratio, out=np.zeros_like(golden), where=ratio != 0)
            biased = bool(of.objective.get("kl_bias_correction"))
            title = "without" if biased else "with"
            yield _formula(
                f"the divergence {title} a correction by the ratio", bare if biased else golden * ratio
            )
            inputs = {"the log-probs": policy, "the reference's log-probs": reference}
            yield from rounded_inputs(_k3, inputs, golden, of.loss_mask)


def _k3(policy: Floats, reference: Floats) -> Floats:
    return np.asarray(np.exp(reference - policy) - (reference - policy) - 1)


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
    yield _formula("1 plus the log-ratio", 1.0 + gap)
    golden = of.token("ratio")
    if golden is not None:
        inputs = {"the log-probs": policy, "the old log-probs": old}
        yield from rounded_inputs(lambda new, before: np.exp(new - before), inputs, golden, of.loss_mask)
        yield from rounded_inputs(np.exp, {"the log-ratio": gap}, golden, of.loss_mask)
        sampler, reference = of.beside.sampler, of.token("ref_log_probs")
        for title, other in (("the sampler's log-probs", sampler), ("the reference's log-probs", reference)):
            if other is not None:
                yield _formula(f"the ratio to {title}", np.exp(policy - other))
        for title, bound in (("10", 10.0), ("20", 20.0), ("1", 1.0)):
            yield _formula(f"the ratio of log-ratios within {title}", np.exp(np.clip(gap, -bound, bound)))


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
    yield from _other_bounds(of, ratio, advantages)


def _other_bounds(of: TokenGuesses, ratio: Floats, advantages: Floats) -> Hypotheses:
    """Yield the clipped loss with one bound of the range fitted, and with inputs that were rounded."""
    correction, golden = of.token("sampler_weights"), of.token("policy_loss")
    factor = np.ones_like(ratio) if correction is None else correction
    if of.clip is None or golden is None or of.loss_mask is None:
        return
    low, high = of.clip

    def clipped(r: Floats, a: Floats) -> Floats:
        return np.asarray(-np.minimum(r * a, np.clip(r, low, high) * a) * factor)

    yield from rounded_inputs(
        clipped, {"the ratio": ratio, "the advantages": advantages}, golden, of.loss_mask
    )
    size = float(np.abs(golden[of.loss_mask]).max(initial=0.0))
    if float(np.abs(clipped(ratio, advantages) - golden)[of.loss_mask].max(initial=0.0)) > 1e-9 * size:
        return
    for key, stopped in (
        ("clip_high", (advantages > 0) & (ratio > 1.0)),
        ("clip_low", (advantages < 0) & (ratio < 1.0)),
    ):
        along = np.where(stopped & of.loss_mask, -advantages * factor, np.nan)
        said = {"what": f"the loss with {key} moved, a bound of"}
        yield Hypothesis("fitted", np.zeros_like(along), said, along)


def _ones(of: TokenGuesses) -> Hypotheses:
    yield _formula("1 everywhere", np.ones(of.frame.size))


def _advantages(of: TokenGuesses) -> Hypotheses:
    yield _formula("0 everywhere", np.zeros(of.frame.size))
    golden = of.token("advantages")
    if golden is not None and of.loss_mask is not None:
        yield from advantage_guesses(golden, of.frame, of.loss_mask, of.beside, of.objective)


def _weights(of: TokenGuesses) -> Hypotheses:
    golden = of.token("weights")
    if golden is not None and of.loss_mask is not None:
        yield from weight_guesses(golden, of.frame, of.loss_mask, of.beside)


def _old_log_probs(of: TokenGuesses) -> Hypotheses:
    golden = of.token("old_log_probs")
    if golden is not None and of.beside.sampler is not None:
        yield Hypothesis("equals", of.beside.sampler, {"what": "those that the sampler reported"})


def _entropy(of: TokenGuesses) -> Hypotheses:
    policy, golden = of.token("log_probs"), of.token("entropy")
    if policy is not None:
        yield _formula("the negative log-prob of the token, not an entropy", -policy)
    if of.logits is not None and golden is not None:
        yield from entropy_guesses(golden, *of.logits)


def _log_probs(of: TokenGuesses) -> Hypotheses:
    if of.logits is not None:
        yield from log_prob_guesses(of.token("log_probs"), *of.logits)


def _parts(of: TokenGuesses) -> Iterator[tuple[str, str, float, Floats | None]]:
    """Yield name, configuration key, sign and values of each part of the loss beside the policy loss."""
    entropy = of.token("entropy_loss")
    yield "KL", "kl_coef", 1.0, of.token("kl")
    yield "entropy", "entropy_coef", -1.0, of.token("entropy") if entropy is None else entropy


def _loss_terms(of: TokenGuesses) -> Iterator[Terms]:
    """Yield the loss of each token as a sum of its terms, those of coefficient 0 included."""
    policy, mask = of.token("policy_loss"), of.loss_mask
    if policy is None or mask is None:
        return
    terms = [Term("the policy loss", np.where(mask, policy, np.nan))]
    for title, key, sign, values in _parts(of):
        coefficient, name = of.objective.get(key), f"the {title} term"
        if values is None or not isinstance(coefficient, int | float):
            continue
        in_loss = key != "kl_coef" or of.objective.get("kl_placement", "loss") == "loss"
        known = np.where(mask, values, np.nan)
        if coefficient and in_loss:
            terms.append(Term(name, sign * float(coefficient) * known))
        else:
            terms.append(Term(name, sign * known, 0.0))
    yield Terms("terms", terms)


def _token_loss(of: TokenGuesses) -> Hypotheses:
    golden, policy = of.token("token_loss"), of.token("policy_loss")
    if golden is None or policy is None:
        return
    yield _formula("the policy loss alone", policy)
    for title, key, sign, values in _parts(of):
        coefficient = of.objective.get(key)
        if values is None or not isinstance(coefficient, int | float) or not coefficient:
            continue
        term = sign * float(coefficient) * values
        yield Hypothesis("fitted", golden - term, {"what": f"the loss with {key}"}, sign * values)
        yield _formula(f"the loss without its {title} term", golden - term)
        yield _formula(f"the loss with its {title} term reversed", golden - 2 * term)
        yield _formula(f"the loss with its {title} term twice", golden + term)
    yield from _exchanged(of, policy)


def _exchanged(of: TokenGuesses, policy: Floats) -> Hypotheses:
    """Yield the loss with the coefficients of KL and entropy on each other's terms."""
    (_, kl_key, _, kl), (_, entropy_key, _, entropy) = _parts(of)
    first, second = of.objective.get(kl_key), of.objective.get(entropy_key)
    if kl is None or entropy is None or first == second:
        return
    if isinstance(first, int | float) and isinstance(second, int | float):
        values = policy + float(second) * kl - float(first) * entropy
        yield _formula("the loss with the coefficients of KL and entropy exchanged", values)


_FORMULAS: dict[str, Callable[[TokenGuesses], Hypotheses]] = {
    "kl": _kl,
    "ratio": _ratio,
    "policy_loss": _policy_loss,
    "token_loss": _token_loss,
    "sampler_weights": _ones,
    "advantages": _advantages,
    "weights": _weights,
    "entropy": _entropy,
    "old_log_probs": _old_log_probs,
    "log_probs": _log_probs,
}
