"""Expert parallelism computes what whole experts compute on every rank: log-probs, gradients, any routing."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from regress.engine.attention import block_causal_mask
from regress.engine.compiled_blocks import CompiledBlocks
from regress.engine.config.model_config import ModelConfig
from regress.engine.model_loading import build_model
from regress.engine.numeric_types import arithmetic
from regress.layout import BatchPlan, plan_microbatches
from regress.layout.shard_layout import ShardLayout
from regress.parallel import expert_parallel

pytestmark = pytest.mark.one_in(3)  # replays of golden cases meet the same combinations

VOCABULARY = 13
TOLERANCE = 1e-12
EXPERTS = 8
MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "moe_intermediate_size": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
}
LENGTHS = [[5, 9, 2], [1, 1], [12], [1]]
"""Lengths of each rank's samples; the last rank has nothing to predict."""


# What runs on the ranks


@cache
def mesh_of(ranks: int) -> DeviceMesh:
    """The mesh dimension ``ep``, of the whole world or of each of its halves."""
    return init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("dp", "ep"))["ep"]


@cache
def prototype(dtype: str, checkpointing: bool) -> PreTrainedModel:
    config = ModelConfig(family="qwen3_moe", config=MODEL, dtype=dtype, gradient_checkpointing=checkpointing)
    model = build_model(config, seed=3, vocab_size=VOCABULARY, pad_id=0, eos_id=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # so that the router prefers some experts to others
    return model


def to_the_first(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A hook of the router: every token chooses the first three experts, which lie on two of four ranks."""
    logits, scores, index = output
    return logits, scores, torch.arange(index.shape[1]).expand_as(index)


def model_of(
    dtype: str, implementation: str = "eager", checkpointing: bool = False, unpopular: bool = False
) -> PreTrainedModel:
    model = copy.deepcopy(prototype(dtype, checkpointing))
    model.set_experts_implementation(implementation)
    if unpopular:
        for block in model.model.layers:
            block.mlp.gate.register_forward_hook(to_the_first)
    return model


def outcome(model: PreTrainedModel, microbatches: int = 2) -> dict[str, Tensor]:
    """Log-probs of this rank's samples, and all gradients, summed over two microbatches of the same shape."""
    layout = plan_microbatches(LENGTHS[dist.get_rank()], BatchPlan(pad_to_multiple_of=3))[0]
    mask = block_causal_mask(layout, "sdpa", model.dtype, torch.device("cpu"))
    samples = torch.from_numpy(layout.sample_ids)
    predicts = (samples[:, :-1] == samples[:, 1:]) & (samples[:, 1:] >= 0)
    model.zero_grad(set_to_none=True)
    found = []
    for micro in range(microbatches):
        generator = torch.Generator().manual_seed(10 * dist.get_rank() + micro)
        ids = torch.randint(2, VOCABULARY, layout.shape, generator=generator)
        weights = torch.randn(int(predicts.sum()), generator=generator, dtype=torch.float64)
        with arithmetic(model.dtype):
            logits = model(
                input_ids=ids,
                position_ids=torch.from_numpy(layout.position_ids),
                attention_mask=mask,
                use_cache=False,
            ).logits[:, :-1][predicts]
            log_probs = log_softmax(logits.to(torch.float64), -1)
            log_probs = log_probs.gather(-1, ids[:, 1:][predicts][:, None]).squeeze(-1)
            (log_probs * weights).sum().backward()
        found.append(log_probs.detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"log_probs": torch.cat(found), **{name: g.clone() for name, g in gradients.items()}}


@cache
def plain(
    ranks: int, dtype: str, implementation: str, checkpointing: bool, unpopular: bool = False
) -> dict[str, Tensor]:
    """Whole experts on every rank; gradients summed over the mesh dimension."""
    found = outcome(model_of(dtype, implementation, checkpointing, unpopular))
    return {name: tensor if name == "log_probs" else added(tensor, ranks) for name, tensor in found.items()}


def shared_out(
    ranks: int, dtype: str, implementation: str, checkpointing: bool, unpopular: bool = False
) -> dict[str, Tensor]:
    """The same with the experts shared; gradients of what was cut are complete already."""
    model = model_of(dtype, implementation, checkpointing, unpopular)
    plan = expert_parallel.apply(model, mesh_of(ranks))
    found = outcome(model)
    kept = {"log_probs", *plan.experts}
    return {name: tensor if name in kept else added(tensor, ranks) for name, tensor in found.items()}


def added(tensor: Tensor, ranks: int) -> Tensor:
    total = tensor.to(torch.float64, copy=True)
    dist.all_reduce(total, group=mesh_of(ranks).get_group())
    return total


def errors(
    ranks: int, dtype: str, implementation: str, checkpointing: bool, unpopular: bool = False
) -> dict[str, float]:
    """Worst error of every tensor on this rank, relative to its largest value on all."""
    expected = plain(ranks, dtype, implementation, checkpointing, unpopular)
    found = shared_out(ranks, dtype, implementation, checkpointing, unpopular)
    place = mesh_of(ranks).get_local_rank()
    distances = {}
    for name, whole in expected.items():
        mine = whole.chunk(ranks)[place] if ".experts." in name else whole
        assert found[name].shape == mine.shape
        if len(mine):
            distances[name] = distance(found[name], mine, whole)
    return distances


def distance(found: Tensor, expected: Tensor, scale: Tensor) -> float:
    """Largest difference relative to the largest value of ``scale``; infinite for what is not a number."""
    worst = (found - expected).abs().max() / scale.abs().max().clamp(min=1e-300)
    return float(worst.nan_to_num(torch.inf))


def errors_of_dtype(dtype: str, implementation: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the errors of whole and of shared experts, relative to float64 with the same weights."""
    model = model_of(dtype, implementation)
    truth = copy.deepcopy(model).to(torch.float64)
    truth.set_experts_implementation("eager")
    expected = outcome(truth)
    results = []
    for found in (plain(4, dtype, implementation, False), shared_out(4, dtype, implementation, False)):
        distances = {}
        for name, tensor in found.items():
            whole = expected[name] if name == "log_probs" else added(expected[name], 4)
            same = tensor.shape == whole.shape
            mine = whole if same else whole.chunk(4)[dist.get_rank()]
            if len(mine):
                distances[name] = distance(tensor, mine, whole)
        results.append(distances)
    return results[0], results[1]


def layer(dtype: torch.dtype, implementation: str) -> Any:
    """The experts of one layer."""
    model = model_of("float64", implementation).to(dtype)
    return model, model.model.layers[0].mlp.experts


def routed(ranks: int, implementation: str, tokens: Any, popular: Any, width: int, seed: int) -> list[float]:
    """Errors of one layer under any routing: outputs, gradients of inputs and weights, of the experts."""
    dtype = torch.float64 if implementation == "eager" else torch.float32
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    number = tokens[dist.get_rank()]
    hidden = torch.randn(number, 32, generator=generator, dtype=torch.float64).to(dtype)
    choices = torch.tensor(popular)
    chosen = [choices[torch.randperm(len(choices), generator=generator)[:width]] for _ in range(number)]
    index = torch.stack(chosen) if number else torch.zeros(0, width, dtype=torch.long)
    weights = torch.rand(number, width, generator=generator, dtype=torch.float64).to(dtype)
    up = torch.randn(number, 32, generator=generator, dtype=torch.float64).to(dtype)
    results = []
    for shared in (False, True):
        model, experts = layer(dtype, implementation)
        if shared:
            expert_parallel.apply(model, mesh_of(ranks))
        given, scores = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        if number or shared:
            out = experts(given, index, scores)
            (out * up).sum().backward()
        else:  # grouped products of no rows at all are not a plain model's business
            out = torch.zeros_like(hidden)
            given.grad, scores.grad = torch.zeros_like(hidden), torch.zeros_like(weights)
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in experts.parameters()]
        if shared:
            assert all(p.grad is not None for p in experts.parameters())
        else:
            gradients = [added(g, ranks).chunk(ranks)[mesh_of(ranks).get_local_rank()] for g in gradients]
        results.append([out.detach(), given.grad, scores.grad, *gradients])
    return [
        float(((a - b).abs().max() / a.abs().max().clamp(min=1)).nan_to_num(torch.inf)) if a.numel() else 0.0
        for a, b in zip(*results, strict=True)
    ]


def described(ranks: int) -> Any:
    model = model_of("float32")
    before = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    plan = expert_parallel.apply(model, mesh_of(ranks))
    same = [
        name
        for name, p in model.named_parameters()
        if name in plan.experts
        and (plan.experts[name].project(whole[name].numpy()) == p.detach().numpy()).all()
    ]
    return before, [name for name, _ in model.named_parameters()], dict(plan.experts), same


def copied() -> bool:
    """Return True if a copy of a model with shared experts computes with its own parameters."""
    model = model_of("float32")
    expert_parallel.apply(model, mesh_of(4))
    bitwise_reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        hidden = torch.ones(2, 32)
        index, weights = torch.tensor([[0, 7], [3, 5]]), torch.ones(2, 2)
        zero = model.model.layers[0].mlp.experts(hidden, index, weights)
        own = bitwise_reference.model.layers[0].mlp.experts(hidden, index, weights)
    return bool((zero == 0).all() and (own != 0).all())


def compiled() -> bool:
    """Return True if compiled blocks leave every bit unchanged, on this rank."""
    model = model_of("float32")
    expert_parallel.apply(model, mesh_of(4))
    plainly = outcome(model)
    with CompiledBlocks(model, "eager").active():
        found = outcome(model)
    return all(torch.equal(found[name], plainly[name]) for name in plainly)


# Faults


def in_arrival_order(returned: Tensor, place: Tensor, index: Tensor, weights: Tensor, dtype: Any) -> Tensor:
    return expert_added(returned, torch.arange(place.numel()).view_as(place), index, weights, dtype)


def next_choice(returned: Tensor, place: Tensor, index: Tensor, weights: Tensor, dtype: Any) -> Tensor:
    return expert_added(returned, place, index, weights.roll(1, dims=1), dtype)


def first_expert(module: Any, rows: Tensor, experts: Tensor) -> Tensor:
    return expert_run(module, rows, torch.zeros_like(experts))


def by_rank(module: Any, rows: Tensor, experts: Tensor) -> Tensor:
    return expert_run(module, rows, experts.sort().values)


def no_way_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad.new_zeros(sum(ctx.sent), *grad.shape[1:]), None, None, None


expert_added, expert_run = expert_parallel._added, expert_parallel._run
FAULTS: dict[str, tuple[str, Any]] = {
    "no un-permutation": ("regress.parallel.expert_parallel._added", in_arrival_order),
    "weights of another choice": ("regress.parallel.expert_parallel._added", next_choice),
    "always the first expert": ("regress.parallel.expert_parallel._run", first_expert),
    "rows taken as sorted by expert": ("regress.parallel.expert_parallel._run", by_rank),
    "gradients do not travel": (
        "regress.parallel.differentiable_collectives._Rows.backward",
        staticmethod(no_way_back),
    ),
}


def errors_under(fault: str) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*FAULTS[fault])
        return errors(4, "float64", "eager", False)


# The tests


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_log_probs_and_gradients_are_those_of_whole_experts(
    ranks: Any, size: int, checkpointing: bool
) -> None:
    for found in ranks.run(errors, size, "float64", "eager", checkpointing):
        assert len(found) > 20
        assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ranks_whose_experts_nobody_chooses(ranks: Any, checkpointing: bool) -> None:
    for found in ranks.run(errors, 4, "float64", "eager", checkpointing, True):
        assert max(found.values()) < TOLERANCE, found


@st.composite
def routings(draw: st.DrawFn) -> tuple[int, str, list[int], list[int], int, int]:
    """Ranks, an implementation, tokens of each rank (or none), the experts anybody chooses, choices a token."""
    popular = draw(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS, unique=True))
    tokens = draw(st.lists(st.sampled_from([0, 0, 1, 3, 10]), min_size=4, max_size=4))
    implementation = draw(st.sampled_from(["eager", "eager", "grouped_mm", "batched_mm"]))
    width = draw(st.integers(1, min(3, len(popular))))
    return draw(st.sampled_from([2, 4])), implementation, tokens, popular, width, draw(st.integers(0, 99))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(routing=routings())
def test_any_routing(ranks: Any, routing: Any) -> None:
    tolerance = TOLERANCE if routing[1] == "eager" else 1e-5
    assert max(map(max, ranks.run(routed, *routing))) < tolerance


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        ("float32", "eager"),
        ("float32", "grouped_mm"),
        ("float32", "batched_mm"),
        ("bfloat16", "grouped_mm"),
        ("bfloat16", "eager"),
    ],
)
def test_shared_experts_err_no_more_than_whole_ones(ranks: Any, dtype: str, implementation: str) -> None:
    for whole, shared in ranks.run(errors_of_dtype, dtype, implementation):
        assert max(shared.values()) < 4 * max(whole.values()), (whole, shared)


def test_the_plan_says_what_lies_where(ranks: Any) -> None:
    for rank, (before, after, plan, same) in enumerate(ranks.run(described, 2)):
        mine = (4 * (rank % 2), 4 * (rank % 2) + 4)
        assert after == [name for name, _ in before]
        shapes = {name: shape for name, shape in before if ".experts." in name}
        assert len(shapes) == 4
        assert plan == {
            name: ShardLayout(shape, (((mine),), ((0, shape[1]),), ((0, shape[2]),)))
            for name, shape in shapes.items()
        }
        assert same == list(shapes)


def test_a_copy_has_experts_of_its_own(ranks: Any) -> None:
    assert all(ranks.run(copied))


@pytest.mark.extended  # a run of two ranks with compiled blocks is one of those that train the same model
def test_compiled_blocks_compute_the_same(ranks: Any) -> None:
    assert all(ranks.run(compiled))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_far_beyond_the_tolerance(ranks: Any, fault: str) -> None:
    worst = max(max(found.values()) for found in ranks.run(errors_under, fault))
    assert worst > 1e9 * TOLERANCE
