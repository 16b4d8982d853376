"""Context parallelism computes what one process computes: every method, split, layout and model family."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from transformers import PreTrainedModel

from regress.engine.attention import block_causal_mask, visible
from regress.engine.config.model_config import ModelConfig
from regress.engine.model_loading import build_model
from regress.engine.numeric_types import TrueFloat64, arithmetic
from regress.layout import BatchPlan, Segment, TokenLayout, plan_microbatches
from regress.parallel import context_parallel

pytestmark = pytest.mark.one_in(6)  # replays of golden cases meet the same combinations

VOCABULARY = 13
TOLERANCE = 1e-12
METHODS = ("ulysses", "ring", "all_gather")
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 32},
    "qwen3": {**SMALL, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32},
    "qwen3_moe": {**SMALL, "num_key_value_heads": 2, "moe_intermediate_size": 16},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
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
    """Column ranges of every rank; zigzag: rank ``r`` has the ``r``-th of ``2 * ranks`` chunks from either end."""
    if split == "contiguous":
        part = width // ranks
        return [((rank * part, (rank + 1) * part),) for rank in range(ranks)]
    part = width // (2 * ranks)
    chunks = [(chunk * part, (chunk + 1) * part) for chunk in range(2 * ranks)]
    return [(chunks[rank], chunks[-1 - rank]) for rank in range(ranks)]


# What runs on the ranks


@cache
def groups() -> dict[int, Any]:
    """By size; of two, every rank has its own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    one = dist.new_group([0])
    return {1: one, 2: halves[dist.get_rank() // 2], 3: dist.new_group([0, 1, 2]), 4: dist.group.WORLD}


@cache
def model_of(family: str, dtype: str, checkpointing: bool) -> PreTrainedModel:
    config = ModelConfig(
        family=family, config=FAMILIES[family], dtype=dtype, gradient_checkpointing=checkpointing
    )
    model = build_model(config, seed=3, vocab_size=VOCABULARY, pad_id=0, eos_id=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # so that attention prefers some tokens to others
    return model


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


@cache
def plain(family: str, layout: str, dtype: str) -> dict[str, Tensor]:
    """One process, the whole layout."""
    model, whole = model_of(family, dtype, False), LAYOUTS[layout]
    model.set_attn_implementation("sdpa")
    mask = block_causal_mask(whole, "sdpa", model.dtype, torch.device("cpu"))
    return outcome(model, whole, torch.arange(whole.shape[1]), attention_mask=mask, varlen=None)


def split_up(family: str, layout: str, method: str, split: str, ranks: int, dtype: str, checkpointing: bool):
    """The columns shared by ranks: log-probs put together, gradients added up."""
    model, whole, group = model_of(family, dtype, checkpointing), LAYOUTS[layout], groups()[ranks]
    context_parallel.apply(model, method, ranks)
    columns = columns_of(whole.shape[1], ranks, split)
    segments = context_parallel.ContextSegments.of(whole, columns, group, torch.device("cpu"))
    local = segments.table[segments.rank]
    found = outcome(model, whole, local, attention_mask=None, varlen=None, context=segments)
    log_probs = torch.zeros(whole.shape, dtype=torch.float64)
    log_probs[:, local] = found["log_probs"]
    found["log_probs"] = log_probs
    flat = torch.cat([tensor.flatten().to(torch.float64) for tensor in found.values()])
    dist.all_reduce(flat, group=group)
    parts = flat.split([tensor.numel() for tensor in found.values()])
    return {name: part.view_as(found[name]) for name, part in zip(found, parts, strict=True)}


def errors(family: str, layout: str, method: str, split: str, ranks: int, dtype: str, checkpointing: bool):
    """Worst relative error of every tensor, on this rank."""
    expected = plain(family, layout, dtype)
    found = split_up(family, layout, method, split, ranks, dtype, checkpointing)
    return {name: distance(found[name], expected[name]) for name in expected}


def distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite for what is not a number."""
    worst = (found - expected).abs().max() / expected.abs().max()
    return float(worst.nan_to_num(torch.inf))


def errors_of_dtype(family: str, method: str, dtype: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the errors of one process and of four, relative to float64 with the same weights."""
    truth = copy.deepcopy(model_of(family, dtype, False)).to(torch.float64)
    whole = LAYOUTS["rows"]
    mask = block_causal_mask(whole, "sdpa", torch.float64, torch.device("cpu"))
    truth.set_attn_implementation("sdpa")
    expected = outcome(truth, whole, torch.arange(whole.shape[1]), attention_mask=mask, varlen=None)
    found = (plain(family, "rows", dtype), split_up(family, "rows", method, "zigzag", 4, dtype, False))
    one, four = ({name: distance(some[name], expected[name]) for name in expected} for some in found)
    return one, four


def recomputed(family: str, method: str) -> bool:
    """Return True if gradient checkpointing leaves every bit unchanged, on this rank."""
    kept, again = (split_up(family, "rows", method, "zigzag", 4, "float64", flag) for flag in (False, True))
    return all(torch.equal(kept[name], again[name]) for name in kept)


def attention_errors(
    method: str, ranks: int, columns: Any, whole: TokenLayout, shape: Any, seed: int
) -> float:
    """Worst relative error of the attention function alone and of its three gradients, on this rank."""
    group = groups()[ranks]
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return 0.0
    generator = torch.Generator().manual_seed(seed)
    key_heads, queries, width = shape
    rows, length = whole.shape
    sizes = [(rows, heads, length, width) for heads in (queries * key_heads, key_heads, key_heads)]
    parts = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    up = torch.randn(rows, length, queries * key_heads, width, generator=generator, dtype=torch.float64)
    everything = [part.clone().requires_grad_() for part in parts]
    mask = block_causal_mask(whole, "sdpa", torch.float64, torch.device("cpu"))
    expected = scaled_dot_product_attention(
        *everything, attn_mask=mask, scale=0.7, enable_gqa=True
    ).transpose(1, 2)
    expected.backward(up)
    segments = context_parallel.ContextSegments.of(whole, columns, group, torch.device("cpu"))
    local = segments.table[segments.rank]
    mine = [part[:, :, local].clone().requires_grad_() for part in parts]
    with TrueFloat64():
        found, _ = context_parallel.METHODS[method](torch.nn.Module(), *mine, None, 0.7, context=segments)
        found.backward(up[:, local])
    with torch.no_grad():
        again, _ = context_parallel.METHODS[method](torch.nn.Module(), *mine, None, 0.7, context=segments)
    assert torch.equal(again, found)
    pairs = [(found.detach(), expected.detach()[:, local])]
    pairs += [
        (part.grad, whole_part.grad[:, :, local]) for part, whole_part in zip(mine, everything, strict=True)
    ]
    scale = [1.0, *(part.grad.abs().max().clamp(min=1) for part in everything)]
    return max(
        float(((a - b).abs().max() / s).nan_to_num(torch.inf)) for (a, b), s in zip(pairs, scale, strict=True)
    )


def masks_made(family: str, method: str) -> int:
    """Count the masks that a forward and backward pass through two layers builds."""
    with mock.patch("regress.parallel.context_columns.visible", wraps=visible) as made:
        split_up(family, "packed", method, "zigzag", 4, "float64", True)
    return made.call_count


# Faults: what is patched on the ranks, and the case it must show in


def as_if_in_order(layout: TokenLayout, queries: Tensor, keys: Tensor) -> Tensor:
    return visible(layout, queries if len(queries) < len(keys) else queries.sort().values, keys.sort().values)


def as_if_first(layout: TokenLayout, queries: Tensor, keys: Tensor) -> Tensor:
    return visible(layout, torch.arange(len(queries)), keys)


def only_own_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad[dist.get_rank()], None, None


def into_strides(rows: Tensor, sent: Any, received: Any, group: Any) -> Tensor:
    out = torch.empty_like(rows)
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


def repeated(self: Tensor, repeats: int, dim: int) -> Tensor:
    return torch.cat([self] * repeats, dim)


def stays_away(self: Any) -> Tensor:
    for work in self._works:
        work.wait()
    arrived: Tensor = self._received
    if len(arrived) == 4:
        arrived[2:] = self._sent[2:]
    return arrived


FAULTS: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    # the columns are gathered rank after rank, and nobody puts them back into order
    "no un-permutation": ("regress.parallel.context_columns.visible", as_if_in_order, METHODS),
    # queries are counted from the first column of the rank
    "local columns": ("regress.parallel.context_columns.visible", as_if_first, METHODS),
    "no merge weight": (
        "regress.parallel.ring_attention._kept",
        lambda maximum, _: torch.ones_like(maximum),
        ("ring",),
    ),
    "gradients stay behind": ("regress.parallel.ring_attention._Shift.arrived", stays_away, ("ring",)),
    "gradients of others dropped": (
        "regress.parallel.differentiable_collectives._Gather.backward",
        staticmethod(only_own_gradient),
        ("all_gather",),
    ),
    "gloo and strides": (
        "regress.parallel.differentiable_collectives._all_to_all",
        into_strides,
        ("ulysses",),
    ),
    "heads repeated in turn": ("torch.Tensor.repeat_interleave", repeated, ("ulysses",)),
}


def errors_under(fault: str, method: str) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        target, wrong, _ = FAULTS[fault]
        patch.setattr(target, wrong)
        return errors("llama", "packed", method, "zigzag", 4, "float64", False)


# The tests


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_one_process(
    ranks: Any, family: str, layout: str, method: str, split: str, size: int
) -> None:
    for found in ranks.run(errors, family, layout, method, split, size, "float64", False):
        assert len(found) > 10
        assert max(found.values()) < TOLERANCE, found


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, Any, TokenLayout, tuple[int, int, int], int]:
    """A method, ranks, any split of the columns into chunks, any layout with gaps, any numbers of heads."""
    method, ranks = draw(st.sampled_from(METHODS)), draw(st.integers(1, 4))
    pieces, part = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    chunks = draw(st.permutations(range(ranks * pieces)))
    columns = [
        tuple((chunk * part, (chunk + 1) * part) for chunk in chunks[rank * pieces : (rank + 1) * pieces])
        for rank in range(ranks)
    ]
    rows, width = draw(st.integers(1, 3)), ranks * pieces * part
    segments: list[Segment] = []
    for row in range(rows):
        col = draw(st.integers(0, width))
        while col < width:
            length = draw(st.integers(1, width - col))
            segments.append(Segment(len(segments), 0, length, row, col))
            col += length + draw(st.sampled_from([0, 0, 1, 3]))
    key_heads, queries = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if method == "ulysses":
        queries *= ranks // math.gcd(ranks, key_heads * queries)
    shape = (key_heads, queries, draw(st.integers(1, 4)))
    return (
        method,
        ranks,
        columns,
        TokenLayout((rows, width), tuple(segments)),
        shape,
        draw(st.integers(0, 99)),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_attention_of_any_layout_split_in_any_way(ranks: Any, case: Any) -> None:
    assert max(ranks.run(attention_errors, *case)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_err_no_more_than_one_process(ranks: Any, method: str, dtype: str) -> None:
    for one, four in ranks.run(errors_of_dtype, "llama", method, dtype):
        assert 0 < four["log_probs"] < 4 * one["log_probs"], (one, four)
        assert max(four.values()) < 4 * max(one.values()), (one, four)


@pytest.mark.parametrize("method", METHODS)
def test_recomputing_activations_changes_nothing(ranks: Any, method: str) -> None:
    assert all(ranks.run(recomputed, "qwen3", method))


@pytest.mark.parametrize(
    ("fault", "method"), [(fault, method) for fault, (_, _, methods) in FAULTS.items() for method in methods]
)
def test_a_fault_is_far_beyond_the_tolerance(ranks: Any, fault: str, method: str) -> None:
    worst = max(max(found.values()) for found in ranks.run(errors_under, fault, method))
    assert worst > 1e9 * TOLERANCE


def test_masks_are_made_once_a_microbatch(ranks: Any) -> None:
    assert ranks.run(masks_made, "llama", "ring") == [1] * 4
