"""Tokens that the loss really trains on: those whose gradient is not 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from regress.explain.update_tokens import TEMPERATURE_ERROR, Bools, Floats, Ints, UpdateTokens

CERTAIN = -1e-5
"""Log-prob above which a token may have no gradient because its probability rounds to 1."""
BESIDE = 1e-4
"""Derivative by a log-prob, relative to the one by the entropy beside it, up to which it may be rounding."""
IDLE = 1e-4
"""Largest derivative of a sample, relative to that of the update, at which its advantage may be zero."""
MEASURES = (
    ("is_loss_debug/effective_valid", "the recorded mask of the loss"),
    ("forward_data/response_mask", "the recorded response mask"),
    ("batch_inputs/response_mask", "the recorded response mask of the inputs"),
)


@dataclass(frozen=True)
class Mask:
    """Tokens with and without a gradient, beside those that should have one.

    Attributes:
        g, h: derivatives by log-prob and entropy, NaN where none was recorded.
        known: tokens whose gradient could be recovered.
        expected: the loss mask that the dump tells of, None if it tells none.
        source: source of the expected mask.
        clipped: tokens without a gradient that belong to the loss all the same, because their ratio is clipped, or the
            loss leaves them out.
        left_out: those that the loss leaves out because of how they compare with others.
        selection: the rule of those, in words that follow "as a loss that".
    """

    update: UpdateTokens
    g: Floats
    h: Floats
    known: Bools
    expected: Bools | None
    source: str
    clipped: Bools | None = None
    left_out: Bools | None = None
    selection: str = ""

    @cached_property
    def policy(self) -> Bools:
        """Tokens with a derivative by their log-prob beyond rounding of that by their entropy."""
        residual = self.update.get("token_gradient/token_residual")
        left = np.zeros_like(self.g) if residual is None else np.nan_to_num(residual)
        return self.known & (
            np.abs(self.g) > np.clip(50 * left, BESIDE * (residual is not None), 0.01) * np.abs(self.h)
        )

    @cached_property
    def entropy(self) -> Bools:
        """Tokens with a derivative by their entropy beyond rounding."""
        return self.known & (np.abs(self.h) > self.rounding)

    @cached_property
    def rounding(self) -> Floats:
        """Bound of the error of each token's derivative by the entropy, from the unexplained part and the temperature.

        A temperature that is off by a share d adds d times the derivative by the log-prob.
        """
        residual = self.update.get("token_gradient/token_residual")
        left = np.zeros_like(self.g) if residual is None else np.nan_to_num(residual)
        size = np.abs(np.nan_to_num(self.g))
        error = self.update.get(TEMPERATURE_ERROR)
        off = np.zeros_like(size) if error is None else 2 * np.nan_to_num(error)
        out: Floats = (1e3 * left + off) * size + 1e-5 * size.max(initial=0.0) * (residual is not None)
        return out

    @cached_property
    def noise(self) -> float:
        """Relative noise of the gradients, from the part that nothing explains; 0 if none was recorded."""
        residual = self.update.get("token_gradient/token_residual")
        if residual is None:
            return 0.0
        size, left = self.g[self.policy], residual[self.policy]
        total = float(np.sum(size**2))
        return float(np.sqrt(np.nansum((size * left) ** 2) / total)) if total > 0 else 0.0

    @property
    def strays(self) -> int:
        """Number of positions that have a gradient and predict no token of their sample."""
        counts = (meta.get("rows_without_target") for meta in self.update.meta)
        return sum(one for one in counts if isinstance(one, int))

    @cached_property
    def speaking(self) -> Bools:
        """Samples ``[N]`` with any derivative by a log-prob."""
        return np.bincount(self.update.sample[self.policy], minlength=len(self.update.frame.samples)) > 0

    @cached_property
    def idle(self) -> Bools:
        """Samples ``[N]`` whose gradient may be zero because their advantage is, so that it tells nothing of the mask.

        Those of groups whose rewards are all the same, and those with next to no gradient beside the others: what
        rounding leaves of an advantage of zero, or what a KL term adds to it.
        """
        update = self.update
        count = len(update.frame.samples)
        size = np.zeros(count)
        np.maximum.at(size, update.sample, np.where(self.policy, np.abs(np.nan_to_num(self.g)), 0.0))
        found: Bools = size < IDLE * size.max(initial=0.0)
        if update.trajectories:
            rewards: dict[str, list[float]] = {}
            for trajectory in update.trajectories:
                rewards.setdefault(trajectory.group_id, []).append(trajectory.reward)
            groups = [update.trajectories[i].group_id for i in update.rollout]
            found |= np.array([_alike(rewards[group]) for group in groups], bool)
        return found

    @cached_property
    def effective(self) -> Bools:
        """Tokens of the loss: those with a gradient, and the expected ones of samples without any gradient."""
        if self.expected is None:
            return self.policy
        found = self.policy if self.clipped is None else self.policy | self.clipped
        silent = (~self.speaking | self.idle)[self.update.sample]
        return found | (self.expected & silent & (self.update.block >= 0))

    @cached_property
    def missing(self) -> Bools:
        """Expected tokens without a gradient, in samples that have some.

        Tokens whose advantage is 0, or may be, are excluded.
        """
        if self.expected is None:
            return np.zeros_like(self.policy)
        advantages = self.update.get("is_loss_debug/advantages")
        idle = np.zeros_like(self.policy) if advantages is None else advantages == 0
        own = self.update.get("forward_data/log_probs")
        certain = np.zeros_like(idle) if own is None else own > CERTAIN  # rounding may have left no gradient
        recorded = self.known & (self.update.block >= 0) & ~certain
        speaking = (self.speaking & ~self.idle)[self.update.sample]
        return self.expected & recorded & speaking & ~self.policy & ~idle

    @property
    def unexplained(self) -> Bools:
        """Missing tokens that are neither clipped nor left out."""
        return self.missing if self.clipped is None else self.missing & ~self.clipped

    @property
    def extra(self) -> Bools:
        """Tokens with a gradient that are not expected to have one."""
        return np.zeros_like(self.policy) if self.expected is None else self.policy & ~self.expected

    def counts(self) -> dict[str, Ints]:
        """Return the possible numbers of tokens of each sample ``[N]``, by how they differ from those found.

        The mask of samples without a gradient is unseen: they may lose as many tokens as the others do, or all.
        """
        found = {"": self.lengths}
        if self.expected is None:
            return found
        size = len(self.lengths)
        planned = np.bincount(self.update.sample[self.expected], minlength=size)
        lost = np.unique((planned - self.lengths)[self.speaking])
        if len(lost) == 1 and lost[0]:
            found[""] = np.where(self.speaking, self.lengths, np.maximum(planned - lost[0], 0))
        found[" (counted before the mask)"] = planned
        found[" (counted where there is a gradient)"] = np.where(self.speaking, self.lengths, 0)
        first = found.pop("")
        return {"": first} | {name: own for name, own in found.items() if (own != first).any()}

    @property
    def lengths(self) -> Ints:
        """Number of loss tokens of each sample, ``[N]``."""
        return np.bincount(self.update.sample[self.effective], minlength=len(self.update.frame.samples))

    @property
    def spans(self) -> Floats:
        """Number of tokens from the first to the last loss token of each sample, ``[N]``, those between included."""
        position, sample = self.update.position[self.effective], self.update.sample[self.effective]
        first = np.full(len(self.update.frame.samples), np.inf)
        last = np.full(len(first), -1.0)
        np.minimum.at(first, sample, position)
        np.maximum.at(last, sample, position)
        return np.where(last >= 0, last - first + 1, 0.0)

    @property
    def complete(self) -> bool:
        """True if the tokens of every sample are known, so that they can be counted."""
        return self.expected is not None or bool(self.speaking.all())


def _alike(rewards: Sequence[float]) -> bool:
    return max(rewards) - min(rewards) <= 1e-6 * max(map(abs, rewards))


def find_mask(update: UpdateTokens) -> Mask:
    """Read the masks of an update: the real one from its gradients, the expected one from what was tapped."""
    g = update.values["token_gradient/token_gradient"]
    h = update.values.get("token_gradient/entropy_gradient", np.zeros_like(g))
    recoverable = update.values.get("token_gradient/recoverable")
    known = np.isfinite(g) & np.isfinite(h)
    if recoverable is not None:
        known &= np.nan_to_num(recoverable) != 0
    expected, source = _expected(update)
    return Mask(update, g, h, known, expected, source)


def _expected(update: UpdateTokens) -> tuple[Bools | None, str]:
    if update.trajectories:
        out = np.zeros(update.frame.size, bool)
        for number, trajectory in enumerate(update.rollout):
            start, stop = update.frame.offsets[number : number + 2]
            own = np.array(update.trajectories[trajectory].loss_mask, bool)[: stop - start]
            out[start : start + len(own)] = own
        return out, "the loss mask of the trajectories"
    for name, words in MEASURES:
        values = update.get(name)
        if values is not None:
            return np.nan_to_num(values) != 0, words
    return None, ""
