"""Parts of a variant's name: ``tp2-pp2-1f1b-packed-mbs4`` spells out its own configuration.

Numbers follow the word: ``dp2`` is two replicas, ``mbs4`` four samples a microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from regress.layout import DIMENSIONS

NUMBERS: Mapping[str, str] = {
    **{name: f"parallel.{name}" for name in DIMENSIONS},
    "mbs": "batching.micro_batch_size",
    "budget": "batching.max_tokens_per_microbatch",
    "pad": "batching.pad_to_multiple_of",
    "chunk": "batching.log_prob_chunk_size",
}
"""Words that a number follows, and the key that each sets."""

_TWO_STAGES = {"parallel.pp_stages_per_rank": 2}

WORDS: Mapping[str, Mapping[str, Any]] = {
    "packed": {"batching.layout": "packed"},
    "left": {"batching.padding_side": "left"},
    "reversed": {"batching.row_order": "reversed"},
    "longest": {"batching.row_order": "longest_first"},
    "eager": {"model.attn_implementation": "eager"},
    "varlen": {"model.attn_implementation": "varlen", "batching.layout": "packed"},
    "checkpointing": {"model.gradient_checkpointing": True},
    "dealt": {"parallel.sample_split": "interleaved"},
    "ddp": {"parallel.data_parallel": "ddp"},
    "accelerate": {"parallel.data_parallel": "accelerate"},
    "hsdp": {"parallel.data_parallel": "hsdp"},
    "noreshard": {"parallel.reshard_after_forward": False},
    "param32": {"parallel.fsdp_param_dtype": "float32"},
    "reduce32": {"parallel.fsdp_reduce_dtype": "float32"},
    "reduce16": {"parallel.fsdp_reduce_dtype": "bfloat16"},
    "hf": {"parallel.tp_implementation": "transformers"},
    "sp": {"parallel.sequence_parallel": True},
    "ulysses": {"parallel.cp_method": "ulysses"},
    "ring": {"parallel.cp_method": "ring"},
    "gather": {"parallel.cp_method": "all_gather"},
    "zigzag": {"parallel.cp_split": "zigzag"},
    "gpipe": {"parallel.pp_schedule": "gpipe"},
    "1f1b": {"parallel.pp_schedule": "1f1b"},
    "interleaved": {"parallel.pp_schedule": "interleaved_1f1b", **_TWO_STAGES},
    "bfs": {"parallel.pp_schedule": "looped_bfs", **_TWO_STAGES},
    "zb": {"parallel.pp_schedule": "interleaved_zero_bubble", **_TWO_STAGES},
    "zbv": {"parallel.pp_schedule": "zbv_zero_bubble", **_TWO_STAGES},
}
"""Words without a number, and the values they set."""

_NUMBERED = re.compile(r"([a-z]+)(\d+)", re.ASCII)


def overrides_of(name: str) -> dict[str, Any] | None:
    """Return the overrides that a name spells out, by dotted key; ``None`` if a part of it is not a known word."""
    found: dict[str, Any] = {}
    for part in name.split("-"):
        numbered = _NUMBERED.fullmatch(part)
        if part in WORDS:
            found |= WORDS[part]
        elif numbered is not None and numbered[1] in NUMBERS:
            found[NUMBERS[numbered[1]]] = int(numbered[2])
        else:
            return None
    return found
