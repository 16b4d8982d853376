"""What wrong values might be: other quantities, other formulas of the same golden values, values of another place.

A guess is an array beside the golden one. `proven` says whether the affected values are equal to it, which by chance
they are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.dump.arrays import Array, dtype_name, is_float
from regress.layout import TokenFrame

Truth = Mapping[str, Mapping[str, Array]]
Floats = NDArray[np.float64]

_CHANCE = 1e-6
_AT_LEAST = 2


@dataclass(frozen=True)
class Guess:
    """Values that would explain what was recorded.

    Attributes:
        id: of the pattern, such as ``"equals"``.
        numbers: what the pattern says besides.
        values: in the shape of the golden tensor, NaN where it says nothing.
        direction: of that shape, if a multiple of it is to be added; the multiple is the number ``value``.
    """

    id: str
    values: Floats
    numbers: Mapping[str, Any] = field(default_factory=dict)
    direction: Floats | None = None


def fitted(guess: Guess, actual: Array, over: NDArray[np.bool_]) -> Guess:
    """A guess whose multiple of the direction is that which comes closest to the affected values."""
    if guess.direction is None:
        return guess
    said = over & np.isfinite(guess.values) & np.isfinite(guess.direction)
    along = guess.direction[said]
    square = float((along**2).sum())
    if int(said.sum()) < 3 or not square:
        return replace(guess, values=np.full(guess.values.shape, np.nan), direction=None)
    value = float(((actual[said].astype(np.float64) - guess.values[said]) * along).sum()) / square
    numbers = {**guess.numbers, "value": float(f"{value:.6g}")}
    return Guess(guess.id, guess.values + value * guess.direction, numbers)


def proven(guess: Guess, actual: Array, golden: Array, over: NDArray[np.bool_], bound: float) -> bool:
    """Whether the affected values are those of the guess, where it says any, in so many places that it is no chance.

    The chance is that of as many values within the bound as the spread of the golden tensor leaves room for.
    """
    said = over & np.isfinite(guess.values)
    hits = int(said.sum())
    if hits < _AT_LEAST or hits < 0.5 * int(over.sum()):
        return False
    values, found = guess.values[said], actual[said].astype(np.float64)
    exact = not is_float(golden.dtype)
    slack = 0.0 if exact else max(bound, _rounding(actual, values))
    with np.errstate(invalid="ignore"):
        if not (np.abs(found - values) <= slack).all():
            return False
    moved = np.abs(values - golden[said].astype(np.float64))
    if float(np.median(moved)) <= 4 * slack:
        return False  # it says what the golden tensor says
    if exact:
        return hits >= 3 or np.unique(values).size > 1
    room = float(np.ptp(np.concatenate([values, golden[said].astype(np.float64)])))
    chance = min(2 * slack / room, 1.0) if room else 1.0
    return hits * math.log(max(chance, 1e-300)) < math.log(_CHANCE)


def permuted(actual: Array, golden: Array, pool: Floats, over: NDArray[np.bool_], bound: float) -> bool:
    """Whether every affected value is a golden one of another token, of at least five different ones."""
    if not is_float(golden.dtype):
        return False
    found = actual[over].astype(np.float64)
    values = np.unique(pool[np.isfinite(pool)])
    if not np.isfinite(found).all() or np.unique(found).size < 5 or values.size < 5:
        return False
    slack = max(bound, _rounding(actual, values))
    place = np.clip(np.searchsorted(values, found), 1, values.size - 1)
    nearest = np.minimum(np.abs(found - values[place]), np.abs(found - values[place - 1]))
    if not (nearest <= slack).all():
        return False
    chance = min(2 * slack * values.size / max(float(np.ptp(values)), 1e-300), 1.0)
    return np.unique(found).size * math.log(max(chance, 1e-300)) < math.log(_CHANCE)


def _rounding(actual: Array, values: Floats) -> float:
    eps = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}.get(
        dtype_name(actual.dtype), 2.0**-52
    )
    return 16 * eps * float(np.abs(values).max(initial=0.0))


def shifted(values: Array, frame: TokenFrame, by: int) -> Floats:
    """``[frame.size, ...]`` the value of the token ``by`` positions on, NaN where its sample has none."""
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
    """Guesses at one token quantity of an update, in canonical form.

    Attributes:
        loss_mask: ``[frame.size]``.
        objective: section ``algorithm`` of the configuration, as far as it is known.
    """

    truth: Truth
    frame: TokenFrame
    loss_mask: NDArray[np.bool_] | None
    objective: Mapping[str, Any]

    def of(self, quantity: str, name: str) -> Iterator[Guess]:
        """What a tensor of values of tokens might hold instead."""
        values = self.truth[quantity][name]
        inside = self.loss_mask if quantity in _TOKENS else None
        known = np.where(inside, values, np.nan) if inside is not None else values
        for by in (1, -1):
            yield Guess("shifted", shifted(known, self.frame, by), {"by": by})
        yield from self._others(quantity, name)
        formulas = _FORMULAS.get(quantity)
        if formulas is not None:
            yield from formulas(self)

    def token(self, quantity: str) -> Floats | None:
        """``[frame.size]`` golden values of a quantity of one tensor, if it is known."""
        values = next(iter(self.truth.get(quantity, {}).values()), None)
        if values is None or values.shape != (self.frame.size,):
            return None
        return values.astype(np.float64)

    def _others(self, quantity: str, name: str) -> Iterator[Guess]:
        shape = self.truth[quantity][name].shape
        for other, tensors in self.truth.items():
            if other == quantity or other not in _TOKENS or quantity not in _TOKENS:
                continue
            for values in tensors.values():
                if values.shape == shape and is_float(values.dtype):
                    yield Guess("equals", values.astype(np.float64), {"what": other})

    def sample_means(self, values: Floats, *, total: bool = False) -> Floats:
        """The mean (or sum) over the loss tokens of each sample, at all of its tokens."""
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
        found = next((a for n, a in self.truth.get("activations", {}).items() if n.endswith("lm_head")), None)
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
        """The range that ratios are clipped to, if the configuration says it."""
        return clip_range(self.objective)


def clip_range(objective: Mapping[str, Any]) -> tuple[float, float] | None:
    """Lowest and highest ratio of a section ``algorithm``; None where it does not say both."""
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

Guesses = Iterator[Guess]


def _formula(title: str, values: Floats) -> Guess:
    return Guess("formula", values, {"what": title})


def _kl(of: TokenGuesses) -> Guesses:
    policy, reference = of.token("log_probs"), of.token("ref_log_probs")
    if policy is not None and reference is not None:
        gap = policy - reference
        yield _formula("the estimator k1", gap)
        yield _formula("the estimator k2", 0.5 * gap**2)
        yield _formula("the estimator k3", np.exp(-gap) + gap - 1)
        yield _formula("the divergence the other way round", np.exp(gap) - gap - 1)


def _ratio(of: TokenGuesses) -> Guesses:
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


def _policy_loss(of: TokenGuesses) -> Guesses:
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


def _ones(of: TokenGuesses) -> Guesses:
    yield _formula("1 everywhere", np.ones(of.frame.size))


def _zeros(of: TokenGuesses) -> Guesses:
    yield _formula("0 everywhere", np.zeros(of.frame.size))


def _token_loss(of: TokenGuesses) -> Guesses:
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
        yield Guess("fitted", golden - term, {"what": f"the loss with {key}"}, sign * values)
        yield _formula(f"the loss without its {title} term", golden - term)
        yield _formula(f"the loss with its {title} term reversed", golden - 2 * term)
        yield _formula(f"the loss with its {title} term twice", golden + term)


def _log_probs(of: TokenGuesses) -> Guesses:
    """Log-probs of other targets under the recorded logits."""
    if of.logits is None:
        return
    logits, ids = of.logits
    rows = np.flatnonzero(np.isfinite(logits[:, 0]))
    normal = logits - _log_sum_exp(logits)[:, None]
    for title, step in (("of the token before the one predicted", -1), ("of the token after it", 1)):
        out = np.full(of.frame.size, np.nan)
        out[rows] = normal[rows, ids[np.clip(rows + step, 0, len(ids) - 1)]]
        yield _formula(f"log-probs {title}", out)
    unnormal = np.full(of.frame.size, np.nan)
    unnormal[rows] = logits[rows, ids[rows]]
    yield _formula("logits, not normalized", unnormal)


def _log_sum_exp(logits: Floats) -> Floats:
    top = logits.max(axis=-1)
    return np.asarray(top + np.log(np.exp(logits - top[..., None]).sum(axis=-1)))


_FORMULAS: dict[str, Callable[[TokenGuesses], Guesses]] = {
    "kl": _kl,
    "ratio": _ratio,
    "policy_loss": _policy_loss,
    "token_loss": _token_loss,
    "sampler_weights": _ones,
    "advantages": _zeros,
    "log_probs": _log_probs,
}


def temperature(
    actual: Floats, logits: Floats, targets: NDArray[np.int64], *, entropy: bool = False
) -> tuple[float, float]:
    """The temperature under which logits give these log-probs (or entropies), and the largest error left.

    Args:
        actual: ``[K]``; ``logits``: ``[K, V]``; ``targets``: ``[K]`` the token of each row.
    """

    def values(t: float) -> Floats:
        scaled = logits / t
        normal = scaled - _log_sum_exp(scaled)[:, None]
        if entropy:
            return np.asarray(-(np.exp(normal) * normal).sum(axis=1))
        return np.asarray(normal[np.arange(len(targets)), targets])

    def badness(log_t: float) -> float:
        return float(((values(math.exp(log_t)) - actual) ** 2).sum())

    grid = np.linspace(math.log(0.05), math.log(20.0), 121)
    best = int(np.argmin([badness(x) for x in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        first, second = high - golden * (high - low), low + golden * (high - low)
        if badness(first) < badness(second):
            high = second
        else:
            low = first
    t = math.exp((low + high) / 2)
    near = float(f"{t:.6g}")  # a configured number is short
    t = min((near, t), key=lambda x: float(np.abs(values(x) - actual).max(initial=0.0)))
    return t, float(np.abs(values(t) - actual).max(initial=0.0))
