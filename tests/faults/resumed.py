"""Faults between two processes, of which the second goes on from the checkpoint of the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from regress.engine.checkpoint import resume
from regress.engine.checkpoint.weights import load_weights
from tests.faults.fault import fault
from tests.faults.patch import Patch

UNTIL_THE_END: dict[str, Any] = {"steps": None, "variants": ("resume-at2",)}


@fault(
    category="N",
    source="the_well#77",
    first="optimizer",
    rules=("step-counter", "no-update", "moments-dropped"),
    **UNTIL_THE_END,
)
def optimizer_not_restored(patch: Patch) -> None:
    """Weights come from the checkpoint, and the optimizer begins anew."""
    patch.setattr(resume, "_restore_optimizer", lambda *_: None)


@fault(
    category="N",
    source="OpenTau#185, Megatron#1359",
    first="activations",
    rules=("module-dtype", "embedding"),
    **UNTIL_THE_END,
)
def weights_restored_in_bfloat16(patch: Patch) -> None:
    """Weights of a checkpoint are rounded to half precision."""
    right: Any = load_weights

    def wrong(owner: Any, weights: Mapping[str, Tensor]) -> None:
        right(owner, {name: value.bfloat16().to(value.dtype) for name, value in weights.items()})

    patch.setattr(resume, "load_weights", wrong)


@fault(
    category="N",
    source="Megatron PR#5071, NeMo-RL PR#2372",
    first="activations",
    rules=("stale-weights", "embedding", "module"),
    **UNTIL_THE_END,
)
def weights_not_restored(patch: Patch) -> None:
    """The optimizer's state comes from the checkpoint, and the weights are the initial ones."""
    patch.setattr(resume, "load_weights", lambda *_: None)
