"""Hypotheses about optimizer states and parameters: an AdamW update with one setting left out.

m = b1 m' + (1 - b1) g       v = b2 v' + (1 - b2) g^2       g = clipped gradient
p = p' (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regress.compare.diagnosis.beside import NOTHING, Beside
from regress.compare.diagnosis.hypotheses import Floats, Hypothesis, Truth
from regress.compare.diagnosis.terms import Term, Terms

_PARTS = (2, 3, 4, 8)
"""Numbers of parts that ranks may hold of a tensor."""
_NOTHING = 1e-6
"""Size of a sum, relative to its parts, that is zero but for rounding."""
_BEGINS = 0.1
"""Part of an update by which its beginning may differ from the end of the last one, in other precision."""
_LAST = "the gradient plus that of the last update"


class _Made(NamedTuple):
    """Golden parameters after an update, the moments, the number of updates, and the settings."""

    golden: Floats
    first: Floats
    second: Floats
    t: float
    rate: float
    eps: float
    decay: float
    betas: tuple[float, float]


class _Entry(NamedTuple):
    """Inputs of a moment: its parameter, the gradient, the golden state, its decay, and the gradient's power."""

    parameter: str
    gradient: Floats
    state: Floats
    decay: float
    power: int


def _step(made: _Made) -> Floats:
    """Return the step of AdamW without its weight decay."""
    first = made.first / (1 - made.betas[0] ** made.t)
    second = made.second / (1 - made.betas[1] ** made.t)
    step: Floats = made.rate * first / (np.sqrt(second) + made.eps)
    return step


