"""Presets that give the recorded gradients, and departures from the nearest one.

Each objective is evaluated on the recorded log-probs, rewards and tokens by the functions of this project's trainer,
and the token gradients that it would have are compared with the recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regress.errors import RegressError
from regress.explain.advantages import groups_of
from regress.explain.mask import Mask
from regress.explain.readings import EXACT, Reading
from regress.explain.search import Found
from regress.explain.statement import Statement
from regress.explain.terms import Policies
from regress.explain.update import Floats, Ints
from regress.grpo.fields.advantages import AdvantageFields
from regress.grpo.presets import PRESETS, make_objective

if TYPE_CHECKING:
    from regress.grpo.objective import Objective

SHOWN = 12
"""Most presets that a sentence names."""
LOOSE = ("eps", "norm_length")
"""Fields that are constants of a run rather than part of a preset."""


def agreements(
    mask: Mask, known: Policies, readings: list[Reading], found: Found, expected: str | None = None
) -> Iterator[Statement]:
    """Yield statements on presets: those that give the recorded gradients, else the nearest and where it differs.

    There is none on a loss that leaves tokens out, often at random.

    Args:
        expected: the preset that the trainer should follow; a departure from it is said.
    """
    if (
        not mask.complete
        or mask.left_out is not None
        or any(reading.match.factor.departure for reading in readings)
    ):
        return
    names = [expected] if expected is not None else list(PRESETS)
    model = _Model(mask, known, readings[0], found)
    if abs(readings[0].factor - 1) > max(EXACT, found.tolerance):
        yield from _in_proportion(model, names, found)
        return
    left = {name: model.unexplained(name, {}) for name in names}
    same = [name for name, value in left.items() if value is not None and value <= found.tolerance]
    tried = [value for value in left.values() if value is not None]
    if same:
        more = f" and {len(same) - SHOWN} others" if len(same) > SHOWN else ""
        given = "" if mask.update.trajectories else ", given these advantages"
        text = f"the same gradients as {', '.join(same[:SHOWN])}{more}, in this update{given}"
        evidence: dict[str, Any] = {
            "unexplained": max(value for name in same if (value := left[name]) is not None)
        }
        others = [value for name, value in left.items() if name not in same and value is not None]
        if others:
            evidence["others leave at least"] = min(others)
        yield Statement("preset", text, tuple(same), evidence | model.coefficients)
        return
    if tried:
        yield from _nearest(model, readings, names, found, expected)


def _in_proportion(model: _Model, names: list[str], found: Found) -> Iterator[Statement]:
    """Yield presets whose gradients are the recorded ones up to a factor."""
    factors = {}
    for name in names:
        own = model.predicted(name, {})
        if own is None:
            continue
        g = model.recorded
        factor = float(own @ g) / max(float(own @ own), 1e-300)
        if float(np.linalg.norm(g - factor * own)) <= found.tolerance * float(np.linalg.norm(g)):
            factors[name] = factor
    if factors:
        parts = [f"{name} times {factor:.5g}" for name, factor in list(factors.items())[:SHOWN]]
        text = f"the gradients are in proportion to those of {', '.join(parts)}"
        yield Statement("preset", text, (), {"factors": factors} | model.coefficients)


def _nearest(
    model: _Model, readings: list[Reading], names: list[str], found: Found, expected: str | None
) -> Iterator[Statement]:
    """Yield the preset that needs the fewest changed fields to give the gradients, each change proven necessary."""
    best: tuple[int, str, dict[str, Any], float] | None = None
    for reading in readings:
        fields = _fields(reading)
        for name in names:
            changes = _changes(name, fields)
            hard = sum(field not in LOOSE for field in changes)
            if best is not None and hard >= best[0]:
                continue
            left = model.unexplained(name, changes)
            if left is not None and left <= found.tolerance:
                best = hard, name, changes, left
    if best is None:
        return
    _, name, changes, left = best
    reference = make_objective(name)
    parts = [
        f"{field} {value!r} in place of {getattr(reference, field)!r}" for field, value in changes.items()
    ]
    which = "the preset that is expected" if expected is not None else "the nearest preset"
    text = f"{which}, {name}, would have other gradients; it has them with {', '.join(parts)}"
    evidence = {"unexplained": left} | model.coefficients
    yield Statement("preset", text, (name, changes), evidence, departure=expected is not None)


def _fields(reading: Reading) -> dict[str, Any]:
    """Return the fields of an objective that a reading determines."""
    fields = dict(reading.match.advantages.fields) | {
        "aggregation": reading.rule.aggregation,
        "norm_length": reading.length if reading.rule.length == "free" else None,
    }
    if reading.rule.scope in ("global", "microbatch"):
        fields["denominator_scope"] = reading.rule.scope
    fields |= reading.match.factor.fields
    if reading.match.penalty is not None:
        fields |= {"kl_bias_correction": False} | reading.match.penalty.fields
    return fields


def _changes(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a preset that have other values in a reading."""
    objective = make_objective(name)
    ours = {field: value for field, value in fields.items() if getattr(objective, field) != value}
    if ours.get("aggregation", objective.aggregation) != "seq-mean-token-sum-norm":
        ours.pop("norm_length", None)
    return ours


