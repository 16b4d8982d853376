"""Faults of adapters on several ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from regress.engine.build import Run
from regress.engine.local import local
from regress.parallel.factors import OutputFactor
from regress.parallel.families import Family
from tests.faults import adapter
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import (
    on_rank,
    without,
)


@fault(
    category="S",
    source="verl#7495",
    cases=("lora",),
    variants=("dp2",),
    first="activations",
    ranks=(1,),
    rules=("weights-of-a-rank",),
    names=r"model\.layers\..|model\.norm|lm_head",
)
def adapter_off_on_one_rank(run: Run) -> None:
    """One rank computes with the base model."""
    if on_rank(1):
        adapter.adapter_switched_off(run)


@fault(
    category="S",
    source="VeOmni PR#1115",
    cases=("lora",),
    variants=("dp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("reduction", "not-reduced"),
    names=r".*\.lora_A\..*",
)
def factors_a_not_summed(run: Run) -> None:
    """Replicas keep their own gradients of the factors A."""
    without(run, ".lora_A.")


@fault(
    category="S",
    source="torchtitan PR#2388",
    cases=("lora",),
    variants=("tp2",),
    first="gradient",
    ranks=(0, 1),
    rules=("reduction", "backward-of-a-module"),
)
def gradient_between_factors_not_summed(patch: Patch) -> None:
    """A gets from each rank the gradient through that rank's outputs alone."""

    def forward(self: OutputFactor, module: nn.Linear, mesh: Any, x: Tensor) -> Tensor:
        return linear(x, local(module.weight))

    patch.setattr(OutputFactor, "_forward", forward)


@fault(
    category="S",
    source="Megatron#1446",
    cases=("lora",),
    variants=("tp2-sp",),
    first="gradient",
    ranks=(0, 1),
    rules=("reduction",),
    names=r".*\.(o|down)_proj\.lora_B\..*",
)
def factors_b_of_own_tokens(patch: Patch) -> None:
    """Under sequence parallelism the whole factors B keep the gradients of a rank's own tokens."""
    right: Any = Family.partial
    patch.setattr(Family, "partial", lambda *args: (name for name in right(*args) if ".lora_B." not in name))


@fault(
    category="S",
    source="Megatron#1446, the reverse",
    cases=("lora",),
    variants=("tp2-sp",),
    first="gradient",
    ranks=(0, 1),
    # gradient-averaged-over-ranks: it says that what is whole on each rank is summed over them
    rules=("gradient-power-of-two", "gradient-averaged-over-ranks"),
    names=r".*\.(q|v|gate)_proj\.lora_A\..*",
)
def factors_a_of_gathered_tokens_summed(patch: Patch) -> None:
    """Gradients of factors A, which saw all tokens on every rank, are summed over the ranks."""
    patch.setattr(Family, "_factors_of_gathered", lambda *args: iter(()))


# @@new