@dataclass(frozen=True)
class UpdateHypotheses:
    """Hypotheses about the tensors of one optimizer update.

    Attributes:
        settings: section ``optimizer`` of the configuration, as far as it is known.
        beside: further facts about the update.
    """

    truth: Truth
    settings: Mapping[str, Any]
    beside: Beside = NOTHING

    def of(self, quantity: str, name: str) -> Iterator[Hypothesis]:
        """Yield hypotheses about a tensor of ``gradient``, ``grad_norm``, ``optimizer`` or ``param``."""
        if quantity == "gradient":
            yield from self._gradient(name)
        elif quantity == "optimizer":
            yield from self._state(name)
        elif quantity == "param":
            yield from self._parameter(name)

    def sums(self, quantity: str, name: str) -> Iterator[Terms]:
        """Yield decompositions of a tensor into what it is made of."""
        if quantity == "gradient":
            yield from self._shares(name)
        elif quantity == "optimizer":
            yield from self._moment(name)

    def _gradient(self, name: str) -> Iterator[Hypothesis]:
        """Yield gradients to which something is added that is none of this update."""
        golden, held = self._values("gradient", name), self._before(name)
        if golden is None:
            return
        earlier = self.beside.before.get("gradient", {}).get(name)
        if earlier is not None and earlier.shape == golden.shape:
            last = earlier.astype(np.float64)
            factor = self._clip_factor(self.beside.before)
            yield Hypothesis("formula", golden + factor * last, {"what": _LAST})
            if factor != 1.0:
                yield Hypothesis("formula", golden + last, {"what": f"{_LAST}, before it was clipped"})
            else:  # clipped by a norm that no configuration tells
                yield Hypothesis("fitted", golden, {"what": f"{_LAST}, times"}, last)
            yield Hypothesis("formula", last, {"what": "the gradient of the last update"})
        if held is not None:
            yield Hypothesis("fitted", golden, {"what": "the gradient plus its parameters times"}, held)
        factor = self._clip_factor()
        if factor != 1.0:
            yield Hypothesis("formula", golden * factor, {"what": "the gradient after it was clipped"})
        for number in _PARTS:
            if golden.ndim > 1 and golden.shape[0] % number == 0:
                added = golden.reshape(number, -1, *golden.shape[1:]).sum(axis=0)
                if float(np.abs(added).max()) <= _NOTHING * float(np.abs(golden).max()):
                    continue  # as those of a router, whose gradient adds up to zero over experts
                whole = np.concatenate([added] * number)
                yield Hypothesis("formula", whole, {"what": f"the {number} parts of the tensor added up"})

    def _shares(self, name: str) -> Iterator[Terms]:
        """Yield a gradient as the sum of its microbatches' own, and of its samples' own."""
        own = None if self.beside.gradients is None else self.beside.gradients(name)
        if own is None:
            return
        micros = self.beside.microbatches
        there = [Term(name, own[one.samples].sum(axis=0)) for name, one in micros.items()]
        if len(there) > 1:
            places = {
                "of": {name: [one.ranks[0], one.number] for name, one in micros.items()},
                "holders": {name: [*one.ranks] for name, one in micros.items()},
            }
            yield Terms("microbatches", there, len(there), places)
        samples = [Term(f"sample {number}", values) for number, values in enumerate(own) if values.any()]
        if len(samples) > 1:
            yield Terms("samples", samples, most=len(samples))

    def _moment(self, name: str) -> Iterator[Terms]:
        """Yield a moment as the sum of the last one and the gradient, to which parameters may have been added."""
        entry = self._entry(name)
        if entry is None:
            return
        entered = (1 - entry.decay) * (entry.gradient * self._clip_factor()) ** entry.power
        terms = [Term("the state before this update", entry.state - entered), Term("the gradient", entered)]
        held = self._before(entry.parameter)
        if held is not None and entry.power == 1:
            terms.append(Term("the parameters", (1 - entry.decay) * held, 0.0))
        yield Terms("terms", terms)

    def _entry(self, name: str) -> _Entry | None:
        """Return what enters a moment, and its decay; None where either is unknown, or for other states."""
        parameter, _, kind = name.rpartition("/")
        gradient, state = self._values("gradient", parameter), self._values("optimizer", name)
        decays = dict(zip(("exp_avg", "exp_avg_sq"), self._numbers("betas") or (), strict=False))
        if gradient is None or state is None or kind not in decays or gradient.shape != state.shape:
            return None
        if not self._after_one_update(parameter):
            return None
        return _Entry(parameter, gradient, state, decays[kind], 1 if kind == "exp_avg" else 2)

    def _state(self, name: str) -> Iterator[Hypothesis]:
        entry = self._entry(name)
        if entry is None:
            return
        parameter, gradient, state, decay, power = entry
        factor = self._clip_factor()
        entered = (gradient * factor) ** power
        before = (state - (1 - decay) * entered) / decay if decay else np.zeros_like(state)
        if factor < 1:
            whole = decay * before + (1 - decay) * gradient**power
            yield Hypothesis("formula", whole, {"what": "the state after a gradient that was not clipped"})
        yield Hypothesis("formula", before, {"what": "the state before this update"})
        fits = {"the state with a decay of": (entered, before - entered)}
        held = self._before(parameter)
        if power == 1:
            fits["the state after the gradient times"] = decay * before, (1 - decay) * gradient
            if held is not None:
                fits["the state after the gradient plus its parameters times"] = state, (1 - decay) * held
        for title, (base, along) in fits.items():
            yield Hypothesis("fitted", base, {"what": title}, along)
        rows = {
            "the state after a gradient of zero": decay * before,
            "the state of a first update": entered * (1 - decay),
            "the state after this update made twice": decay * state + (1 - decay) * entered,
        }
        rate = self._number("weight_decay")
        if held is not None and rate:
            coupled = (1 - decay) * (gradient * factor + rate * held) ** power
            rows["the state after the gradient plus its weight decay"] = decay * before + coupled
        for title, values in rows.items():
            yield Hypothesis("formula", values, {"what": title})

    def _parameter(self, name: str) -> Iterator[Hypothesis]:
        made = self._made(name)
        if made is None:
            return
        golden, first, second, t, rate, eps, decay, betas = made
        corrections = 1 - betas[0] ** t, 1 - betas[1] ** t
        step = _step(made)
        before = (golden + step) / (1 - rate * decay)
        kept = before * (1 - rate * decay)
        inside = rate * (first / corrections[0]) / ((np.sqrt(second) + eps) / math.sqrt(corrections[1]))
        plain = rate * first / (np.sqrt(second) + eps)
        rows: dict[str, Floats] = {
            "the update without weight decay": before - step,
            "the update with weight decay twice": before * (1 - rate * decay) ** 2 - step,
            "the update with eps inside of the bias correction": kept - inside,
            "the update without bias correction": kept - plain,
            "the update with its sign reversed": kept + step,
            "the weight decay alone": kept,
        }
        if self._after_one_update(name) and self._begins_as_recorded(name, made, before):
            rows |= {"the parameters before this update": before, "the update twice": kept - 2 * step}
        rows["the update with a step counter that is one ahead"] = kept - _step(made._replace(t=t + 1))
        if t > 1:
            rows["the update with a step counter that is one behind"] = kept - _step(made._replace(t=t - 1))
        for title, values in rows.items():
            yield Hypothesis("formula", values, {"what": title})
        yield Hypothesis("fitted", before, {"what": "the golden update times"}, golden - before)
        yield Hypothesis(
            "fitted", before - step, {"what": "an update with a weight decay of"}, -rate * before
        )

    def _after_one_update(self, parameter: str) -> bool:
        """Return False if the golden state is not the recorded one of the update before, updated once."""
        count = self._values("optimizer", f"{parameter}/step")
        earlier = self.beside.before.get("optimizer", {}).get(f"{parameter}/step")
        if self.beside.trusted or earlier is None or count is None:
            return True
        return bool((count == earlier.astype(np.float64) + 1).all())

    def _begins_as_recorded(self, name: str, made: _Made, before: Floats) -> bool:
        """Return False if the golden update does not begin with the parameters that the one before it left."""
        earlier = self.beside.before.get("param", {}).get(name)
        if self.beside.trusted or earlier is None or earlier.shape != before.shape:
            return True
        moved = float(np.abs(made.golden - before).max(initial=0.0))
        return float(np.abs(before - earlier).max(initial=0.0)) <= _BEGINS * moved

    def _before(self, name: str) -> Floats | None:
        """Return the parameter before the golden update; None unless everything that enters it is known."""
        made = self._made(name)
        return None if made is None else (made.golden + _step(made)) / (1 - made.rate * made.decay)

    def _made(self, name: str) -> _Made | None:
        """Return the inputs of the golden update of a parameter; None where some of them are unknown."""
        golden = self._values("param", name)
        moments = [self._values("optimizer", f"{name}/{key}") for key in ("exp_avg", "exp_avg_sq")]
        count = self._values("optimizer", f"{name}/step")
        rate, eps, decay = (self._number(key) for key in ("learning_rate", "eps", "weight_decay"))
        betas = self._numbers("betas")
        if golden is None or moments[0] is None or moments[1] is None or count is None:
            return None
        if rate is None or eps is None or decay is None or betas is None or count.size != 1 or count < 1:
            return None
        return _Made(golden, moments[0], moments[1], float(count.reshape(-1)[0]), rate, eps, decay, betas)

    def _values(self, quantity: str, name: str) -> Floats | None:
        values = self.truth.get(quantity, {}).get(name)
        return None if values is None else values.astype(np.float64)

    def _clip_factor(self, truth: Truth | None = None) -> float:
        """Return the factor by which the golden gradient of this or another update was clipped."""
        norm = (self.truth if truth is None else truth).get("grad_norm", {}).get("grad_norm")
        bound = self._number("max_grad_norm")
        if norm is None or bound is None:
            return 1.0
        return min(bound / (float(norm) + 1e-6), 1.0)

    def _number(self, key: str) -> float | None:
        value = self.settings.get(key)
        return float(value) if isinstance(value, int | float) else None

    def _numbers(self, key: str) -> tuple[float, float] | None:
        match self.settings.get(key):
            case [int() | float() as one, int() | float() as two]:
                return float(one), float(two)
        return None
