"""Plants in transformers.Trainer and accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from plants.rewriting import rewritten


@contextmanager
def denominator_of_the_microbatch() -> Iterator[None]:
    """Divide every microbatch by its own tokens."""
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
def last_microbatch_not_reduced() -> Iterator[None]:
    """Average the gradients over the ranks after the first microbatch of a window, and not after the last."""
    from accelerate import Accelerator
    from transformers import Trainer

    @contextmanager
    def at_once(self: Any, model: Any) -> Iterator[None]:
        yield

    own = Trainer.training_step

    def faulty(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if self.accelerator.sync_gradients:
            with model.no_sync():
                return own(self, model, *args, **options)
        return own(self, model, *args, **options)

    with patch.object(Accelerator, "no_sync", at_once), patch.object(Trainer, "training_step", faulty):
        yield


@contextmanager
def positions_from_one() -> Iterator[None]:
    """Count positions from 1."""
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
def clipped_to_half() -> Iterator[None]:
    """Clip gradients to half of the norm that is asked for."""
    from accelerate import Accelerator

    own = Accelerator.clip_grad_norm_

    def faulty(self: Any, parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        return own(self, parameters, max_norm / 2, norm_type)

    with patch.object(Accelerator, "clip_grad_norm_", faulty):
        yield


@contextmanager
def weights_decay() -> Iterator[None]:
    """Decay all parameters by a hundredth, norms included, where no decay was asked for."""
    from transformers import Trainer

    own = Trainer.create_optimizer

    def faulty(self: Any, *args: Any, **options: Any) -> Any:
        found = own(self, *args, **options)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01
        return found

    with patch.object(Trainer, "create_optimizer", faulty):
        yield


@contextmanager
def last_label_masked() -> Iterator[None]:
    """Leave the last token of each sample out of the loss, and count it in the denominator."""
    from transformers import Trainer

    own = Trainer._prepare_inputs

    def faulty(self: Any, inputs: Any) -> Any:
        found = own(self, inputs)
        last = found["attention_mask"].sum(1) - 1
        labels = found["labels"].clone()
        labels[range(len(last)), last] = -100
        return {**found, "labels": labels}

    with patch.object(Trainer, "_prepare_inputs", faulty):
        yield


@contextmanager
def rows_reversed() -> Iterator[None]:
    """Turn the order of the rows of every microbatch."""
    from transformers import Trainer

    own = Trainer._prepare_inputs

    def turned(self: Any, inputs: Any) -> Any:
        return {name: value.flip(0) for name, value in own(self, inputs).items()}

    with patch.object(Trainer, "_prepare_inputs", turned):
        yield


@contextmanager
def wider_padding() -> Iterator[None]:
    """Add five columns of padding on the right."""
    from torch.nn.functional import pad
    from transformers import Trainer

    own = Trainer._prepare_inputs

    def wider(self: Any, inputs: Any) -> Any:
        fill = {"labels": -100}
        return {
            name: pad(value, (0, 5), value=fill.get(name, 0)) for name, value in own(self, inputs).items()
        }

    with patch.object(Trainer, "_prepare_inputs", wider):
        yield


@contextmanager
def evaluated_between() -> Iterator[None]:
    """Run the model once more, without gradients, before every microbatch."""
    import torch
    from transformers import Trainer

    own = Trainer.training_step

    def more(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        model.eval()
        with torch.no_grad():
            model(**inputs)
        return own(self, model, inputs, *args, **options)

    with patch.object(Trainer, "training_step", more):
        yield


@contextmanager
def loss_in_float64() -> Iterator[None]:
    """Compute the cross entropy in float64."""
    from transformers.loss import loss_utils

    changes = {"logits.float()": "logits.double()", "return loss": "return loss.float()"}
    with rewritten(loss_utils.ForCausalLMLoss, changes):
        yield


@contextmanager
def gradients_zeroed_in_place() -> Iterator[None]:
    """Fill gradients with zeros after an update, in place of dropping them."""
    from torch import nn

    own = nn.Module.zero_grad

    with patch.object(nn.Module, "zero_grad", lambda self, set_to_none=True: own(self, set_to_none=False)):
        yield
