"""Division of samples into microbatches, and of the work over ranks."""

from dataclasses import dataclass

from regress.engine.config.sections.value import value
from regress.layout import ROW_ORDERS, SAMPLE_SPLITS, SEQUENCE_SPLITS

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
class BatchingConfig:
    """Division of samples into microbatches."""

    layout: str = value("padded", "one sample per row, or several packed in one", choices=LAYOUTS)
    padding_side: str = value("right", "side of the padding in padded rows", choices=SIDES)
    pad_to_multiple_of: int = value(1, "row lengths are rounded up to a multiple of this", minimum=1)
    pad_to_length: int | None = value(
        None, "least row length; null: as long as the longest row of the microbatch", minimum=1
    )
    micro_batch_size: int | None = value(
        None, "samples per microbatch; null: the whole mini-batch at once", minimum=1
    )
    max_tokens_per_microbatch: int | None = value(
        None, "tokens per microbatch, instead of micro_batch_size", minimum=1
    )
    log_prob_chunk_size: int | None = value(
        None,
        "loss tokens whose logits are held at once (computed again in the backward pass); null: all of a "
        "microbatch",
        minimum=1,
    )
    vocab_chunk_size: int = value(
        1 << 14, "tokens of the vocabulary that the softmax of log-probs takes at a time", minimum=1
    )
    softmax_block_size: int = value(
        1 << 20, "elements of the largest scratch buffer of that softmax; chosen to fit a cache", minimum=1
    )
    row_order: str = value("given", "order in which samples fill rows and microbatches", choices=ROW_ORDERS)


@dataclass
class ParallelConfig:
    """Parallel dimensions; the product of their extents is the number of processes."""

    pp: int = value(1, "pipeline stages' ranks", minimum=1)
    dp: int = value(1, "replicas of the model, each with its own samples", minimum=1)
    fsdp: int = value(1, "ranks that share the parameters (FSDP2), each with its own samples", minimum=1)
    ep: int = value(1, "ranks that share the experts, each with its own samples", minimum=1)
    cp: int = value(1, "ranks that share the tokens of each sequence", minimum=1)
    tp: int = value(1, "ranks that share each matrix product", minimum=1)
    sample_split: str = value(
        "contiguous",
        "how samples are dealt out to ranks: in blocks, or one after the other",
        choices=SAMPLE_SPLITS,
    )
    data_parallel: str = value(
        "after_backward",
        "who sums the gradients over replicas: one collective after the last microbatch, torch's "
        "DistributedDataParallel, accelerate's, or torch's fully_shard over dp and fsdp",
        choices=DATA_PARALLELS,
    )
    wrapper: str | None = value(
        None,
        "your own wrapper in place of torch's with data_parallel=ddp, as package.module:function: takes the model and "
        "the process group, returns a module that averages gradients over the group and has no_sync(); null: torch's",
    )
    reshard_after_forward: bool = value(True, "fsdp: parameters are gathered again for the backward pass")
    fsdp_param_dtype: str | None = value(
        None,
        "fsdp: dtype of gathered parameters and of computation; null: that of the model",
        choices=REDUCED_DTYPES,
    )
    fsdp_reduce_dtype: str | None = value(
        None, "fsdp: dtype in which gradients are summed; null: that of computation", choices=REDUCED_DTYPES
    )
    tp_implementation: str = value(
        "torch",
        "tp: by torch's parallelize_module, or by transformers' plan of the model",
        choices=TP_IMPLEMENTATIONS,
    )
    sequence_parallel: bool = value(False, "tp: ranks share the tokens between matrix products")
    cp_method: str = value(
        "ulysses",
        "cp: exchange heads for tokens, pass keys and values round, or gather them",
        choices=CP_METHODS,
    )
    cp_split: str = value(
        "contiguous",
        "cp: one block of columns a rank, or two that balance causal attention",
        choices=SEQUENCE_SPLITS,
    )
    pp_schedule: str = value("gpipe", "pp: order of forward and backward passes", choices=PP_SCHEDULES)
    pp_stages_per_rank: int = value(1, "pp: stages on each rank", minimum=1)
    timeout: float = value(
        600.0,
        "seconds after which a rank that waits for the others gives up; a replay with a stopped process, or whose "
        "ranks do nothing, is given up after as many where this is set, else after 60",
        exclusive_minimum=0.0,
    )
