"""Evaluate an objective on a batch, as a formula whose settings, inputs and operations can be changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from regress.check.objective_batches import LONGEST, Batch
from regress.compare.diagnosis.counterfactuals import Compute, Formula, Values
from regress.compare.diagnosis.token_formulas import objective_formula
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_evaluation import Samples, advantages_of, gradients_of, loss_of, weights_of
from regress.grpo.objective_evaluation import mistakes as evaluated_mistakes

GRADIENT, LOSS = "token_gradient", "loss"


class Expected:
    """An objective on a batch.

    Attributes:
        formula: gives `GRADIENT`, [N T] flat, and `LOSS`, [1], or [N T] of token losses. Each value is divided by the
            objective's own, or by a thousandth of what is usual in the batch where that is more: no token hides another
            whose ratio is nearer to 1.
        scale: what the values of each quantity are divided by.

    Args:
        from_rewards: True if advantages are those of the rewards, False if those of the batch.
        by_token: True for the sum of token losses in place of their mean.
    """

    def __init__(self, batch: Batch, objective: ObjectiveFields, from_rewards: bool, by_token: bool) -> None:
        settings: Any = ObjectiveFields(**vars(objective))  # unchecked, so that any field may be changed
        inputs = {term: each.flatten() for term, each in batch.values.items()}
        inputs["mask"] = batch.mask.flatten().double()
        if from_rewards:
            del inputs["advantages"]
            inputs |= {"rewards": batch.rewards, "groups": batch.groups}
        self._batch, self._by_token = batch, by_token
        found = self._of_batch(inputs, settings, None)
        self.scale = {name: _size(each.abs()) for name, each in found.items()}
        if not by_token:
            self.scale[LOSS] = found["size"]  # a mean of terms of both signs is small by chance
        mistakes = {} if by_token else {id: self._weighed(weights) for id, weights in _WEIGHTS.items()}
        mistakes |= {id: self._with(*change) for id, change in _INPUTS.items()}
        of_gradients = evaluated_mistakes(gradients_of, Samples(torch.zeros(0), 0), settings)
        mistakes |= {id: self._weighed(None, id) for id in of_gradients}
        swaps = {"rewards": (), "mask": ()}
        self.formula: Formula = objective_formula(self._weighed(None), inputs, settings, swaps, mistakes)

    def _weighed(self, weights: _Weights | None, mistake: str | None = None) -> Compute:
        def compute(values: Values, settings: Any) -> dict[str, Tensor]:
            found = self._of_batch(values, settings, weights, mistake)
            return {name: found[name] / self.scale[name] for name in (GRADIENT, LOSS)}

        return compute

    def _with(self, name: str, change: Callable[[Batch, Tensor], Tensor]) -> Compute:
        plain = self._weighed(None)
        return lambda values, settings: plain({**values, name: change(self._batch, values[name])}, settings)

    def _of_batch(
        self, values: Values, settings: Any, weights: _Weights | None, mistake: str | None = None
    ) -> dict[str, Tensor]:
        """Return `GRADIENT`, `LOSS`, and the size of the terms that the loss is the sum of."""
        batch = self._batch
        chosen = torch.nonzero(values["mask"])[:, 0]
        sequence = chosen // batch.width
        samples = Samples(
            sequence, batch.count, torch.arange(batch.count), True, LONGEST, spans=batch.spans.tolist()
        )
        of_samples = "rewards", "groups"
        own = {name: each if name in of_samples else each[chosen] for name, each in values.items()}
        if "advantages" not in own:
            own |= advantages_of(own, samples, settings)
        if self._by_token:
            own["weights"] = torch.ones(len(chosen), dtype=torch.float64)
        elif weights is None:
            own |= weights_of(own, samples, settings)
        else:
            own["weights"] = weights(batch, sequence)
        if mistake is None:
            gradient = gradients_of(own, samples, settings)[GRADIENT]
        else:
            gradient = evaluated_mistakes(gradients_of, samples, settings)[mistake](own, settings)[GRADIENT]
        losses = own["weights"] * loss_of(own, samples, settings)["token_loss"]
        place = torch.zeros(batch.mask.numel(), dtype=torch.float64)
        loss = place.index_copy(0, chosen, losses) if self._by_token else losses.sum()[None]
        return {
            GRADIENT: place.index_copy(0, chosen, gradient),
            LOSS: loss,
            "size": losses.abs().sum().clamp(min=1e-300)[None],
        }


def _size(values: Tensor) -> Tensor:
    """Return what values are divided by."""
    usual = float(values[values > 0].median()) if bool((values > 0).any()) else 1.0
    return values.clamp(min=1e-3 * usual)


_Weights = Callable[[Batch, Tensor], Tensor]


def _each(batch: Batch, sequence: Tensor, denominator: float | Tensor) -> Tensor:
    return torch.ones(len(sequence), dtype=torch.float64) / denominator


_WEIGHTS: Mapping[str, _Weights] = {
    "a_division_by_the_longest_completion,_as_a_mean_over_all_places_has_it": lambda batch, sequence: _each(
        batch, sequence, batch.mask.numel()
    ),
    "a_sum_over_samples_divided_by_the_longest_completion": lambda batch, sequence: _each(
        batch, sequence, batch.width
    ),
    "a_mean_over_the_whole_completion_of_each_sample,_tokens_without_loss_counted": lambda batch, sequence: (
        _each(batch, sequence, batch.count * batch.spans[sequence])
    ),
    "a_sum_of_the_means_of_samples": lambda batch, sequence: _each(
        batch, sequence, batch.mask.sum(1)[sequence]
    ),
    "a_division_by_tokens_and_by_samples": lambda batch, sequence: _each(
        batch, sequence, batch.tokens * batch.count
    ),
    "a_division_by_the_samples_of_a_group": lambda batch, sequence: _each(
        batch, sequence, float(torch.bincount(batch.groups).max())
    ),
}
"""Denominators that people take, by name, as weights of loss tokens, [K]."""


def _shifted(by: int) -> Callable[[Batch, Tensor], Tensor]:
    def change(batch: Batch, values: Tensor) -> Tensor:
        rows = values.reshape(batch.mask.shape)
        moved = torch.zeros_like(rows)
        if by > 0:
            moved[:, by:] = rows[:, :-by]
        else:
            moved[:, :by] = rows[:, -by:]
        return moved.flatten()

    return change


_INPUTS: Mapping[str, tuple[str, Callable[[Batch, Tensor], Tensor]]] = {
    "the_mask_one_token_late": ("mask", _shifted(1)),
    "the_mask_one_token_early": ("mask", _shifted(-1)),
    "the_mask_of_whole_completions": ("mask", lambda batch, values: batch.inside.double().flatten()),
    "the_first_loss_token_of_each_sample_left_out": (
        "mask",
        lambda batch, values: (batch.mask & (batch.mask.cumsum(1) > 1)).double().flatten(),
    ),
    "the_last_loss_token_of_each_sample_left_out": (
        "mask",
        lambda batch, values: (batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) > 1)).double().flatten(),
    ),
    "the_advantages_of_the_next_sample": (
        "advantages",
        lambda batch, values: values.reshape(batch.mask.shape).roll(-1, 0).flatten(),
    ),
    "the_advantages_of_the_sample_before": (
        "advantages",
        lambda batch, values: values.reshape(batch.mask.shape).roll(1, 0).flatten(),
    ),
    "advantages_less_their_mean_over_the_batch": (
        "advantages",
        lambda batch, values: values - values[batch.mask.flatten()].mean(),
    ),
    "advantages_whitened_over_the_batch": ("advantages", lambda batch, values: _whitened(batch, values)),
}
"""Input that people take otherwise, by name, and the batch's values of it."""


def _whitened(batch: Batch, values: Tensor) -> Tensor:
    known = values[batch.mask.flatten()]
    return (values - known.mean()) / (known.std() + 1e-8)
