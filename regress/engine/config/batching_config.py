"""Division of samples into microbatches, and of the work over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from regress.engine.config.config_messages import in_yaml
from regress.engine.config.config_option import Flag, Origins, Positive, Section, Size, one_of
from regress.layout import DIMENSIONS, ROW_ORDERS, SAMPLE_SPLITS, SEQUENCE_SPLITS

if TYPE_CHECKING:
    from regress.engine.config.config_schema import Config


LAYOUTS = ("padded", "packed")
SIDES = ("right", "left")
TP_IMPLEMENTATIONS = ("torch", "transformers")
CP_METHODS = ("ulysses", "ring", "all_gather")
PP_SCHEDULES = (
    *("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"),
    *("interleaved_zero_bubble", "zbv_zero_bubble"),
)
DATA_PARALLELS = ("after_backward", "ddp", "accelerate", "hsdp")
REDUCED_DTYPES = ("float32", "bfloat16")


@dataclass
class BatchingConfig(Section):
    """Division of samples into microbatches."""

    layout: Annotated[str, one_of(*LAYOUTS)] = "padded"
    """one sample per row, or several packed in one"""
    padding_side: Annotated[str, one_of(*SIDES)] = "right"
    """side of the padding in padded rows"""
    pad_to_multiple_of: Size = 1
    """row lengths are rounded up to a multiple of this"""
    pad_to_length: Size | None = None
    """least row length; null: as long as the longest row of the microbatch"""
    micro_batch_size: Annotated[Size | None, Flag("per-device-train-batch-size")] = None
    """samples per microbatch; null: the whole mini-batch at once"""
    max_tokens_per_microbatch: Size | None = None
    """tokens per microbatch, instead of micro_batch_size"""
    log_prob_chunk_size: Size | None = None
    """loss tokens whose logits are held at once (computed again in the backward pass); null: all of a microbatch"""
    vocab_chunk_size: Size = 1 << 14
    """tokens of the vocabulary that the softmax of log-probs takes at a time"""
    softmax_block_size: Size = 1 << 20
    """elements of the largest scratch buffer of that softmax; chosen to fit a cache"""
    row_order: Annotated[str, one_of(*ROW_ORDERS)] = "given"
    """order in which samples fill rows and microbatches"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        samples, budget, longest = (
            self.micro_batch_size,
            self.max_tokens_per_microbatch,
            run.data.max_seq_length,
        )
        if samples is not None and budget is not None:
            yield f"""batching.micro_batch_size={samples} and batching.max_tokens_per_microbatch={budget} both decide
            how large a microbatch is; set one of them to null."""
        if self.pad_to_length is not None and self.pad_to_length < longest:
            yield f"""batching.pad_to_length={self.pad_to_length} is shorter than data.max_seq_length={longest}, so that
            rows would differ in length after all; set it to null or to at least {longest}."""
        if budget is not None:
            yield from self._budget_conflicts(budget, longest, run.parallel.row_blocks)
        if self.layout == "packed" and self.padding_side == "left":
            yield """batching.padding_side=left means nothing to batching.layout=packed, whose rows begin with a sample;
            set batching.padding_side=right or batching.layout=padded."""
        if self.log_prob_chunk_size is not None and run.parallel.fsdp > 1:
            yield f"""batching.log_prob_chunk_size={self.log_prob_chunk_size} projects outside of the forward pass,
            where parallel.fsdp={run.parallel.fsdp} has the parameters in shards; set
            batching.log_prob_chunk_size=null."""

    def _budget_conflicts(self, budget: int, longest: int, blocks: int) -> Iterator[str]:
        stated = f"batching.max_tokens_per_microbatch={budget} cannot hold one row of"
        row = self._row(longest, self.pad_to_multiple_of)
        if budget < row:
            yield f"""{stated} {row} tokens, which is what data.max_seq_length={longest} and the padding may ask for;
            set it to at least {row}."""
        multiple = math.lcm(blocks, self.pad_to_multiple_of)
        row = self._row(longest, multiple)
        if budget < row:
            yield f"""{stated} {row} tokens, which is what data.max_seq_length={longest} takes in multiples of
            {multiple} (parallel splits rows); raise it to {row} or more."""

    def _row(self, longest: int, multiple: int) -> int:
        return -(-max(longest, self.pad_to_length or 1) // multiple) * multiple


@dataclass
class ParallelConfig(Section):
    """Parallel dimensions; the product of their extents is the number of processes."""

    pp: Size = 1
    """pipeline stages' ranks"""
    dp: Size = 1
    """replicas of the model, each with its own samples"""
    fsdp: Size = 1
    """ranks that share the parameters (FSDP2), each with its own samples"""
    ep: Size = 1
    """ranks that share the experts, each with its own samples"""
    cp: Size = 1
    """ranks that share the tokens of each sequence"""
    tp: Size = 1
    """ranks that share each matrix product"""
    sample_split: Annotated[str, one_of(*SAMPLE_SPLITS)] = "contiguous"
    """how samples are dealt out to ranks: in blocks, or one after the other"""
    data_parallel: Annotated[str, one_of(*DATA_PARALLELS)] = "after_backward"
    """who sums the gradients over replicas: one collective after the last microbatch, torch's DistributedDataParallel,
    accelerate's, or torch's fully_shard over dp and fsdp"""
    wrapper: str | None = None
    """your own wrapper in place of torch's with data_parallel=ddp, as package.module:function: takes the model and the
    process group, returns a module that averages gradients over the group and has no_sync(); null: torch's"""
    reshard_after_forward: bool = True
    """fsdp: parameters are gathered again for the backward pass"""
    fsdp_param_dtype: Annotated[str, one_of(*REDUCED_DTYPES)] | None = None
    """fsdp: dtype of gathered parameters and of computation; null: that of the model"""
    fsdp_reduce_dtype: Annotated[str, one_of(*REDUCED_DTYPES)] | None = None
    """fsdp: dtype in which gradients are summed; null: that of computation"""
    tp_implementation: Annotated[str, one_of(*TP_IMPLEMENTATIONS)] = "torch"
    """tp: by torch's parallelize_module, or by transformers' plan of the model"""
    sequence_parallel: bool = False
    """tp: ranks share the tokens between matrix products"""
    cp_method: Annotated[str, one_of(*CP_METHODS)] = "ulysses"
    """cp: exchange heads for tokens, pass keys and values round, or gather them"""
    cp_split: Annotated[str, one_of(*SEQUENCE_SPLITS)] = "contiguous"
    """cp: one block of columns a rank, or two that balance causal attention"""
    pp_schedule: Annotated[str, one_of(*PP_SCHEDULES)] = "gpipe"
    """pp: order of forward and backward passes"""
    pp_stages_per_rank: Size = 1
    """pp: stages on each rank"""
    timeout: Positive = 600.0
    """seconds after which a rank that waits for the others gives up; a replay with a stopped process, or whose ranks do
    nothing, is given up after as many where this is set, else after 60"""

    @property
    def row_blocks(self) -> int:
        """Return the number of equal blocks in which ranks share the tokens of a row."""
        zigzag = 2 if self.cp > 1 and self.cp_split == "zigzag" else 1
        return self.cp * zigzag * (self.tp if self.sequence_parallel else 1)

    def split(self, *names: str) -> str | None:
        """Return the first of these dimensions with several ranks, as ``parallel.tp=2``."""
        found = (f"parallel.{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1)
        return next(found, None)

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        yield from self._data_parallel_conflicts()
        needed = {"sequence_parallel": "tp", "fsdp_param_dtype": "fsdp", "fsdp_reduce_dtype": "fsdp"}
        for key, dimension in needed.items():
            value = getattr(self, key)
            if value and getattr(self, dimension) == 1:
                yield f"""parallel.{key}={in_yaml(value)} means nothing with parallel.{dimension}=1; set
                parallel.{dimension} to 2 or more, or leave parallel.{key} away."""
        other = self.split("pp", "ep", "cp")
        other = other or ("parallel.sequence_parallel=true" if self.sequence_parallel else None)
        if self.tp_implementation == "transformers" and other:
            yield f"""parallel.tp_implementation=transformers has no plan for {other}; set
            parallel.tp_implementation=torch."""
        model, own = (
            run.model,
            f"parallel.cp={self.cp} has attention of its own (parallel.cp_method={self.cp_method})",
        )
        if self.cp > 1 and model.attention is not None:
            yield f"{own} in place of model.attention={model.attention}; set one of them to its default."
        if self.cp > 1 and model.attn_implementation != "sdpa":
            yield f"""{own} in place of model.attn_implementation={model.attn_implementation}; set
            model.attn_implementation=sdpa."""
        split = self.split(*(name for name in DIMENSIONS if name != "dp"))
        if model.compile is not None and split:
            yield f"""model.compile={model.compile} compiles whole blocks, which {split} splits over ranks; set
            model.compile=null."""
        # torch 2.13 looks for the weights of a stage before its backward pass, when FSDP2 holds shards in their place
        resharded = self.fsdp > 1 and self.reshard_after_forward
        if self.pp > 1 and resharded and self.pp_schedule in ("interleaved_zero_bubble", "zbv_zero_bubble"):
            yield f"""parallel.pp_schedule={self.pp_schedule} computes gradients of weights after those of inputs, and
            torch loses those of weights that parallel.fsdp={self.fsdp} has given back in between; set
            parallel.reshard_after_forward=false."""

    def _data_parallel_conflicts(self) -> Iterator[str]:
        stated, split = f"parallel.data_parallel={self.data_parallel}", self.split("pp", "fsdp", "ep", "tp")
        if self.data_parallel in ("ddp", "accelerate") and split:
            yield f"{stated} wraps whole models, and {split} splits them; set parallel.data_parallel=after_backward."
        if self.data_parallel == "accelerate" and self.cp > 1:
            yield f"""{stated} sums over all processes, which parallel.cp={self.cp} gives parts of the same samples; set
            parallel.data_parallel=ddp or after_backward."""
        if self.wrapper is not None and self.data_parallel != "ddp":
            yield f"""parallel.wrapper={self.wrapper} takes the place of torch's DistributedDataParallel, which {stated}
            does not use; set parallel.data_parallel=ddp."""
        if self.data_parallel == "hsdp" and self.fsdp == 1:
            yield f"""{stated} shards parameters and replicates the shards, but parallel.fsdp=1 leaves them whole; set
            parallel.fsdp to 2 or more, or parallel.data_parallel=after_backward."""
