"""Weights before the last update, kept to prove that a sampler still uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from regress.dump.tensor_placements import local


class EarlierWeights:
    """A copy of this rank's part of the parameters as they were before the last update."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: list[Tensor] | None = None

    @property
    def known(self) -> bool:
        """True once an update was made since the first call of `keep`."""
        return self._held is not None

    def keep(self) -> None:
        """Copy the parameters, which are about to change."""
        parts = [local(p) for p in self._model.parameters()]
        if self._held is None:
            self._held = [part.clone() for part in parts]
        else:
            torch._foreach_copy_(self._held, parts)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Put the earlier weights into the model inside; afterwards its own are back, bit for bit.

        Random state and the training mode of modules are the same afterwards, too; dropout is off inside.
        """
        assert self._held is not None
        parts = [local(p) for p in self._model.parameters()]
        own = [part.clone() for part in parts]
        modes = [(module, module.training) for module in self._model.modules()]
        with torch.random.fork_rng(), torch.no_grad():
            try:
                self._model.eval()
                torch._foreach_copy_(parts, self._held)
                yield
            finally:
                torch._foreach_copy_(parts, own)
                for module, mode in modes:
                    module.training = mode
