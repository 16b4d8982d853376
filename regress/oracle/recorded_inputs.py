"""Recorded values of the loss tokens of an update before it, and its advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.mini_batch import LossTokens, TokenBatch
from regress.engine.reference_policy import Reference
from regress.errors import OracleError
from regress.grpo.advantage_computation import token_advantages
from regress.grpo.kl_divergence import kl_penalty
from regress.grpo.objective import Objective
from regress.layout import BatchPlan
from regress.oracle.observed_updates import Observed


@dataclass(frozen=True)
class Known:
    """An update, the policy as it is before it, and its reference model, if there is one.

    Attributes:
        mask: function that returns the loss tokens of a sample under the objective.
    """

    policy: LocalPolicy
    reference: Reference | None
    objective: Objective
    update: Observed
    mask: Callable[[Trajectory], list[int]]

    @property
    def rollout(self) -> Sequence[Trajectory]:
        """All samples of the rollout, or those of the update where no rollout is known."""
        return self.update.samples if self.update.rollout is None else self.update.rollout.samples

    @property
    def own(self) -> Sequence[int]:
        """Number in the rollout of each sample of the update."""
        return range(len(self.update.samples)) if self.update.rollout is None else self.update.own

    def computed(self) -> list[Array]:
        """Return log-probs of the loss tokens of each sample of the rollout under the policy as it is now."""
        return self._by(self.policy)

    def chosen(self, values: Sequence[Array]) -> Tensor:
        """Return the values ``[K]`` of the update's loss tokens from those of each sample of the rollout."""
        return torch.from_numpy(np.concatenate([values[number] for number in self.own]))

    def sampler_log_probs(self) -> Tensor:
        """Return the log-probs that the samples were drawn with, ``[K]``."""
        found = []
        for sample in self.update.samples:
            if sample.log_probs is None:
                raise OracleError(f"""algorithm.old_log_probs=sampler needs the log-probs that {self.update.at.words}
                was sampled with, and the trajectories have none; tap them, or give --set
                algorithm.old_log_probs=current for a trainer that is on policy""")
            found.append(sample.log_probs.astype(np.float64)[np.asarray(self.mask(sample), bool)])
        return torch.from_numpy(np.concatenate(found))

    def reference_log_probs(self) -> Tensor | None:
        """Return log-probs under the reference model, ``[K]``; None where no term needs them."""
        if not self.objective.needs_reference:
            return None
        found = self.update.at_loss(
            "is_loss_debug/ref_log_probs", "ref_log_probs/ref_log_probs", mask=self.mask
        )
        if found is not None:
            return torch.from_numpy(found)
        if self.reference is None:
            raise OracleError(f"""the objective has a KL term (algorithm.kl_coef={self.objective.kl_coef:g}) and nothing
            tells the reference log-probs of {self.update.at.words}; record them with classify= or tap ref_log_probs,
            or give --reference""")
        return self.chosen(self.reference_of_rollout())

    def reference_of_rollout(self) -> list[Array]:
        """Return log-probs under the reference model of the loss tokens of each sample of the rollout."""
        if self.reference is None:
            raise OracleError(f"""a KL in the reward needs reference log-probs of the whole rollout of
            {self.update.at.words}, of which the update has a part only; give --reference""")
        return self._by(self.reference)

    def _by(self, model: LocalPolicy | Reference) -> list[Array]:
        samples = [replace(sample, loss_mask=self.mask(sample)) for sample in self.rollout]
        (micro,) = TokenBatch(samples).microbatches(BatchPlan())
        (values,) = model.log_probs([micro])
        out = np.zeros(len(values))
        out[micro.select.numpy()] = values.numpy()
        ends = np.cumsum([sum(sample.loss_mask) for sample in samples])
        return np.split(out, ends[:-1])


def advantages_of(known: Known, tokens: LossTokens, old: Sequence[Array] | None) -> Tensor:
    """Return the advantages ``[K]`` of an update's loss tokens, from the rewards of its whole rollout.

    Args:
        old: log-probs before the first update of each sample of the rollout, where they were computed.
    """
    rollout, objective = known.rollout, known.objective
    lengths = [sum(known.mask(sample)) for sample in rollout]
    groups = {name: number for number, name in enumerate(dict.fromkeys(s.group_id for s in rollout))}
    penalty = _penalty(known, tokens, old) if objective.kl_in_reward else None
    found = token_advantages(
        torch.tensor([sample.reward for sample in rollout], dtype=torch.float64),
        torch.tensor([groups[sample.group_id] for sample in rollout]),
        torch.from_numpy(np.repeat(np.arange(len(rollout)), lengths)),
        objective,
        penalty,
    )
    return known.chosen(np.split(found.numpy(), np.cumsum(lengths)[:-1]))


def _penalty(known: Known, tokens: LossTokens, old: Sequence[Array] | None) -> Tensor:
    """Return the KL penalty of each loss token of the rollout."""
    whole = list(known.own) == list(range(len(known.rollout)))
    if whole and tokens.old_log_probs is not None and tokens.ref_log_probs is not None:
        return kl_penalty(tokens.old_log_probs, tokens.ref_log_probs, known.objective)
    if old is None:
        raise OracleError(f"""a KL in the reward needs log-probs of the whole rollout of {known.update.at.words} before
        its first update; give --set algorithm.old_log_probs=recompute""")
    ref = known.reference_of_rollout()
    before, frozen = (torch.from_numpy(np.concatenate(values)) for values in (old, ref))
    return kl_penalty(before, frozen, known.objective)
