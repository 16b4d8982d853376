"""What is recorded, as the arguments of `record` say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regress.capture.inputs import Finders
from regress.layout import SampleKey

Samples = str | Callable[[Mapping[str, Any]], Sequence[Any]] | Sequence[Any] | None
"""A forward argument, a function of all of them, or the ids themselves, one for each sample in order."""

Classify = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Settings:
    """See `regress.capture.recording.record`, whose arguments these are."""

    samples: Samples = None
    activations: str | None = None
    gradient: bool | str = True
    param: bool | str = True
    optimizer_state: bool | str = True
    token_gradient: bool = False
    temperature: float | None = None
    classify: Classify | None = None
    backward_scale: float | None = None
    chunk: int | None = None
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
            "activations": self.activations is not None,
            "token_gradient": self.token_gradient,
            "gradient": bool(self.gradient),
            "gradient_clipped": bool(self.gradient),
            "param": bool(self.param),
            "optimizer": bool(self.optimizer_state),
        }


def sample_key(value: Any) -> SampleKey:
    """A sample's id as ``(group_id, run_id)``: a pair as it is, anything else as a group of one."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return str(value[0]), int(value[1])
    return str(value.item() if hasattr(value, "item") else value), 0
