"""Settings of a recording, as the arguments of `record` state them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regress.capture.forward_inputs import Finders
from regress.errors import CaptureError
from regress.layout import SampleKey

Samples = str | Callable[[Mapping[str, Any]], Sequence[Any]] | None
"""Name of a forward argument with an id for each sample, by row and column, or a function of all arguments."""

CLASSES = {"old": "old_log_probs", "reference": "ref_log_probs"}
"""Kinds of passes without gradients, and the types of their records."""

Classify = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Settings:
    """Arguments of `regress.capture.recording.record`."""

    samples: Samples = None
    activations: str | None = None
    routing: bool = False
    gradient: bool | str = True
    param: bool | str = True
    optimizer_state: bool | str = True
    every_n_steps: int = 1
    token_gradient: bool = False
    temperature: float | None = None
    classify: Classify | None = None
    backward_scale: float | None = None
    sequence_group: Any = None
    finders: Finders = field(default_factory=Finders)

    @property
    def options(self) -> dict[str, bool]:
        """Record types that are kept."""
        return {
            "batch_inputs": True,
            "forward_data": True,
            "loss": True,
            "is_loss_debug": True,
            "trajectory": True,
            "old_log_probs": True,
            "ref_log_probs": True,
            "activations": self.activations is not None or self.routing,
            "token_gradient": self.token_gradient,
            "gradient": bool(self.gradient),
            "gradient_clipped": bool(self.gradient),
            "param": bool(self.param),
            "optimizer": bool(self.optimizer_state),
        }

    @property
    def kept(self) -> dict[str, bool | str]:
        """Tensors of parameters that are kept, by type of record: all, none, or a pattern of their names."""
        return {"gradient": self.gradient, "param": self.param, "optimizer": self.optimizer_state}


def sample_key(value: Any) -> SampleKey:
    """Return a sample's id as ``(group_id, run_id)``: a pair as it is, anything else as a group of one.

    Raises:
        CaptureError: for what is not an id.
    """
    if isinstance(value, tuple | list) and len(value) == 2:
        group, run = (_plain(part) for part in value)
        if isinstance(group, str | int) and isinstance(run, int):
            return str(group), run
    elif isinstance(plain := _plain(value), str | int | float):
        return str(plain), 0
    raise CaptureError(f"""samples= tells the id {value!r}, but an id is a text, a number, or a pair of a group and a
    number: give one for each sample, by row and column""")


def _plain(value: Any) -> Any:
    """Return a number of torch or numpy as one of Python; anything else as it is."""
    one = hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1
    return value.item() if one else value


def as_keys(values: Any, count: int) -> list[SampleKey]:
    """Return ids as keys, one for each sample; raise `CaptureError` for another number of them, or what is none."""
    if isinstance(values, str | Mapping) or not hasattr(values, "__iter__"):
        raise CaptureError(f"""samples= tells {values!r}, but the batch holds {count} samples: give a list of ids, one
        for each, by row and column""")
    found = values.reshape(-1) if getattr(values, "ndim", 1) == 0 else values
    keys = [sample_key(value) for value in found]
    if len(keys) != count:
        raise CaptureError(f"""samples= tells {len(keys)} ids, but the batch holds {count} samples: give one for each,
        by row and column""")
    return keys


def segment_keys(samples: Samples, arguments: Mapping[str, Any], count: int) -> list[SampleKey] | None:
    """Return the keys of the samples of a forward pass, where the caller names them.

    Raises:
        CaptureError: if there is no such argument, or another number of ids than of samples.
    """
    if samples is None:
        return None
    if callable(samples):
        return as_keys(samples(arguments), count)
    if samples not in arguments:
        raise CaptureError(f"""record(samples={samples!r}) names no argument of the forward pass, which has
        {", ".join(arguments)}: correct it, or give a function of them""")
    return as_keys(arguments[samples], count)
