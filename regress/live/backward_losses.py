"""Losses that a loop calls backward on, told to a guard."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Heard(Protocol):
    """Interface that takes the losses of a loop."""

    def loss(self, value: Tensor) -> None:
        """Note a loss."""

    def skipped(self) -> None:
        """Drop microbatches of an update that was not made."""


class Losses:
    """Listens to backward passes and to a GradScaler for a guard."""

    def __init__(self, guard: Heard) -> None:
        self._guard = guard

    def before_backward(self, roots: Any, gradients: Any) -> None:
        """Note the loss."""
        root = roots[0] if isinstance(roots, tuple | list) and len(roots) == 1 else roots
        if isinstance(root, Tensor):
            self._guard.loss(root)

    def stepped_by_scaler(self, optimizer: Any) -> None:
        """Drop microbatches of an update that the scaler skipped; those of one that was made are gone already."""
        self._guard.skipped()

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Ignore it."""

    def clip_norm(self, norm: Any, limit: Any) -> None:
        """Ignore it."""

    def after_backward(self) -> None:
        """Ignore it."""

    def scaled(self, scaler: Any) -> None:
        """Ignore it."""

    def unscaled(self, optimizer: Any) -> None:
        """Ignore it."""
