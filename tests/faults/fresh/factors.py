"""Faults between the two factors of a low-rank adapter whose layer is split over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import linear

from regress.parallel import factors
from regress.parallel.factors import InputFactor
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded


@fault(
    category="S",
    fresh=True,
    source="a row-parallel layer whose adapter skips the reduction of its base layer",
    cases=("lora",),
    variants=("tp2",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
    rules=("tensor-exchange", "module"),  # the first one names a sum left out
)
def values_between_factors_not_summed(patch: Patch) -> None:
    """Each rank multiplies the second factor by what its own columns of the first have made."""

    def wrong(self: InputFactor, module: nn.Module, mesh: Any, x: Tensor) -> Tensor:
        return linear(x, factors._weight(module))

    patch.setattr(InputFactor, "_forward", wrong)


@fault(
    category="S",
    kind="precision",
    fresh=True,
    source="peft: autocast_adapter_dtype, and sums in the dtype of the adapter",
    cases=("lora",),
    variants=("tp2-sp",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("tensor-exchange", "module", "precision"),
)
def values_between_factors_in_bfloat16(patch: Patch) -> None:
    """Each rank rounds its part of the values between the factors to half precision before they are scattered."""

    def wrong(self: InputFactor, module: nn.Module, mesh: Any, x: Tensor) -> Tensor:
        own = rounded(linear(x, factors._weight(module)))
        partial = DTensor.from_local(own, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[self.output_layout]).to_local()

    patch.setattr(InputFactor, "_forward", wrong)