class _Model:
    """Token gradients that an objective would have on the recorded tokens."""

    def __init__(self, mask: Mask, known: Policies, reading: Reading, found: Found) -> None:
        self._mask, self._known, self._found = mask, known, found
        self._tokens = np.flatnonzero(mask.effective & (mask.update.block >= 0))
        penalty = reading.match.penalty
        self._kl = 0.0 if penalty is None else reading.match.fit.penalty / reading.match.fit.scale
        self._length = reading.length
        self._cache: dict[tuple[Any, ...], Floats] = {}

    @property
    def coefficients(self) -> dict[str, Any]:
        """Coefficients set to the values found, so that they count as no difference."""
        found: dict[str, Any] = {"kl_coef": float(self._kl)} if self._kl else {}
        return found | ({"norm_length": self._length} if self._length is not None else {})

    @property
    def recorded(self) -> Floats:
        """Recorded gradients of the tokens that hypotheses were fitted to."""
        return self._mask.g[self._found.tokens]

    def unexplained(self, name: str, changes: dict[str, Any]) -> float | None:
        """Return the relative norm that an objective leaves unexplained; None if it cannot be evaluated."""
        own = self.predicted(name, changes)
        return (
            None
            if own is None
            else float(np.linalg.norm(self.recorded - own) / np.linalg.norm(self.recorded))
        )

    def predicted(self, name: str, changes: dict[str, Any]) -> Floats | None:
        """Return the gradients that an objective would give; None where the dump cannot evaluate it."""
        try:
            predicted = self._gradient(self._objective(name, changes))
        except RegressError:
            return None
        if predicted is None:
            return None
        own = np.zeros(self._mask.update.frame.size)
        own[self._tokens] = predicted
        return own[self._found.tokens]

    def _objective(self, name: str, changes: dict[str, Any]) -> Objective:
        values: dict[str, Any] = dict(changes)
        objective = make_objective(name)
        if objective.kl_in_reward:
            values |= {"kl_coef": 0.0}  # rewards are recorded as they are, without it
        elif self._kl or objective.kl_coef:
            values |= {"kl_coef": self._kl}
        aggregation = values.get("aggregation", objective.aggregation)
        free = aggregation == "seq-mean-token-sum-norm" and objective.norm_rule == "maximum"
        if free and self._length is not None:
            values |= {"norm_length": self._length}
        values |= {"entropy_coef": 0.0}
        return make_objective(name, **values)

    def _gradient(self, objective: Objective) -> Floats | None:
        """Return d loss / d log-prob of each loss token, by autograd."""
        import torch

        from regress.grpo.losses import token_loss

        advantages = self._advantages(objective)
        own, old, reference = self._policies(objective)
        if advantages is None or own is None or old is None:
            return None
        sequence = self._mask.update.sample[self._tokens]
        out, weights = np.zeros(len(own)), self._weights(objective, sequence)
        for part in self._compared(objective, sequence):
            log_probs = torch.from_numpy(own[part]).requires_grad_()
            terms = token_loss(
                log_probs,
                torch.from_numpy(old[part]),
                torch.from_numpy(advantages[part]),
                torch.from_numpy(sequence[part]),
                len(self._mask.update.frame.samples),
                objective,
                ref_log_probs_K=None if reference is None else torch.from_numpy(reference[part]),
                sampler_log_probs_K=torch.from_numpy(old[part])
                if objective.old_log_probs == "sampler"
                else None,
            )
            (grad,) = torch.autograd.grad((torch.from_numpy(weights[part]) * terms.loss_K).sum(), log_probs)
            out[part] = grad.numpy()
        return out

    def _compared(self, objective: Objective, sequence: Ints) -> list[Ints]:
        """Return the tokens that an objective compares with each other: of each microbatch, or all."""
        if objective.compares_tokens and objective.statistics_scope == "microbatch":
            blocks = self._block[sequence]
            return [np.flatnonzero(blocks == number) for number in np.unique(blocks)]
        return [np.arange(len(sequence))]

    def _policies(self, objective: Objective) -> tuple[Floats | None, Floats | None, Floats | None]:
        """Return the log-probs of the tokens; if all ratios are 1, any serve for a policy without a KL."""
        known = self._known
        own = None if known.own is None else known.own[self._tokens]
        old = None if known.old is None else known.old[self._tokens]
        reference = None if known.reference is None else known.reference[self._tokens]
        if own is None and not self._kl and self._one_ratio():
            own = np.zeros(len(self._tokens))
        if own is not None and (old is None or known.on_policy(self._mask.effective)) and self._one_ratio():
            old = own.copy()
        return own, old, reference if objective.kl_in_loss else None

    def _one_ratio(self) -> bool:
        """True if every match of the search has ratio 1."""
        return all(not match.factor.clips for match in self._found.matches)

    def _advantages(self, objective: Objective) -> Floats | None:
        import torch

        from regress.grpo.advantages import token_advantages

        update = self._mask.update
        recorded = update.get("is_loss_debug/advantages")
        if recorded is not None and not update.trajectories:
            return np.nan_to_num(recorded[self._tokens])
        name = tuple(getattr(objective, spec.name) for spec in fields(AdvantageFields))
        if name not in self._cache:
            lengths = [sum(t.loss_mask) for t in update.trajectories]
            sequence = np.repeat(np.arange(len(lengths)), lengths).astype(np.int64)
            rewards = np.array([t.reward for t in update.trajectories], np.float64)
            groups = torch.from_numpy(groups_of(update))
            found = token_advantages(torch.from_numpy(rewards), groups, torch.from_numpy(sequence), objective)
            self._cache[name] = self._first(found.numpy(), sequence, len(lengths))
        return self._cache[name]

    def _first(self, values: Floats, sequence: Ints, count: int) -> Floats:
        """Return the value of each token's sample, which all its tokens share where each sample has one reward."""
        each = np.zeros(count)
        each[sequence] = values
        return each[self._mask.update.rollout][self._mask.update.sample[self._tokens]]

    def _weights(self, objective: Objective, sequence: Ints) -> Floats:
        import torch

        from regress.grpo.aggregation import batch_weights

        update, spans = self._mask.update, self._mask.spans.astype(np.int64)
        weights = batch_weights(
            torch.from_numpy(sequence),
            len(update.frame.samples),
            objective,
            max_completion_length=int(self._length or spans.max(initial=1)),
            partition=[
                np.flatnonzero(self._block == number).tolist() for number in range(len(update.blocks))
            ],
            ranks=len({rank for rank, _ in update.blocks}),
            completion_lengths=spans.tolist(),
        )
        return np.asarray(weights.numpy(), np.float64)

    @cached_property
    def _block(self) -> Ints:
        """Microbatch of each sample, ``[N]``."""
        update = self._mask.update
        found = np.zeros(len(update.frame.samples), np.int64)
        found[update.sample[update.block >= 0]] = update.block[update.block >= 0]
        return found
