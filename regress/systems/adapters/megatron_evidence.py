"""Shims of the adapter of Megatron, and what proves that a layout was in effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regress.systems.protocol import Cell, Shim

SHIMS = (
    Shim(
        "CUDA's device, streams and factories answered by the CPU",
        33,
        "megatron-core writes out device='cuda' and torch.cuda.current_device()",
    ),
    Shim(
        "tracker of random states left alone",
        8,
        "it keeps states of CUDA; dropout is 0, nothing is drawn",
    ),
    Shim(
        "type of float32 tensors named as CUDA's",
        5,
        "the optimizers know float32 by the name torch.cuda.FloatTensor",
    ),
    Shim(
        "RMS norm of torch with the mark of sequence parallelism",
        8,
        "megatron-core's wrapper of torch's norm refuses sequence parallelism, its other norms need CUDA",
        touches_numerics=True,
        layouts=("*-sp*",),
    ),
    Shim(
        "a name that the router asks for defined as None",
        1,
        "without Transformer Engine the router ends with NameError where it asks whether te_general_gemm is None",
        layouts=("moe-*",),
    ),
)

SPLIT = {
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "SequentialMLP",
    "MoEAlltoAllTokenDispatcher",
}
"""Modules whose work is shared by ranks."""


def lacking(facts: Mapping[str, Any], cell: Cell, passes: int) -> Iterator[str]:
    """Yield what shows that a layout was not in effect, by the facts that the adapter has gathered.

    Args:
        passes: how often the layers had to run.
    """
    settings = cell.layout.settings
    if facts["updates"] != cell.updates:
        yield f"it made {facts['updates']} updates of {cell.updates}"
    schedule = "forward_backward_no_pipelining"
    if settings["pp"] > 1:
        schedule = "forward_backward_pipelining_without_interleaving"
        if settings.get("virtual"):
            schedule = "forward_backward_pipelining_with_interleaving"
    if facts["passes"] != passes:
        yield f"the layers ran {facts['passes']} times, not {passes}"
    part = 1 / settings["tp"] if settings.get("sp") else 1.0
    if any(length != part for length in facts["lengths"]):
        yield f"a layer worked on {facts['lengths']} of the sequence, not on {part}"
    if facts["schedule"] != schedule:
        yield f"the schedule is {facts['schedule']}"
    if settings.get("distributed") and "DistributedOptimizer" not in facts["optimizer"]:
        yield f"the optimizer is a {', '.join(facts['optimizer'])}"
    if settings["tp"] * settings["pp"] > 1 and facts["held"] > 0.9:
        yield f"a rank holds {facts['held']} of the elements"
    if settings.get("ep", 1) > 1 and ("SequentialMLP" not in facts["modules"] or facts["held"] > 0.9):
        yield f"a rank holds {facts['held']} of the elements, so experts are not shared"
    if settings.get("bucket") and facts["buckets"] < 2:
        yield "the gradients are in one bucket"
    if cell.layout.ranks > 1 and not facts["collectives"]:
        yield "nothing was communicated"
