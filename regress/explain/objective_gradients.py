"""Token gradients that an objective would have on the tokens of an update.

It is evaluated on the recorded log-probs, rewards and tokens by the functions of this project's trainer.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regress.errors import CompareError, RegressError
from regress.explain.advantage_candidates import groups_of
from regress.explain.denominator_readings import Reading
from regress.explain.hypothesis_search import Found
from regress.explain.loss_tokens import Mask
from regress.explain.policy_log_probs import Policies
from regress.explain.update_tokens import Floats, Ints
from regress.grpo.fields.advantage_fields import AdvantageFields
from regress.grpo.objective_presets import make_objective

if TYPE_CHECKING:
    from regress.grpo.objective import Objective


class Evaluated:
    """Token gradients that an objective would have on the recorded tokens."""

    def __init__(self, mask: Mask, known: Policies, reading: Reading | None, found: Found) -> None:
        self._mask, self._known, self._found = mask, known, found
        self._tokens = np.flatnonzero(mask.effective & (mask.update.block >= 0))
        match = None if reading is None else reading.match
        penalty = None if match is None else match.penalty
        self._kl = 0.0 if match is None or penalty is None else match.fit.penalty / match.fit.scale
        self._length = None if reading is None else reading.length
        self._cache: dict[tuple[Any, ...], Floats] = {}

    @property
    def coefficients(self) -> dict[str, Any]:
        """Coefficients set to the values found, so that they count as no difference."""
        found: dict[str, Any] = {"kl_coef": float(self._kl)} if self._kl else {}
        return found | ({"norm_length": self._length} if self._length is not None else {})

    @property
    def from_rewards(self) -> bool:
        """True if advantages are those of the recorded rewards, False if they are the recorded ones."""
        return bool(self._mask.update.trajectories)

    @property
    def whole(self) -> bool:
        """True if the tokens with a gradient are those that the loss mask asks for."""
        mask = self._mask
        return not (mask.unexplained.any() or mask.extra.any() or mask.strays)

    @property
    def recorded(self) -> Floats:
        """Recorded gradients of the tokens that hypotheses were fitted to."""
        return self._mask.g[self._found.tokens]

    def solve_kl(self, name: str) -> None:
        """Find the coefficient of the KL with which a preset leaves the least, where no reading has told it."""
        if self._known.reference is None or make_objective(name).kl_in_reward:
            return
        without = self.predicted(name, {})
        self._kl = 1.0
        column = self.predicted(name, {}) - without
        size = float(column @ column)
        self._kl = max(0.0, float(column @ (self.recorded - without)) / size) if size > 0 else 0.0

    def unexplained(self, name: str, changes: dict[str, Any]) -> float:
        """Return the relative norm that an objective leaves unexplained; raise where it cannot be evaluated."""
        own = self.predicted(name, changes)
        return float(np.linalg.norm(self.recorded - own) / np.linalg.norm(self.recorded))

    def tried(self, name: str, changes: dict[str, Any]) -> float | None:
        """Return what `unexplained` does; None for an objective that cannot be evaluated."""
        try:
            return self.unexplained(name, changes)
        except RegressError:
            return None

    def predicted(self, name: str, changes: dict[str, Any]) -> Floats:
        """Return the gradients that an objective would give.

        Raises:
            CompareError: if the dump does not hold what it takes. RegressError: if there is no such objective.
        """
        own = np.zeros(self._mask.update.frame.size)
        own[self._tokens] = self._gradient(self._objective(name, changes))
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

    def _gradient(self, objective: Objective) -> Floats:
        """Return d loss / d log-prob of each loss token, by autograd."""
        import torch

        from regress.grpo.objective_evaluation import Samples, gradients_of

        own, old, reference = self._policies(objective)
        sequence = self._mask.update.sample[self._tokens]
        known = {"log_probs": own, "old_log_probs": old, "advantages": self._advantages(objective)}
        known |= {"weights": self._weights(objective, sequence)}
        known |= {} if reference is None else {"ref_log_probs": reference}
        known |= {"sampler_log_probs": old} if objective.old_log_probs == "sampler" else {}
        out = np.zeros(len(own))
        for part in self._compared(objective, sequence):
            values = {name: torch.from_numpy(array[part]) for name, array in known.items()}
            samples = Samples(torch.from_numpy(sequence[part]), len(self._mask.update.frame.samples))
            out[part] = gradients_of(values, samples, objective)["token_gradient"].numpy()
        return out

    def _compared(self, objective: Objective, sequence: Ints) -> list[Ints]:
        """Return the tokens that an objective compares with each other: of each microbatch, or all."""
        if objective.compares_tokens and objective.statistics_scope == "microbatch":
            blocks = self._block[sequence]
            return [np.flatnonzero(blocks == number) for number in np.unique(blocks)]
        return [np.arange(len(sequence))]

    def _policies(self, objective: Objective) -> tuple[Floats, Floats, Floats | None]:
        """Return the log-probs of the tokens; if all ratios are 1, any serve for a policy without a KL."""
        known = self._known
        own = None if known.own is None else known.own[self._tokens]
        old = None if known.old is None else known.old[self._tokens]
        reference = None if known.reference is None else known.reference[self._tokens]
        if own is None and not self._kl and self._one_ratio():
            own = np.zeros(len(self._tokens))
        if own is None:
            raise CompareError("""the log-probs of the policy are not those of the loss: record forward_data, with
            temperature= that of the trainer""")
        if (old is None or known.on_policy(self._mask.effective)) and self._one_ratio():
            old = own.copy()
        if old is None:
            raise CompareError("whether the ratio is clipped does not show: tap old_log_probs")
        return own, old, reference if objective.kl_in_loss else None

    def _one_ratio(self) -> bool:
        """Return True if something explains the gradients, and with ratio 1 alone."""
        matches = self._found.matches
        return bool(matches) and all(not match.factor.clips for match in matches)

    def _advantages(self, objective: Objective) -> Floats:
        import torch

        from regress.grpo.advantage_computation import token_advantages

        update = self._mask.update
        if not update.trajectories:
            recorded = update.get("is_loss_debug/advantages")
            if recorded is None:
                raise CompareError(update.notes.get("rewards", "tap rewards or advantages"))
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

        from regress.grpo.objective_evaluation import Samples, weights_of

        update, spans = self._mask.update, self._mask.spans.astype(np.int64)
        samples = Samples(
            torch.from_numpy(sequence),
            len(update.frame.samples),
            length=int(self._length or spans.max(initial=1)),
            microbatches=[
                np.flatnonzero(self._block == number).tolist() for number in range(len(update.blocks))
            ],
            ranks=len({rank for rank, _ in update.blocks}),
            spans=spans.tolist(),
        )
        return np.asarray(weights_of({}, samples, objective)["weights"].numpy(), np.float64)

    @cached_property
    def _block(self) -> Ints:
        """Microbatch of each sample, ``[N]``."""
        update = self._mask.update
        found = np.zeros(len(update.frame.samples), np.int64)
        found[update.sample[update.block >= 0]] = update.block[update.block >= 0]
        return found
