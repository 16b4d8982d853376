"""Small models, their pipelines on the ranks, and what these compute beside one process."""

from __future__ import annotations

import copy
import datetime
import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from regress.dump.trajectory import Trajectory
from regress.engine.attention import block_causal_mask
from regress.engine.config.model_config import ModelConfig
from regress.engine.log_prob_projection import Entropy, logits_at
from regress.engine.mini_batch import Microbatch, TokenBatch
from regress.engine.model_loading import build_model
from regress.grpo.selective_log_softmax import TokenLogProbs, token_log_probs
from regress.layout import BatchPlan
from regress.parallel.pipeline_parallel import Pipeline
from regress.parallel.pipeline_schedules import ranks_of_stages
from regress.parallel.pipeline_stages import Stages, split

VOCABULARY = 13
TOLERANCE = 1e-12
SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": {**SMALL, "head_dim": 8},
    "qwen3_moe": {**SMALL, "moe_intermediate_size": 8},
    "gpt2": {"n_embd": 16, "n_head": 2},
}


@functools.cache
def group_of(ranks: int, patience: int = 60, use: str = "") -> ProcessGroup:
    """The first or second half of the world, or all of it; one for each use."""
    timeout = datetime.timedelta(seconds=patience)
    if ranks == dist.get_world_size():
        whole: ProcessGroup = dist.new_group(timeout=timeout)
        return whole
    halves: list[ProcessGroup] = [
        dist.new_group([0, 1], timeout=timeout),
        dist.new_group([2, 3], timeout=timeout),
    ]
    return halves[dist.get_rank() // 2]


@functools.cache
def built(family: str, layers: int, tied: bool, dtype: str, checkpointing: bool) -> PreTrainedModel:
    config = ModelConfig(
        family=family,
        config={**FAMILIES[family], "num_hidden_layers": layers},
        dtype=dtype,
        tie_word_embeddings=tied,
        gradient_checkpointing=checkpointing,
    )
    return build_model(config, seed=3, vocab_size=VOCABULARY, pad_id=0, eos_id=1)


def model_of(
    family: str = "qwen3",
    *,
    layers: int = 2,
    tied: bool = False,
    dtype: str = "float64",
    checkpointing: bool = False,
) -> PreTrainedModel:
    return copy.deepcopy(built(family, layers, tied, dtype, checkpointing))


def microbatches_of(count: int) -> list[Microbatch]:
    """Microbatches of one shape and of different lengths; the second one has no loss tokens."""
    rng = np.random.default_rng(5)
    samples = []
    for run in range(2 * count):
        length = int(rng.integers(3, 12))
        mask = [0] * length if run in (2, 3) and count > 1 else [0, 0] + [1] * (length - 2)
        tokens = rng.integers(2, VOCABULARY, length).tolist()
        samples.append(
            Trajectory(group_id="0", run_id=run, tokens=tokens, loss_mask=mask, reward=0.0, prompt_length=2)
        )
    return TokenBatch(samples).microbatches(BatchPlan(micro_batch_size=2, pad_to_length=12))


def run(model: PreTrainedModel, micro: Microbatch, hidden: Tensor | None) -> Tensor:
    mask = block_causal_mask(micro.layout, model.config._attn_implementation, model.dtype, model.device)
    given = {"input_ids": micro.input_ids} if hidden is None else {"inputs_embeds": hidden}
    logits: Tensor = model(
        **given,
        position_ids=micro.position_ids,
        attention_mask=mask,
        use_cache=False,
        varlen=micro.varlen,
    ).logits
    return logits


def project(
    model: PreTrainedModel, micro: Microbatch, hidden: Tensor | None, entropy: Entropy = True
) -> TokenLogProbs:
    with logits_at(model, micro.predictors):
        logits = run(model, micro, hidden).squeeze(0)
    return token_log_probs(logits, micro.targets, entropy=entropy)


def loss(micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, tuple[int, Tensor]]:
    """Different weights for all tokens; the result says which microbatch it is of."""
    assert out.entropy is not None
    weights = torch.cos(micro.select.to(out.log_probs.dtype))
    value = (weights * (out.log_probs + 0.3 * out.entropy)).sum()
    return value, (int(micro.layout.segments[0].sample), value.detach())


def stages_of(model: PreTrainedModel, schedule: str, group: ProcessGroup, per_rank: int) -> Stages:
    places = ranks_of_stages(schedule, group.size(), per_rank)
    return split(model, [stage for stage, rank in enumerate(places) if rank == group.rank()], len(places))


def pipeline_of(
    model: PreTrainedModel, schedule: str, ranks: int, per_rank: int, group: ProcessGroup | None = None
) -> Pipeline:
    group = group or group_of(ranks)
    return Pipeline(stages_of(model, schedule, group, per_rank), group, schedule=schedule, run=run)


def difference(value: Tensor | None, expected: Tensor | None) -> float:
    assert value is not None
    assert expected is not None
    assert value.dtype == expected.dtype
    if not expected.numel():
        return 0.0 if value.shape == expected.shape else float("inf")
    return float((value - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def worst(answers: list[dict[str, Any]]) -> float:
    """The largest difference, after making sure that nothing is missing."""
    assert {name for answer in answers for name in answer["gradients"]} == answers[0]["names"]
    last = [answer for answer in answers if "values" in answer]
    assert last
    assert all(answer["none"] == [] and answer["zeros"] for answer in answers if answer not in last)
    errors = [e for answer in answers for e in (*answer["gradients"].values(), *answer.get("values", ()))]
    return float(max(errors))
