"""Steps of the optimizer with the gradients that a trainer had."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.optim import Optimizer

from regress.dump.numpy_arrays import Array
from regress.engine.causal_lm_policy import LocalPolicy


def step_with(
    optimizer: Optimizer, policy: LocalPolicy, gradients: Mapping[str, Array], limit: float | None
) -> None:
    """Let an optimizer step with given gradients, clipped to a norm, if they are those of every parameter."""
    own = dict(policy.named_parameters())
    if own.keys() - gradients.keys():
        return
    wide = {name: torch.from_numpy(gradients[name].astype(np.float64)) for name in own}
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in wide.values()]))
    factor = 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))  # as the policy clips

    @torch.no_grad()
    def replace_all(*_: object) -> None:
        for name, parameter in own.items():
            if parameter.grad is not None:
                parameter.grad.copy_(wide[name] * factor)

    optimizer.register_step_pre_hook(replace_all)
