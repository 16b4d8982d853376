"""Faults of transformers.Trainer and accelerate, each planted around one cell; fixed before their first run.

``regress systems run trainer --cell CELL --plant tests.systems.plants:NAME`` from the root of the repository.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

EXPECTED: Mapping[str, tuple[str, str]] = {
    "denominator_of_the_microbatch": ("accumulation/sft/dense", "loss"),
    "last_label_masked": ("padded/sft/dense", "loss"),
    "positions_shifted": ("padded/sft/gpt2", "log_probs"),
    "gradients_scaled_by_ranks": ("ddp2/sft/dense", "loss"),
    "clipped_twice": ("padded/sft/dense", "param"),
    "one_layer_without_gradient": ("ddp2-accumulation/sft/tied", "gradient"),
}
"""Fault -> the cell it is planted in, and the quantity that has to diverge first."""


@contextmanager
def denominator_of_the_microbatch() -> Iterator[None]:
    """Denominator: every microbatch is divided by its own tokens."""
    from transformers import Trainer

    own = Trainer.compute_loss

    def faulty(
        self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        mine = inputs["labels"][..., 1:].ne(-100).sum()
        return own(self, model, inputs, return_outputs, mine)

    with patch.object(Trainer, "compute_loss", faulty):
        yield


@contextmanager
def last_label_masked() -> Iterator[None]:
    """Mask: the last token of each sample is left out."""
    from transformers import Trainer

    own = Trainer._prepare_inputs

    def faulty(self: Any, inputs: Any) -> Any:
        found = own(self, inputs)
        last = found["attention_mask"].sum(1) - 1
        found["labels"][range(len(last)), last] = -100
        return found

    with patch.object(Trainer, "_prepare_inputs", faulty):
        yield


@contextmanager
def positions_shifted() -> Iterator[None]:
    """Positions: they begin at 1."""
    import torch
    from transformers import Trainer

    own = Trainer._prepare_inputs

    def faulty(self: Any, inputs: Any) -> Any:
        found = own(self, inputs)
        B, T = found["input_ids"].shape
        return {**found, "position_ids": torch.arange(1, T + 1).expand(B, T)}

    with patch.object(Trainer, "_prepare_inputs", faulty):
        yield


@contextmanager
def gradients_scaled_by_ranks() -> Iterator[None]:
    """Reduction: the loss is not multiplied by the number of ranks that average it."""
    from transformers import Trainer

    own = Trainer.compute_loss

    def faulty(self: Any, *args: Any, **options: Any) -> Any:
        return own(self, *args, **options) / self.accelerator.num_processes

    with patch.object(Trainer, "compute_loss", faulty):
        yield


@contextmanager
def clipped_twice() -> Iterator[None]:
    """Update: gradients are clipped to half of the norm that is asked for."""
    from accelerate import Accelerator

    own = Accelerator.clip_grad_norm_

    def faulty(self: Any, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        return own(self, parameters, max_norm / 2, norm_type)

    with patch.object(Accelerator, "clip_grad_norm_", faulty):
        yield


@contextmanager
def one_layer_without_gradient() -> Iterator[None]:
    """Backward: the gradient of the last layer's MLP is lost in the first microbatch."""
    from transformers import Trainer

    own = Trainer.training_step

    def faulty(self: Any, *args: Any, **options: Any) -> Any:
        found = own(self, *args, **options)
        if not getattr(self, "_planted", False):
            self._planted = True
            for name, p in self.model.named_parameters():
                if "layers.1.mlp" in name and p.grad is not None:
                    p.grad.zero_()
        return found

    with patch.object(Trainer, "training_step", faulty):
        yield
