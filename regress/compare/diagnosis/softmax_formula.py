"""Log-softmax, entropy and their backward pass as a formula of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.hypotheses import Floats
from regress.compare.diagnosis.logit_temperature import temperature

if TYPE_CHECKING:
    from torch import Tensor

    from regress.compare.diagnosis.counterfactuals import Formula

TOKEN_GRADIENTS = ("token_gradient", "entropy_gradient")
"""Gradients of the loss by log-probs and by entropies."""


@dataclass(frozen=True)
class Softmax:
    """Settings of a log-softmax."""

    temperature: float


def _entropy(z: Tensor) -> Tensor:
    normalized = z - z.logsumexp(-1, keepdim=True)
    return -(normalized.exp() * normalized).sum(-1)


def _not_centred(z: Tensor) -> Tensor:
    """Return entropies whose gradient is -p log p, not -p (log p + H)."""
    top = z.logsumexp(-1, keepdim=True).detach()
    return -((z - top).exp() * (z - top).detach()).sum(-1)


def _softmax(values: Mapping[str, Tensor], settings: Softmax) -> dict[str, Tensor]:
    """Return log_probs and entropy [K] of logits [K, V], and logit_gradient [K, V] where those by both are known."""
    import torch

    logits = values["logits"].detach().requires_grad_()
    z = logits / settings.temperature
    own = (z - z.logsumexp(-1, keepdim=True)).gather(1, values["targets"][:, None])[:, 0]
    entropy = _entropy(z)
    found = {"log_probs": own, "entropy": entropy}
    if "token_gradient" not in values:
        return found
    total = (values["token_gradient"] * own).sum()
    if "entropy_gradient" in values:
        total = total + (values["entropy_gradient"] * entropy).sum()
    if not total.requires_grad:
        return found
    return {**found, "logit_gradient": torch.autograd.grad(total, logits)[0]}


def gradient_parts(formula: Formula) -> dict[str, Tensor]:
    """Return the parts ``[K, V]`` that a gradient of logits is the sum of, by name."""
    import torch

    values, logits = formula.inputs, formula.inputs["logits"].detach().requires_grad_()
    z = logits / formula.settings.temperature
    by_log_probs, by_entropy = (values.get(name) for name in TOKEN_GRADIENTS)
    totals = {}
    if by_log_probs is not None:
        totals["target's logit"] = by_log_probs * z.gather(1, values["targets"][:, None])[:, 0]
        totals["normalization"] = -by_log_probs * z.logsumexp(-1)
    if by_entropy is not None:
        totals["entropy's p log p"] = by_entropy * _not_centred(z)
        totals["entropy's normalization"] = by_entropy * (_entropy(z) - _not_centred(z))
    found = {
        name: torch.autograd.grad(total.sum(), logits, retain_graph=True)[0] for name, total in totals.items()
    }
    return {f"the gradient of the {name}": values for name, values in found.items()}


def softmax_formula(
    logits: Floats,
    ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    log_probs: Floats,
    gradients: Mapping[str, Floats],
) -> Formula:
    """Return what logits give, at the temperature of the golden log-probs.

    Args:
        logits: ``[frame.size, V]``; ``ids`` the tokens ``[frame.size]``.
        rows: ``[K]`` the loss tokens; ``log_probs`` theirs.
        gradients: of the loss by log-probs and entropies, those that are known.
    """
    import torch

    from regress.compare.diagnosis.counterfactuals import Formula

    z = logits[rows]
    t, _ = temperature(log_probs, z, ids[rows])
    inputs = {"logits": torch.from_numpy(z.copy()), "targets": torch.from_numpy(ids[rows])}
    for name, step in (("token_before", -1), ("token_after", 1)):
        inputs[name] = torch.from_numpy(ids[np.clip(rows + step, 0, len(ids) - 1)])
    inputs |= {name: torch.from_numpy(values.copy()) for name, values in gradients.items()}
    swaps = {"targets": ("token_before", "token_after"), "logits": (), **dict.fromkeys(TOKEN_GRADIENTS, ())}
    return Formula(_softmax, inputs, Softmax(t), {"temperature": (1.0, t * t, 1 / t)}, swaps=swaps)
