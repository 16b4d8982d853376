"""Routers of mixtures of experts: the experts that they chose for each token, their weights, and the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regress.errors import CaptureError

EXPERTS, WEIGHTS = "/experts", "/weights"
"""Ends of the names under which a router's choice is recorded; its logits have the router's own name."""


class Routed(NamedTuple):
    """Output of a router: ``[..., E]`` logits, ``[..., k]`` weights and numbers of the chosen experts."""

    logits: Tensor
    weights: Tensor
    experts: Tensor

    def named(self, name: str) -> dict[str, Tensor]:
        """Return the tensors by the names they are recorded under, the experts of a token in ascending order."""
        experts, order = self.experts.sort(dim=-1)
        return {name: self.logits, name + WEIGHTS: self.weights.gather(-1, order), name + EXPERTS: experts}


def routed(output: Any) -> Routed | None:
    """Return what a module's output tells of a choice of experts; None if it is not a router's."""
    parts = output if isinstance(output, tuple) else ()
    tensors = [part for part in parts if isinstance(part, Tensor)]
    chosen = [part for part in tensors if part.dtype in (torch.int64, torch.int32)]
    floats = [part for part in tensors if part.is_floating_point()]
    if len(chosen) != 1 or len(floats) != 2:
        return None
    (experts,) = chosen
    weights = [part for part in floats if part.shape == experts.shape]
    logits = [
        part for part in floats if part.shape[:-1] == experts.shape[:-1] and part.shape != experts.shape
    ]
    return Routed(logits[0], weights[0], experts) if len(weights) == len(logits) == 1 else None


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that look like routers, by name: those of transformers, ``...TopKRouter``.

    Raises:
        CaptureError: if there is none.
    """
    found = {
        name: one for name, one in model.named_modules() if type(one).__name__.lower().endswith("router")
    }
    if not found:
        raise CaptureError(f"""record(routing=True) found no router in {type(model).__name__}, a module whose class is
        named ...Router and that returns logits, weights and the numbers of the chosen experts; leave routing out, or
        record the module's outputs with activations=""")
    return found
