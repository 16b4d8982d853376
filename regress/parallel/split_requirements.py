"""Sizes of a model that ranks have to share: a sentence for each split that they do not allow. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

FILLING = ("1f1b",)
"""Pipeline schedules that need as many microbatches as there are stages."""
IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Those that need microbatches in rounds of one size."""

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose modules tensor parallelism splits and whose blocks pipelines cut into stages, by ``model_type``."""


def tensor_refusal(kind: str, sizes: Mapping[str, int], count: int) -> str | None:
    """Return why ``count`` ranks cannot share the matrix products of a model; None if they can.

    Args:
        kind: family, the model's ``model_type``.
        sizes: what they have to divide, by its key in ``model.config``.
    """
    if kind not in FAMILIES:
        return (
            f"parallel.tp={count}: a {kind} model cannot be split by tensor parallelism; set parallel.tp=1, or "
            f"model.family to one of {', '.join(FAMILIES)}"
        )
    return divisor_refusal(kind, sizes, count)


def divisor_refusal(kind: str, sizes: Mapping[str, int], count: int) -> str | None:
    """Return why ``count`` ranks cannot share sizes of a model; None if they can."""
    key = next((key for key, value in sizes.items() if value % count), None)
    if key is None:
        return None
    return (
        f"parallel.tp={count} does not divide {key}={sizes[key]} of this {kind} model; choose a tp that does, or "
        f"set model.config.{key} to a multiple of {count}"
    )


def recurrent_refusal(layer: str, kind: str, count: int) -> str:
    """Return why context parallelism cannot split the samples of a model with layers of a state."""
    return (
        f"parallel.cp={count} splits a sample over ranks, and {layer} of this {kind} model hands a state from token to "
        "token; set parallel.cp=1"
    )


def heads_refusal(heads: int, count: int, tp: int) -> str | None:
    """Return why ``count`` context-parallel ranks cannot share heads by ulysses; None if they can.

    Args:
        heads: attention heads of each of ``tp`` tensor-parallel ranks.
    """
    if heads % count == 0:
        return None
    left = f"{heads} attention heads" + (f" (of each of {tp} tensor-parallel ranks)" if tp > 1 else "")
    return (
        f"parallel.cp={count}: ulysses shares heads and the model has {left}; choose a divisor of {heads}, or "
        "parallel.cp_method=ring or all_gather"
    )


def experts_refusal(name: str, number: int | None, count: int) -> str | None:
    """Return why ``count`` ranks cannot share the experts of a layer; None if they can.

    Args:
        name: what to call the model.
    """
    if number is None:
        return (
            f"parallel.ep={count}: {name} has no experts to share; set parallel.ep=1 or take a "
            "mixture-of-experts model"
        )
    if number % count:
        return (
            f"parallel.ep={count}: the model has {number} experts a layer, which {count} ranks cannot share equally; "
            f"choose a divisor of {number}"
        )
    return None


def compile_refusal(layer: str, backend: str) -> str:
    """Return why layers that carry a state from token to token are not compiled."""
    return (
        f"model.compile={backend} would compile {layer}, which runs sample by sample, anew for every layout; set "
        "model.compile=null"
    )


def family_refusal(kind: str) -> str | None:
    """Return why a model cannot be cut into pipeline stages; None if it can."""
    if kind in FAMILIES:
        return None
    return (
        f"parallel.pp: a {kind} model cannot be cut into stages; set parallel.pp=1, or model.family to one of "
        f"{', '.join(FAMILIES)}"
    )


def stages_refusal(blocks: int, count: int) -> str | None:
    """Return why ``count`` pipeline stages have not enough of a model to lie on; None if they have."""
    if count <= blocks + 2:
        return None
    return (
        f"{count} pipeline stages (parallel.pp * parallel.pp_stages_per_rank): the model has {blocks + 2} parts to "
        f"lay on them (embedding, {blocks} blocks, output projection); lower one of them, or use a deeper model"
    )


def microbatches_refusal(schedule: str, microbatches: int, ranks: int, stages: int) -> str | None:
    """Return why a pipeline schedule cannot order a number of microbatches; None if it can."""
    rounds = max(1, microbatches // ranks)
    if schedule in FILLING and microbatches < stages:
        rule = f"at least {stages}, one for each stage"
    elif schedule in IN_ROUNDS and microbatches % rounds:
        rule = f"a number of them that its {rounds} rounds divide (such as a multiple of parallel.pp={ranks})"
    else:
        return None
    return (
        f"parallel.pp_schedule={schedule} needs {rule}, and the mini-batch has {microbatches} microbatches on each "
        "rank; change batching.micro_batch_size (of a warm start: warm_start.batch_size), or choose "
        "parallel.pp_schedule=gpipe or looped_bfs"
    )
