"""On one rank every split is none, and computes what the plain functions do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from pipelines import loss, microbatches_of, model_of, pipeline_of, project
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from regress.engine.attention import block_causal_mask
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.batching_config import ParallelConfig
from regress.engine.mini_batch import Microbatch
from regress.grpo.selective_log_softmax import TokenLogProbs, token_log_probs
from regress.layout import BatchPlan, plan_microbatches
from regress.parallel import context_parallel, data_parallel, expert_parallel
from regress.parallel.adapter_factor_styles import InputFactor, OutputFactor
from regress.parallel.context_columns import attend
from regress.parallel.data_parallel import replicated
from regress.parallel.differentiable_collectives import exchange, gather, swap
from regress.parallel.gradient_reduction import sum_gradients
from regress.parallel.process_groups import ProcessGroups, rank_plan
from regress.parallel.sequence_parallel import work_on_own_columns
from regress.parallel.vocabulary_log_probs import vocab_parallel_log_probs

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[ProcessGroup]:
    """The group of this process, made here unless there is one."""
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        assert group.size() == 1
        yield group
    finally:
        if own:
            dist.destroy_process_group()


def test_one_rank_is_the_main_one_and_has_no_group(alone: ProcessGroup) -> None:
    groups = ProcessGroups(ParallelConfig(), CPU)
    values = torch.tensor([1.0, 2.0])
    assert groups.main
    assert (groups.group("dp", "cp"), groups.size("dp", "cp", "tp")) == (None, 1)
    assert groups.sum(values).tolist() == [1.0, 2.0]
    assert groups.gather("a") == ["a"]
    groups.rank = 1
    assert not groups.main
    groups.clear()


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_gets_the_group_that_it_is_in(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "new_group", tuple)
    groups = ProcessGroups.__new__(ProcessGroups)
    groups.plan, groups.rank, groups._groups = rank_plan(ParallelConfig(dp=2, cp=2, tp=2)), rank, {}
    found: Any = groups.group("dp", "cp")
    assert found == groups.mesh.group(rank, "dp", "cp")
    assert rank in found


def leaves(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("scaling", [0.3, None])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("method", context_parallel.METHODS)
def test_attention(alone: ProcessGroup, method: str, key_heads: int, scaling: float | None) -> None:
    whole = plan_microbatches([3, 1, 4], BatchPlan(layout="packed", pad_to_multiple_of=12))[0]
    segments = context_parallel.ContextSegments.of(whole, [((0, 12),)], alone, CPU)
    sizes = [(1, heads, 12, 8) for heads in (4, key_heads, key_heads)]
    parts = leaves(*sizes)
    mask = block_causal_mask(whole, "sdpa", torch.float64, CPU)
    wanted = scaled_dot_product_attention(*parts, attn_mask=mask, scale=scaling, enable_gqa=True).transpose(
        1, 2
    )
    (up,) = leaves((1, 12, 4, 8))
    right = torch.autograd.grad((wanted * up).sum(), parts)
    found, weights = context_parallel.METHODS[method](
        torch.nn.Module(), *parts, None, scaling, context=segments
    )
    gradients = torch.autograd.grad((found * up).sum(), parts)
    assert weights is None
    for value, expected in zip((found, *gradients), (wanted, *right), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", context_parallel.METHODS)
def test_attention_in_half_precision_stays_in_it(alone: ProcessGroup, method: str) -> None:
    whole = plan_microbatches([5, 7], BatchPlan(layout="packed"))[0]
    segments = context_parallel.ContextSegments.of(whole, [((0, 12),)], alone, CPU)
    parts = leaves((1, 4, 12, 8), (1, 2, 12, 8), (1, 2, 12, 8), dtype=torch.bfloat16)
    mask = block_causal_mask(whole, "sdpa", torch.float64, CPU)
    wide = [part.detach().double().requires_grad_() for part in parts]
    wanted = scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    right = torch.autograd.grad(wanted.sum(), wide)
    found, _ = context_parallel.METHODS[method](torch.nn.Module(), *parts, None, None, context=segments)
    gradients = torch.autograd.grad(found.sum(), parts)
    for value, expected in zip((found, *gradients), (wanted, *right), strict=True):
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.double(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_heads_are_grouped_whatever_the_number_of_rows_and_columns(rows: int) -> None:
    query, key, value = leaves((rows, 4, 2, 8), (rows, 2, 4, 8), (rows, 2, 4, 8))
    mask = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    found = attend(query, key, value, mask, None)
    repeated = (each.repeat_interleave(2, 1) for each in (key, value))
    torch.testing.assert_close(found, attend(query, *repeated, mask, None), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True, "no_grad"])
def test_log_probs(alone: ProcessGroup, entropy: bool | Literal["no_grad"], dtype: torch.dtype) -> None:
    (logits,) = leaves((2, 5, 7), dtype=dtype)
    targets = torch.arange(10).view(2, 5) % 7
    plain = token_log_probs(logits, targets, temperature=0.7, entropy=entropy)
    found = vocab_parallel_log_probs(logits, targets, start=0, group=alone, temperature=0.7, entropy=entropy)
    bound = 1e-12 if dtype == torch.float64 else 2e-6
    torch.testing.assert_close(found.log_probs, plain.log_probs, rtol=bound, atol=bound)
    assert (found.entropy is None) == (entropy is False)
    totals = [plain.log_probs.sum(), found.log_probs.sum()]
    if plain.entropy is not None and found.entropy is not None:
        torch.testing.assert_close(found.entropy, plain.entropy, rtol=bound, atol=bound)
        assert found.entropy.requires_grad == plain.entropy.requires_grad == (entropy is True)
        totals = [totals[0] + 2 * plain.entropy.sum(), totals[1] + 2 * found.entropy.sum()]
    right, gradient = (torch.autograd.grad(total, logits)[0] for total in totals)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, right, rtol=bound, atol=bound)


def test_rows_that_are_exchanged_come_back(alone: ProcessGroup) -> None:
    (rows,) = leaves((4, 3))
    for found in (exchange(rows, [4], [4], alone), gather(rows, 1, alone)[0], swap(rows[None], alone)[0]):
        assert torch.equal(found, rows)
        (gradient,) = torch.autograd.grad((found * found.detach()).sum(), rows)
        assert torch.equal(gradient, rows.detach())


def test_columns_of_a_rank_keep_no_memory_of_the_others(alone: ProcessGroup) -> None:
    whole, part = leaves((2, 6, 3), (2, 6, 3))
    first, last = torch.nn.Identity(), torch.nn.Identity()
    work_on_own_columns(first, last, init_device_mesh("cpu", (1,)))
    own = first(whole)
    assert torch.equal(own, whole)
    assert own.data_ptr() != whole.data_ptr()
    found = last(own)
    assert torch.equal(found, whole)
    (gradient,) = torch.autograd.grad((found * part).sum(), whole)
    assert torch.equal(gradient, part)


def test_factors_of_an_adapter(alone: ProcessGroup) -> None:
    mesh, (x,) = init_device_mesh("cpu", (1,)), leaves((2, 3, 4))
    for style in (InputFactor(Replicate()), OutputFactor(Replicate()), OutputFactor(Replicate(), fused=3)):
        layer = torch.nn.Linear(4, 6, bias=False, dtype=torch.float64)
        right = layer(x)
        wanted = torch.autograd.grad(right.sum(), x)[0]
        found = style._apply(layer, mesh)(x)
        torch.testing.assert_close(found, right, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], wanted, rtol=1e-13, atol=1e-14)


def test_gradients_that_are_missing_are_zeros(alone: ProcessGroup) -> None:
    parameters = {
        name: torch.nn.Parameter(each.detach()) for name, each in zip("ab", leaves((2,), (3,)), strict=True)
    }
    parameters["a"].grad = torch.tensor([1.0, 2.0], dtype=torch.float64)
    sum_gradients(parameters, [(("a", "b"), alone)])
    found = [each.grad.tolist() for each in parameters.values() if each.grad is not None]
    assert found == [[1.0, 2.0], [0.0, 0.0, 0.0]]


def test_replicas_are_wrapped_as_the_configuration_says(
    alone: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def world(kind: str, size: int) -> Any:
        return SimpleNamespace(
            config=ParallelConfig(data_parallel=kind), size=lambda *_: size, group=lambda *_: alone
        )

    model = model_of("llama")
    found = replicated(model, world("ddp", 2))
    assert found is not None
    assert isinstance(found.module, DistributedDataParallel)
    assert found.size == 2
    assert replicated(model, world("ddp", 1)) is None
    assert replicated(model, world("after_backward", 2)) is None
    made = data_parallel.Replicas(model, 2, nullcontext, lambda loss: loss.backward())
    monkeypatch.setattr(data_parallel, "_accelerate", lambda *_: made)
    assert replicated(model, world("accelerate", 2)) is made


@pytest.mark.parametrize(
    ("implementation", "dtype", "close"),
    [("eager", "float64", 0.0), ("eager", "bfloat16", 0.0), ("grouped_mm", "float32", 1e-5)],
)
def test_experts(alone: ProcessGroup, implementation: str, dtype: str, close: float) -> None:
    plain, shared = (model_of("qwen3_moe", dtype=dtype) for _ in range(2))
    for model in (plain, shared):
        model.set_experts_implementation(implementation)
    own = dict(shared.named_parameters())
    plan = expert_parallel.apply(shared, init_device_mesh("cpu", (1,)))
    assert plan.experts
    for name, parameter in shared.named_parameters():
        assert (parameter.data_ptr() == own[name].data_ptr()) == (name not in plan.experts)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    right, found = (model(input_ids=tokens, use_cache=False).logits for model in (plain, shared))
    torch.testing.assert_close(found, right, rtol=close, atol=close)


@pytest.mark.parametrize("schedule", ["looped_bfs", "interleaved_1f1b"])
def test_stages(alone: ProcessGroup, schedule: str) -> None:
    micros, plain = microbatches_of(4), LocalPolicy(model_of("llama"), entropy_gradient=True)
    pipeline = pipeline_of(model_of("llama"), schedule, 1, 2, alone)
    assert pipeline.is_last

    def kept(micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, tuple[int, Tensor]]:
        value, (sample, _) = loss(micro, out)
        return value, (sample, value)

    expected = plain.forward_backward(micros, kept)
    results = pipeline.forward_backward(micros, kept, project)
    assert [sample for sample, _ in results] == [sample for sample, _ in expected]
    for (_, value), (_, right) in zip(results, expected, strict=True):
        assert value.requires_grad  # the schedule detaches what it is given, and not this
        torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)
    whole = dict(plain.named_parameters())
    for name, parameter in pipeline.stages.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name].grad, rtol=1e-11, atol=1e-13)
