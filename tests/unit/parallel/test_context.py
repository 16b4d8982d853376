"""Context parallelism computes what one process computes: every method, split, layout and model family."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from regress.engine.attention import block_causal_mask
from regress.engine.config.schema import ModelConfig
from regress.engine.models import build_model
from regress.engine.precision import arithmetic
from regress.layout import BatchPlan, Segment, TokenLayout, plan_microbatches
from regress.parallel import context

VOCABULARY = 13
TOLERANCE = 1e-12
METHODS = ("ulysses", "ring", "all_gather")
SMALL = {"hidden_size": 32, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 2, "intermediate_size": 32},
    "qwen3": {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32},
    "qwen3_moe": {**SMALL, "num_key_value_heads": 2, "moe_intermediate_size": 16},
    "gpt2": {"n_embd": 32, "n_head": 4},
}
LENGTHS = [5, 1, 11, 9, 2, 1]
LAYOUTS: dict[str, TokenLayout] = {
    # 16 columns; cp4: the last rank of a contiguous split has nothing but padding
    "right": plan_microbatches(LENGTHS, BatchPlan(pad_to_length=16))[0],
    "left": plan_microbatches(LENGTHS, BatchPlan(padding_side="left", pad_to_multiple_of=16))[0],
    # 32 columns; samples of one token begin at the columns 5, 28, and another begins on a boundary
    "packed": plan_microbatches(LENGTHS, BatchPlan(layout="packed", pad_to_multiple_of=32))[0],
    "rows": TokenLayout(
        (2, 16),
        (
            Segment(0, 0, 7, 0, 0),
            Segment(1, 0, 1, 0, 7),
            Segment(2, 0, 1, 0, 8),
            Segment(3, 0, 5, 0, 11),
            Segment(4, 0, 1, 1, 4),
        ),
    ),
}


def columns_of(width: int, ranks: int, split: str) -> list[tuple[tuple[int, int], ...]]:
    """Column ranges of every rank; zigzag: of ``2 * ranks`` chunks rank ``r`` has ``r`` and the ``r``-th from the end."""
    if split == "contiguous":
        part = width // ranks
        return [((rank * part, (rank + 1) * part),) for rank in range(ranks)]
    part = width // (2 * ranks)
    chunks = [(chunk * part, (chunk + 1) * part) for chunk in range(2 * ranks)]
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(ranks)]


# What runs on the ranks


@lru_cache(maxsize=None)
def group_of(ranks: int) -> Any:
    """The first or second half of the world, or all of it."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return halves[dist.get_rank() // 2] if ranks == 2 else dist.group.WORLD


@lru_cache(maxsize=None)
def model_of(family: str, dtype: str, checkpointing: bool) -> PreTrainedModel:
    config = ModelConfig(
        family=family, config=FAMILIES[family], dtype=dtype, gradient_checkpointing=checkpointing
    )
    return build_model(config, seed=3, vocab_size=VOCABULARY, pad_id=0, eos_id=1)


def inputs(whole: TokenLayout) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, and, at the column before each predicted token, its id and its weight in the loss (0 elsewhere)."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, VOCABULARY, whole.shape, generator=generator)
    samples = torch.from_numpy(whole.sample_ids)
    predicts = (samples[:, :-1] == samples[:, 1:]) & (samples[:, 1:] >= 0)
    weights = torch.zeros(whole.shape, dtype=torch.float64)
    weights[:, :-1][predicts] = torch.randn(int(predicts.sum()), generator=generator, dtype=torch.float64)
    return ids, ids.roll(-1, dims=1), weights


def outcome(model: PreTrainedModel, whole: TokenLayout, local: Tensor, **forward: Any) -> dict[str, Tensor]:
    """Log-probs ``[B, T]`` of the columns ``local`` (0 where nothing is predicted) and all gradients."""
    ids, targets, weights = (tensor[:, local] for tensor in inputs(whole))
    positions = torch.from_numpy(whole.position_ids)[:, local]
    model.zero_grad(set_to_none=True)
    with arithmetic(model.dtype):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **forward).logits
        log_probs = log_softmax(logits.to(torch.float64), -1).gather(-1, targets[..., None]).squeeze(-1)
        log_probs = torch.where(weights != 0, log_probs, 0.0)
        (log_probs * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"log_probs": log_probs.detach(), **{name: g.clone() for name, g in gradients.items()}}


@lru_cache(maxsize=None)
def plain(family: str, layout: str, dtype: str) -> dict[str, Tensor]:
    """One process, the whole layout."""
    model, whole = model_of(family, dtype, False), LAYOUTS[layout]
    model.set_attn_implementation("sdpa")
    mask = block_causal_mask(whole, "sdpa", model.dtype, torch.device("cpu"))
    return outcome(model, whole, torch.arange(whole.shape[1]), attention_mask=mask, varlen=None)


def split_up(family: str, layout: str, method: str, split: str, ranks: int, dtype: str, checkpointing: bool):
    """The columns shared by ranks: log-probs put together, gradients added up."""
    model, whole, group = model_of(family, dtype, checkpointing), LAYOUTS[layout], group_of(ranks)
    context.apply(model, method, ranks)
    columns = columns_of(whole.shape[1], ranks, split)[dist.get_rank(group)]
    segments = context.ContextSegments.of(whole, columns, group, torch.device("cpu"))
    local = segments.table[segments.rank]
    found = outcome(model, whole, local, attention_mask=None, varlen=None, context=segments)
    log_probs = torch.zeros(whole.shape, dtype=torch.float64)
    log_probs[:, local] = found["log_probs"]
    found["log_probs"] = log_probs
    for tensor in found.values():
        dist.all_reduce(tensor, group=group)
    return found


def errors(family: str, layout: str, method: str, split: str, ranks: int, dtype: str, checkpointing: bool):
    """Worst relative error of every tensor, on this rank."""
    expected = plain(family, layout, dtype)
    found = split_up(family, layout, method, split, ranks, dtype, checkpointing)
    return {name: distance(found[name], expected[name]) for name in expected}


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite for what is no number."""
    worst = (found - expected).abs().max() / expected.abs().max()
    return float(worst.nan_to_num(torch.inf))


# The tests


@pytest.mark.parametrize("ranks_of_context", [2, 4])
@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_one_process(
    ranks: Any, family: str, layout: str, method: str, split: str, ranks_of_context: int
) -> None:
    for found in ranks.run(errors, family, layout, method, split, ranks_of_context, "float64", False):
        assert len(found) > 10
        assert max(found.values()) < TOLERANCE, found
