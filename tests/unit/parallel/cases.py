"""What ranks compute under a layout, against the plain model in true float64."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from regress.engine.attention import VARLEN, VarlenSegments, block_causal_mask
from regress.engine.config.schema import ModelConfig
from regress.engine.models import build_model
from regress.engine.precision import arithmetic
from regress.engine.projection import logits_at
from regress.grpo.logprobs import TokenLogProbs, token_log_probs
from regress.layout import Segment, TokenLayout
from regress.parallel import sharded, shards, tensor
from regress.parallel.vocabulary import vocab_parallel_log_probs

ROPE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 16,
}
SIZES: Mapping[str, dict[str, Any]] = {
    "llama": {**ROPE, "attention_bias": True},
    "qwen3": {**ROPE, "head_dim": 16},
    "qwen3_moe": {**ROPE, "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
    "gpt2": {"n_embd": 32, "n_head": 4},
}


@dataclass(frozen=True)
class Micro:
    layout: TokenLayout
    input_ids: Tensor
    at: Tensor
    targets: Tensor
    weights: Tensor


def microbatches(vocabulary: int) -> list[Micro]:
    """Right padded, packed in one row, packed in two rows, left padded; the columns are multiples of 4."""
    layouts = [
        TokenLayout((3, 12), (Segment(0, 0, 12, 0, 0), Segment(1, 0, 5, 1, 0), Segment(2, 0, 1, 2, 0))),
        TokenLayout((1, 16), (Segment(0, 0, 6, 0, 0), Segment(1, 0, 2, 0, 6), Segment(2, 0, 7, 0, 8))),
        TokenLayout((2, 8), (Segment(0, 0, 4, 0, 0), Segment(1, 0, 4, 0, 4), Segment(2, 0, 6, 1, 0))),
        TokenLayout((2, 8), (Segment(0, 0, 3, 0, 5), Segment(1, 0, 8, 1, 0))),
    ]
    return [_micro(layout, vocabulary, seed) for seed, layout in enumerate(layouts)]


def _micro(layout: TokenLayout, vocabulary: int, seed: int) -> Micro:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, layout.shape, generator=generator)
    positions = torch.from_numpy(layout.positions).reshape(-1)
    local = torch.nonzero(positions > 0).squeeze(1)
    weights = torch.randn(2, len(local), generator=generator, dtype=torch.float64)
    return Micro(layout, ids, local - 1, ids.reshape(-1)[local], weights)


def forward(model: PreTrainedModel, micro: Micro) -> Tensor:
    """Logits ``[K, V]`` of the loss tokens, or the local part of them."""
    layout, implementation = micro.layout, model.config._attn_implementation
    offsets = np.cumsum([0, *(s.stop for s in layout.segments)])
    index = torch.from_numpy(layout.indices(offsets)[1])
    mask: Tensor = block_causal_mask(layout, implementation, torch.float64, torch.device("cpu"))
    if implementation == VARLEN:
        mask = torch.from_numpy(layout.attention_mask)
    with arithmetic(torch.float64), logits_at(model, micro.at):
        logits: Tensor = model(
            input_ids=micro.input_ids,
            position_ids=torch.from_numpy(layout.position_ids),
            attention_mask=mask,
            use_cache=False,
            varlen=VarlenSegments.of(layout, index),
        ).logits
    return logits.squeeze(0)


def backward(out: TokenLogProbs, micro: Micro) -> None:
    assert out.entropy is not None
    share = (micro.weights[0] * out.log_probs).sum() + (micro.weights[1] * out.entropy).sum()
    with arithmetic(torch.float64):
        share.backward()


@dataclass(frozen=True)
class Layout:
    """A layout of a model, and what it has to agree with."""

    family: str
    tp: int = 1
    fsdp: int = 1
    dp: int = 1
    sequence_parallel: bool = False
    reshard: bool = True
    tied: bool = False
    vocabulary: int = 14
    config: dict[str, Any] = field(default_factory=dict)
    attention: str = "sdpa"

    def run(self) -> dict[str, Any]:
        t0 = time.time()
        model = self.model()
        plain = copy.deepcopy(model)
        micros = microbatches(self.vocabulary)
        expected = [self.step(plain, micro) for micro in micros]
        mesh = init_device_mesh(
            "cpu", (self.dp, self.fsdp, self.tp), mesh_dim_names=("dp", "fsdp", "tp")
        )
        plan = self.apply(model, mesh)
        mine = [index for index in range(len(micros)) if index % (self.dp * self.fsdp) == self.data_rank(mesh)]
        errors: dict[str, float] = {}
        with torch.no_grad():
            before = self.split_log_probs(model, plan, mesh, micros[mine[0]]).log_probs
        if self.fsdp > 1:
            sharded.reshard(model)
        for index in mine:
            out = self.split_log_probs(model, plan, mesh, micros[index])
            backward(out, micros[index])
            assert out.entropy is not None
            for name, value, wanted in zip(
                ("log_probs", "entropy"), (out.log_probs, out.entropy), expected[index], strict=True
            ):
                errors[f"{name}[{index}]"] = relative(value.detach(), wanted)
        errors["log_probs without a graph"] = relative(before, expected[mine[0]][0])
        gradients = dict(plain.named_parameters())
        parameters = dict(model.named_parameters())
        unsummed = {}
        replicas = True
        for name, parameter in parameters.items():
            assert parameter.grad is not None, name
            layout = shards.of(parameter)
            assert getattr(parameter.grad, "placements", 0) == getattr(parameter, "placements", 0), name
            gradient = shards.local(parameter.grad)
            wanted = shards.project(layout, gradients[name].grad)
            scale = gradients[name].grad.abs().max()
            if plan is not None and name in plan.partial:
                unsummed[name] = ((gradient - wanted).abs().max() / scale).item() if wanted.numel() else 1.0
                dist.all_reduce(gradient, group=mesh["tp"].get_group())
            errors[name] = ((gradient - wanted).abs().max() / scale).item() if wanted.numel() else 0.0
            weight = shards.project(layout, gradients[name].detach())
            assert torch.equal(shards.local(parameter), weight), name
        return {
            "errors": errors,
            "unsummed": unsummed,
            "names": list(parameters) == list(gradients),
            "tied": parameters_tied(model), "wall": time.time() - t0,
        }

    def data_rank(self, mesh: DeviceMesh) -> int:
        return mesh["dp"].get_local_rank() * self.fsdp + mesh["fsdp"].get_local_rank()

    def model(self) -> PreTrainedModel:
        config = ModelConfig(
            family=self.family,
            dtype="float64",
            tie_word_embeddings=self.tied,
            attn_implementation=self.attention,
            config={**SIZES[self.family], **self.config},
        )
        return perturbed(build_model(config, seed=1, vocab_size=self.vocabulary, pad_id=0, eos_id=1))

    def apply(self, model: PreTrainedModel, mesh: DeviceMesh) -> tensor.TensorPlan | None:
        plan = None
        if self.tp > 1:
            plan = tensor.apply(model, mesh["tp"], sequence_parallel=self.sequence_parallel)
        if self.fsdp * self.dp > 1:
            data = mesh["dp", "fsdp"] if self.dp > 1 else mesh["fsdp"]
            sharded.apply(model, data, reshard_after_forward=self.reshard)
        return plan

    def step(self, model: PreTrainedModel, micro: Micro) -> tuple[Tensor, Tensor]:
        out = token_log_probs(forward(model, micro), micro.targets, temperature=0.8, entropy=True)
        backward(out, micro)
        assert out.entropy is not None
        return out.log_probs.detach(), out.entropy.detach()

    def split_log_probs(
        self, model: PreTrainedModel, plan: tensor.TensorPlan | None, mesh: DeviceMesh, micro: Micro
    ) -> TokenLogProbs:
        logits = forward(model, micro)
        if plan is None:
            return token_log_probs(logits, micro.targets, temperature=0.8, entropy=True)
        assert plan.vocabulary is not None
        start, stop = plan.vocabulary
        assert logits.shape[-1] == stop - start
        group = mesh["tp"].get_group()
        return vocab_parallel_log_probs(
            logits, micro.targets, start=start, group=group, temperature=0.8, entropy=True
        )


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Weights with signal: norms and biases are not the constants they start as."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=0.1 if parameter.dim() == 1 else 0.15)
    return model


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def parameters_tied(model: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


FAMILIES = tuple(SIZES)
TWO_RANKS: dict[str, Layout] = {
    **{f"tp2-{family}": Layout(family, tp=2) for family in FAMILIES},
    **{f"tp2-sp-{family}": Layout(family, tp=2, sequence_parallel=True) for family in FAMILIES},
    "tp2-tied-qwen3": Layout("qwen3", tp=2, tied=True, config={"num_key_value_heads": 2}),
    "tp2-sp-tied-gpt2": Layout("gpt2", tp=2, tied=True, sequence_parallel=True),
    "tp2-eager-llama": Layout("llama", tp=2, attention="eager", vocabulary=9),
    "tp2-sp-varlen-qwen3": Layout("qwen3", tp=2, sequence_parallel=True, attention="varlen"),
    **{f"fsdp2-{family}": Layout(family, fsdp=2) for family in FAMILIES},
    "fsdp2-no-reshard-tied-gpt2": Layout("gpt2", fsdp=2, tied=True, reshard=False),
    "fsdp2-tied-qwen3": Layout("qwen3", fsdp=2, tied=True),
    "dp2-fsdp1-qwen3": Layout("qwen3", dp=2),
}
FOUR_RANKS: dict[str, Layout] = {
    **{f"tp4-{family}": Layout(family, tp=4) for family in FAMILIES},
    "tp4-sp-qwen3_moe": Layout("qwen3_moe", tp=4, sequence_parallel=True),
    "tp4-empty-shard-tied-llama": Layout("llama", tp=4, tied=True, vocabulary=9),
    **{f"fsdp2-tp2-{family}": Layout(family, fsdp=2, tp=2) for family in FAMILIES},
    "fsdp2-tp2-sp-tied-qwen3": Layout("qwen3", fsdp=2, tp=2, sequence_parallel=True, tied=True),
    "fsdp2-tp2-no-reshard-tied-gpt2": Layout("gpt2", fsdp=2, tp=2, tied=True, reshard=False),
    "dp2-tp2-qwen3": Layout("qwen3", dp=2, tp=2),
    "fsdp4-qwen3_moe": Layout("qwen3_moe", fsdp=4),
    "dp2-fsdp2-qwen3": Layout("qwen3", dp=2, fsdp=2),
}
CASES = {**TWO_RANKS, **FOUR_RANKS}
