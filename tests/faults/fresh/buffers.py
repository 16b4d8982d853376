"""Faults of the buffers in which data-parallel ranks collect and sum their gradients."""

from __future__ import annotations

from typing import Any

from regress.engine.build import Run
from regress.parallel import sharded
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import before_the_second_backward_pass, sums_of


@fault(
    category="B",
    fresh=True,
    source="a layer that two buckets of an overlapped all-reduce hold",
    cases=("tools",),
    variants=("dp2-packed-budget48",),
    first="gradient",
    names=r"model\.layers\.1\..*",
    rules=(
        "gradient-of-one-layer",  # names the sum over ranks
        "gradient-averaged-over-ranks",  # names a sum taken twice
        "gradient-power-of-two",  # names a sum that is taken twice
        "gradient-scale",
        "gradients",
    ),
)
def last_layer_in_two_buckets(run: Run) -> None:
    """Gradients of the last layer are summed over ranks, and the sums once more."""
    found = sums_of(run)
    found += [([name for name in names if ".layers.1." in name], group) for names, group in found]


@fault(
    category="B",
    fresh=True,
    source="FSDP2: set_gradient_divide_factor is not recursive",
    variants=("fsdp2-noreshard-packed-budget64",),
    first="gradient",
    names=r"model\.embed_tokens\.weight|model\.norm\.weight|lm_head\.weight",
    rules=("gradient-averaged-over-ranks", "gradient-power-of-two", "gradient-scale", "gradients"),
)
def parameters_outside_of_blocks_averaged(patch: Patch) -> None:
    """Gradients of blocks are summed over shards, and those of all other parameters are averaged."""
    right: Any = sharded.apply

    def wrong(model: Any, mesh: Any, **rest: Any) -> None:
        right(model, mesh, **rest)
        model.set_gradient_divide_factor(float(mesh.size()))

    patch.setattr(sharded, "apply", wrong)


@fault(
    category="B",
    fresh=True,
    source="Fast-LLM#550: a buffer that a rank resets when it gets a new microbatch",
    variants=("dp4-packed-mbs2",),
    first="gradient",
    rules=("accumulation", "samples-in-the-gradient", "backward-or-accumulation", "gradients"),
)
def first_microbatch_of_a_rank_wiped(patch: Patch) -> None:
    """One rank drops the gradients of its first microbatch before its second one."""
    before_the_second_backward_pass(patch, lambda policy, _: policy.zero_grad())
