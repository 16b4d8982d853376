"""Combinations of strategies, or of a strategy and another setting, that cannot work."""

import math

from regress.engine.config.rollout_rules import Rule
from regress.engine.config.schema import Config
from regress.layout import DIMENSIONS


def _replicas(c: Config) -> str | None:
    p = c.parallel
    if p.data_parallel not in ("ddp", "accelerate"):
        return None
    other = next((name for name in ("pp", "fsdp", "ep", "tp") if getattr(p, name) > 1), None)
    if other is not None:
        return (
            f"parallel.data_parallel={p.data_parallel} wraps whole models, and parallel.{other}="
            f"{getattr(p, other)} splits them; set parallel.data_parallel=after_backward."
        )
    if p.data_parallel == "accelerate" and p.cp > 1:
        return (
            f"parallel.data_parallel=accelerate sums over all processes, which parallel.cp={p.cp} gives parts of the "
            "same samples; set parallel.data_parallel=ddp or after_backward."
        )
    return None


def _wrapper(c: Config) -> str | None:
    if c.parallel.wrapper is None or c.parallel.data_parallel == "ddp":
        return None
    return (
        f"parallel.wrapper={c.parallel.wrapper} takes the place of torch's DistributedDataParallel, which parallel."
        f"data_parallel={c.parallel.data_parallel} does not use; set parallel.data_parallel=ddp."
    )


def _hsdp(c: Config) -> str | None:
    if c.parallel.data_parallel != "hsdp" or c.parallel.fsdp > 1:
        return None
    return (
        "parallel.data_parallel=hsdp shards parameters and replicates the shards, but parallel.fsdp=1 leaves them "
        "whole; set parallel.fsdp to 2 or more, or parallel.data_parallel=after_backward."
    )


def _needed(c: Config) -> str | None:
    p = c.parallel
    for key, value, dimension in (
        ("sequence_parallel", p.sequence_parallel, "tp"),
        ("fsdp_param_dtype", p.fsdp_param_dtype, "fsdp"),
        ("fsdp_reduce_dtype", p.fsdp_reduce_dtype, "fsdp"),
    ):
        if value and getattr(p, dimension) == 1:
            stated = "true" if value is True else value
            return (
                f"parallel.{key}={stated} means nothing with parallel.{dimension}=1; set parallel.{dimension} to 2 or "
                f"more, or leave parallel.{key} away."
            )
    return None


def _transformers_plan(c: Config) -> str | None:
    p = c.parallel
    other = next((name for name in ("pp", "ep", "cp") if getattr(p, name) > 1), None)
    if p.tp_implementation == "torch" or not (other or p.sequence_parallel):
        return None
    stated = "parallel.sequence_parallel=true" if other is None else f"parallel.{other}={getattr(p, other)}"
    return f"parallel.tp_implementation=transformers has no plan for {stated}; set parallel.tp_implementation=torch."


def _attention(c: Config) -> str | None:
    if c.parallel.cp == 1 or (c.model.attn_implementation == "sdpa" and c.model.attention is None):
        return None
    if c.model.attention is not None:
        return (
            f"parallel.cp={c.parallel.cp} has attention of its own (parallel.cp_method={c.parallel.cp_method}) in "
            f"place of model.attention={c.model.attention}; set one of them to its default."
        )
    return (
        f"parallel.cp={c.parallel.cp} has attention of its own (parallel.cp_method={c.parallel.cp_method}) in place of "
        f"model.attn_implementation={c.model.attn_implementation}; set model.attn_implementation=sdpa."
    )


def _compile(c: Config) -> str | None:
    split = [name for name in DIMENSIONS if name != "dp" and getattr(c.parallel, name) > 1]
    if c.model.compile is None or not split:
        return None
    return (
        f"model.compile={c.model.compile} compiles whole blocks, which parallel.{split[0]}="
        f"{getattr(c.parallel, split[0])} splits over ranks; set model.compile=null."
    )


def _chunks(c: Config) -> str | None:
    if c.batching.log_prob_chunk_size is None or c.parallel.fsdp == 1:
        return None
    return (
        f"batching.log_prob_chunk_size={c.batching.log_prob_chunk_size} projects outside of the forward pass, where "
        f"parallel.fsdp={c.parallel.fsdp} has the parameters in shards; set batching.log_prob_chunk_size=null."
    )


def _budget(c: Config) -> str | None:
    p, budget = c.parallel, c.batching.max_tokens_per_microbatch
    blocks = p.cp * (2 if p.cp > 1 and p.cp_split == "zigzag" else 1) * (p.tp if p.sequence_parallel else 1)
    multiple = math.lcm(blocks, c.batching.pad_to_multiple_of)
    row = -(-max(c.data.max_seq_length, c.batching.pad_to_length or 1) // multiple) * multiple
    if budget is None or blocks == 1 or row <= budget:
        return None
    return (
        f"batching.max_tokens_per_microbatch={budget} cannot hold one row of {row} tokens, which is what "
        f"data.max_seq_length={c.data.max_seq_length} takes in multiples of {multiple} (parallel splits rows); "
        f"raise it to {row} or more."
    )


def _split_backward(c: Config) -> str | None:
    """Refuse split backward passes with sharded weights: torch 2.13 looks for the weights of a stage before
    its backward pass, when FSDP2 holds shards in their place.
    """
    p = c.parallel
    kept = p.fsdp == 1 or not p.reshard_after_forward
    if p.pp == 1 or kept or p.pp_schedule not in ("interleaved_zero_bubble", "zbv_zero_bubble"):
        return None
    return (
        f"parallel.pp_schedule={p.pp_schedule} computes gradients of weights after those of inputs, and torch loses "
        f"those of weights that parallel.fsdp={p.fsdp} has given back in between; set "
        "parallel.reshard_after_forward=false."
    )


def _router(c: Config) -> str | None:
    if c.model.router_coef == 0.0:
        if c.model.router_scope == "global":
            return None
        return (
            f"model.router_scope={c.model.router_scope} is not read while model.router_coef=0; give that a value or "
            "set model.router_scope=global."
        )
    stated = f"model.router_coef={c.model.router_coef:g} adds a loss to every router"
    for name in ("tp", "pp", "cp"):
        if getattr(c.parallel, name) > 1:
            return (
                f"{stated}, and parallel.{name}={getattr(c.parallel, name)} spreads the layers or tokens of a sample "
                f"over ranks; set parallel.{name}=1, or share the work by parallel.dp, fsdp or ep."
            )
    if c.model.compile is not None:
        return f"{stated}, which model.compile={c.model.compile} would not see; set model.compile=null."
    return None


PARALLEL_RULES: tuple[Rule, ...] = (
    *(_replicas, _wrapper, _hsdp, _needed, _transformers_plan, _attention, _router),
    *(_compile, _chunks, _budget, _split_backward),
)
