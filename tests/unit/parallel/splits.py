"""Values that ranks compute with a split model, beside those each of them computes with the whole one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from batches import Micro, backward, logits_of, microbatches, pad_id
from differences import Differences
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel

from regress.engine.config.model_config import ModelConfig
from regress.engine.log_prob_projection import chunked_log_probs, hidden_at
from regress.engine.model_loading import build_model
from regress.engine.numeric_types import arithmetic
from regress.grpo.selective_log_softmax import TokenLogProbs, token_log_probs
from regress.parallel import fsdp as sharded
from regress.parallel import parameter_shards, tensor_parallel
from regress.parallel.pipeline_stages import cut
from regress.parallel.vocabulary_log_probs import vocab_parallel_log_probs

_ROPE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16}
SIZES: Mapping[str, dict[str, Any]] = {
    "llama": {**_ROPE, "attention_bias": True},
    "qwen3": {**_ROPE, "head_dim": 16},
    "qwen3_moe": {**_ROPE, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
    "gpt2": {"n_embd": 32, "n_head": 4},
}
STEP = 0.01


@dataclass(frozen=True)
class Split:
    """A model and the mesh it lies on."""

    family: str
    tp: int = 1
    fsdp: int = 1
    dp: int = 1
    sharded: bool = False
    sequence_parallel: bool = False
    reshard: bool = True
    tied: bool = False
    checkpointing: bool = False
    vocabulary: int = 14
    config: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"
    dtype: str = "float64"

    def model(self) -> PreTrainedModel:
        config = ModelConfig(
            family=self.family,
            dtype=self.dtype,
            tie_word_embeddings=self.tied,
            attn_implementation=self.attention,
            gradient_checkpointing=self.checkpointing,
            config={**SIZES[self.family], **self.config},
        )
        pad = pad_id(self.vocabulary)
        model = build_model(config, seed=1, vocab_size=self.vocabulary, pad_id=pad, eos_id=0)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():  # norms and biases start as constants, and weights too small to tell a mistake
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise, alpha=0.1 if parameter.dim() == 1 else 0.15)
        return model

    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (self.dp, self.fsdp, self.tp), mesh_dim_names=("dp", "fsdp", "tp"))

    def apply(self, model: PreTrainedModel, mesh: DeviceMesh) -> tensor_parallel.TensorPlan | None:
        plan = None
        if self.tp > 1:
            plan = tensor_parallel.apply(model, mesh["tp"], sequence_parallel=self.sequence_parallel)
        if self.fsdp * self.dp > 1 or self.sharded:
            data = mesh["dp", "fsdp"] if self.dp > 1 else mesh["fsdp"]
            sharded.apply(model, data, reshard_after_forward=self.reshard)
        return plan

    def mine(self, mesh: DeviceMesh, micros: list[Micro]) -> list[int]:
        """The microbatches of this rank, more than one of them if tokens are the same on all ranks."""
        own = mesh["dp"].get_local_rank() * self.fsdp + mesh["fsdp"].get_local_rank()
        return [index for index in range(len(micros)) if index % (self.dp * self.fsdp) == own]


def log_probs_of(
    logits: Tensor,
    micro: Micro,
    plan: tensor_parallel.TensorPlan | None = None,
    mesh: DeviceMesh | None = None,
) -> TokenLogProbs:
    if plan is None:
        return token_log_probs(logits, micro.targets, temperature=0.8, entropy=True)
    assert plan.vocabulary is not None
    assert mesh is not None
    start, stop = plan.vocabulary
    assert logits.shape[-1] == stop - start
    group = mesh["tp"].get_group()
    return vocab_parallel_log_probs(
        logits, micro.targets, start=start, group=group, temperature=0.8, entropy=True
    )


def one_step(split: Split) -> dict[str, Any]:
    """Outputs of modules, log-probs, all gradients, and log-probs after an update."""
    plain, model, mesh = split.model(), split.model(), split.mesh()
    plan = split.apply(model, mesh)
    micros = microbatches(split.vocabulary)
    mine = split.mine(mesh, micros)
    found = Differences(mesh)
    found.outputs(plan, model, plain, micros[mine[0]])
    sharded.reshard(model)
    for index, micro in enumerate(micros):
        wanted = log_probs_of(logits_of(plain, micro), micro)
        backward(wanted, micro)
        if index in mine:
            out = log_probs_of(logits_of(model, micro), micro, plan, mesh)
            backward(out, micro)
            found.tokens(f"log_probs[{index}]", out.log_probs, wanted.log_probs)
            found.tokens(f"entropy[{index}]", out.entropy, wanted.entropy)
    found.gradients(plan, model, plain)
    with torch.no_grad():
        for parameter in (*plain.parameters(), *model.parameters()):
            assert parameter.grad is not None
            parameter_shards.local(parameter).sub_(parameter_shards.local(parameter.grad), alpha=STEP)
        micro = micros[mine[0]]
        wanted = log_probs_of(logits_of(plain, micro), micro)
        out = log_probs_of(logits_of(model, micro), micro, plan, mesh)
    found.tokens("log_probs after the update", out.log_probs, wanted.log_probs)
    return {**found.as_json(), "tied": _is_tied(model)}


def staged_step(split: Split, count: int) -> dict[str, Any]:
    """The same with a model that is cut into stages, each of which is split; every rank holds all stages."""
    plain, mesh = split.model(), split.mesh()
    stages = [cut(copy.deepcopy(plain), stage, count) for stage in range(count)]
    plans = [tensor_parallel.apply(s, mesh["tp"], sequence_parallel=split.sequence_parallel) for s in stages]
    assert [plan.vocabulary is not None for plan in plans] == [False] * (count - 1) + [True]
    found = Differences(mesh)
    for index, micro in enumerate(microbatches(split.vocabulary)):
        wanted = log_probs_of(logits_of(plain, micro), micro)
        backward(wanted, micro)
        logits, borders = run_stages(stages, micro)
        out = log_probs_of(logits, micro, plans[-1], mesh)
        backward(out, micro)
        for sent, received in reversed(borders):
            with arithmetic(torch.float64):
                sent.backward(received.grad)
        found.tokens(f"log_probs[{index}]", out.log_probs, wanted.log_probs)
    if split.tied:
        first, last = stages[0].get_input_embeddings().weight, stages[-1].get_output_embeddings().weight
        parameter_shards.local(first.grad).add_(parameter_shards.local(last.grad))
        last.grad = first.grad
    expected = dict(plain.named_parameters())
    seen: set[str] = set()
    for stage, plan in zip(stages, plans, strict=True):
        own = dict(stage.named_parameters())
        found.sum_partial(plan, own, expected)
        for name, parameter in own.items():
            found.gradient(name, parameter, expected[name])
        seen |= own.keys()
    assert seen == expected.keys()
    return found.as_json()


def run_stages(stages: list[PreTrainedModel], micro: Micro) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Local logits of the loss tokens, and what each stage sent with what the next one received."""
    borders: list[tuple[Tensor, Tensor]] = []
    inputs = {"input_ids": micro.input_ids}
    for stage in stages[:-1]:
        with arithmetic(torch.float64):
            sent = stage(**inputs, **micro.arguments(stage.config._attn_implementation)).logits
        assert sent.shape[:2] == micro.layout.shape
        borders.append((sent, sent.detach().requires_grad_()))
        inputs = {"inputs_embeds": borders[-1][1]}
    return logits_of(stages[-1], micro, **inputs), borders


def half_precision_step(split: Split, reduce_dtype: torch.dtype) -> dict[str, Any]:
    """A float32 model that computes in bfloat16: its gradients, whole, against those of float32."""
    plain, model, mesh = split.model(), split.model(), split.mesh()
    plan = tensor_parallel.apply(model, mesh["tp"]) if split.tp > 1 else None
    sharded.apply(model, mesh["fsdp"], param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    micros = microbatches(split.vocabulary)
    for index, micro in enumerate(micros):
        backward(log_probs_of(logits_of(plain, micro), micro), micro)
        if index in split.mine(mesh, micros):
            logits = logits_of(model, micro)
            assert logits.dtype == torch.bfloat16
            backward(log_probs_of(logits, micro, plan, mesh), micro)
    expected = dict(plain.named_parameters())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    for name in () if plan is None else plan.partial:
        dist.all_reduce(parameter_shards.local(gradients[name]), group=mesh["tp"].get_group())
    norms = torch.zeros(2, dtype=torch.float64)
    for name, gradient in gradients.items():
        wanted = parameter_shards.project(parameter_shards.of(gradient), expected[name].grad)
        norms += torch.stack(
            [(parameter_shards.local(gradient) - wanted).norm().square(), wanted.norm().square()]
        )
    return {"relative_l2": (norms[0] / norms[1]).sqrt().item()}


def chunked_step(split: Split) -> dict[str, Any]:
    """Logits made chunk by chunk, outside the forward pass of the model."""
    plain, model, mesh = split.model(), split.model(), split.mesh()
    plan = split.apply(model, mesh)

    def log_probs(logits: Tensor, targets: Tensor) -> TokenLogProbs:
        return log_probs_of(logits, replace(micro, targets=targets), plan, mesh)

    found = Differences(mesh)
    micros = microbatches(split.vocabulary)
    for index, micro in enumerate(micros):
        wanted = log_probs_of(logits_of(plain, micro), micro)
        backward(wanted, micro)
        if index in split.mine(mesh, micros):
            with arithmetic(torch.float64):
                with hidden_at(model, micro.at) as hidden:
                    model(input_ids=micro.input_ids, **micro.arguments(split.attention))
                out = chunked_log_probs(model, hidden[0], micro.targets, log_probs, chunk=3)
            backward(out, micro)
            found.tokens(f"log_probs[{index}]", out.log_probs, wanted.log_probs)
    found.gradients(plan, model, plain)
    return found.as_json()


@torch.no_grad()
def stale_step(split: Split) -> dict[str, Any]:
    """Log-probs before and after a change of the weights, with and without dropping what lies whole."""
    model, mesh = split.model(), split.mesh()
    split.apply(model, mesh)
    parameters = list(model.parameters())
    micro = microbatches(split.vocabulary)[0]
    before = log_probs_of(logits_of(model, micro), micro).log_probs
    for parameter in parameters:
        parameter_shards.local(parameter).mul_(1.1)
    kept = log_probs_of(logits_of(model, micro), micro).log_probs
    sharded.reshard(model)
    after = log_probs_of(logits_of(model, micro), micro).log_probs
    return {"kept": torch.equal(kept, before), "after": torch.equal(after, before)}


def refusals(split: Split) -> dict[str, Any]:
    """Return the refusals on ranks, in words."""
    model, mesh = split.model(), split.mesh()
    split.apply(model, mesh)
    group = mesh["tp"].get_group()
    logits, targets = torch.zeros(2, 3), torch.tensor([1, 4])
    partial = DTensor.from_local(torch.zeros(2), mesh["tp"], [Partial()])
    parameter = model.get_input_embeddings().weight
    ids = torch.zeros(1, 9, dtype=torch.long)
    attempts: dict[str, Callable[[], object]] = {
        "columns": lambda: model(input_ids=ids, attention_mask=torch.ones(1, 1, 9, 9, dtype=torch.bool)),
        "start": lambda: vocab_parallel_log_probs(logits, targets, start=0, group=group),
        "partial": lambda: parameter_shards.of(partial),
        "shape": lambda: parameter_shards.like(parameter, torch.zeros(2, 2)),
    }
    words = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:  # the test compares the words
            words[name] = f"{type(error).__name__}: {error}"
    return words


def empty_refusal(split: Split) -> dict[str, Any]:
    """Return the refusal of a rank that cannot cast the part it lacks."""
    model, mesh = split.model(), split.mesh()
    split.apply(model, mesh)
    try:
        sharded.apply(model, mesh["fsdp"], param_dtype=torch.bfloat16)
    except Exception as error:  # the test compares the words
        return {"words": f"{type(error).__name__}: {error}"}
    return {"words": None}


def _is_tied(model: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


FAMILIES = tuple(SIZES)
TWO_RANKS: dict[str, Split] = {
    **{f"tp2-{family}": Split(family, tp=2) for family in FAMILIES},
    **{f"tp2-sp-{family}": Split(family, tp=2, sequence_parallel=True) for family in FAMILIES},
    "tp2-eager-tied-qwen3": Split(
        "qwen3", tp=2, attention="eager", tied=True, vocabulary=9, config={"num_key_value_heads": 2}
    ),
    "tp2-sp-checkpointing-tied-gpt2": Split(
        "gpt2", tp=2, sequence_parallel=True, checkpointing=True, tied=True
    ),
    "tp2-sp-checkpointing-varlen-qwen3": Split(
        "qwen3", tp=2, sequence_parallel=True, checkpointing=True, attention="varlen"
    ),
    "fsdp2-qwen3_moe": Split("qwen3_moe", fsdp=2),
    "fsdp2-llama": Split("llama", fsdp=2),
    "fsdp2-no-reshard-tied-gpt2": Split("gpt2", fsdp=2, reshard=False, tied=True),
    "fsdp2-checkpointing-tied-qwen3": Split("qwen3", fsdp=2, checkpointing=True, tied=True),
    "dp2-fsdp1-qwen3": Split("qwen3", dp=2),
}
FOUR_RANKS: dict[str, Split] = {
    "tp4-qwen3": Split("qwen3", tp=4),
    "tp4-gpt2": Split("gpt2", tp=4),
    "tp4-sp-qwen3_moe": Split("qwen3_moe", tp=4, sequence_parallel=True),
    "tp4-empty-shard-tied-llama": Split("llama", tp=4, tied=True, vocabulary=9),
    "fsdp1-tp4-empty-shard-llama": Split("llama", tp=4, sharded=True, vocabulary=9),
    "fsdp2-tp2-qwen3_moe": Split("qwen3_moe", fsdp=2, tp=2),
    "fsdp2-tp2-sp-tied-qwen3": Split("qwen3", fsdp=2, tp=2, sequence_parallel=True, tied=True),
    "fsdp2-tp2-no-reshard-tied-gpt2": Split("gpt2", fsdp=2, tp=2, reshard=False, tied=True),
    "fsdp2-tp2-one-row-llama": Split("llama", fsdp=2, tp=2, vocabulary=3),
    "dp2-tp2-qwen3": Split("qwen3", dp=2, tp=2),
    "fsdp4-qwen3_moe": Split("qwen3_moe", fsdp=4),
    "dp2-fsdp2-qwen3": Split("qwen3", dp=2, fsdp=2),
}
STAGED: dict[str, tuple[Split, int]] = {
    "pp2-tp2-qwen3_moe": (Split("qwen3_moe", tp=2), 2),
    "pp2-tp2-sp-tied-gpt2": (Split("gpt2", tp=2, sequence_parallel=True, tied=True), 2),
    "pp4-tp2-sp-llama": (Split("llama", tp=2, sequence_parallel=True), 4),
}
HALF: dict[str, tuple[Split, torch.dtype]] = {
    "fsdp2-bf16": (Split("qwen3", fsdp=2, dtype="float32"), torch.float32),
    "fsdp2-bf16-sums": (Split("qwen3", fsdp=2, dtype="float32"), torch.bfloat16),
}
OTHER: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp2-chunks": functools.partial(chunked_step, Split("gpt2", fsdp=2, tied=True)),
    "tp2-chunks": functools.partial(chunked_step, Split("llama", tp=2, sequence_parallel=True)),
    "fsdp2-stale": functools.partial(stale_step, Split("qwen3", fsdp=2, reshard=False)),
    "refusals": functools.partial(refusals, Split("qwen3", tp=2, sequence_parallel=True)),
}
OTHER_ON_FOUR = {"empty": functools.partial(empty_refusal, Split("qwen3", tp=4, vocabulary=9))}
JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: functools.partial(one_step, split) for name, split in {**TWO_RANKS, **FOUR_RANKS}.items()},
    **{name: functools.partial(staged_step, *staged) for name, staged in STAGED.items()},
    **{name: functools.partial(half_precision_step, *half) for name, half in HALF.items()},
    **OTHER,
    **OTHER_ON_FOUR,
}
