"""A pipeline computes what one process computes: every schedule, family and cut."""

from __future__ import annotations

import copy
import datetime
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from regress.dump import Recorder, at, recording, tap
from regress.dump.hooks import record_modules
from regress.dump.reader import read
from regress.dump.trajectory import Trajectory
from regress.engine import taps
from regress.engine.attention import block_causal_mask
from regress.engine.batch import Microbatch, TokenBatch
from regress.engine.compiled import blocks_of
from regress.engine.config.schema import ModelConfig
from regress.engine.models import build_model
from regress.engine.policy import LocalPolicy
from regress.engine.projection import Entropy, logits_at
from regress.errors import ConfigError, RegressError
from regress.grpo.logprobs import TokenLogProbs, token_log_probs
from regress.layout import BatchPlan
from regress.parallel.pipeline import Pipeline
from regress.parallel.schedules import ranks_of_stages
from regress.parallel.stages import Stages, split

pytestmark = pytest.mark.one_in(6)  # replays of golden cases meet the same combinations

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
        return dist.new_group(timeout=timeout)
    halves = [dist.new_group([0, 1], timeout=timeout), dist.new_group([2, 3], timeout=timeout)]
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


def trajectory(length: int, run: int) -> Trajectory:
    return Trajectory(
        group_id="0",
        run_id=run,
        tokens=np.random.default_rng(run).integers(2, VOCABULARY, length).tolist(),
        loss_mask=[0, 0] + [1] * (length - 2),
        reward=0.0,
        prompt_length=2,
    )


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


def errors(case: dict[str, Any], schedule: str, ranks: int, per_rank: int, count: int) -> dict[str, Any]:
    """Largest relative differences from one process: of gradients by name, of results of the loss, of log-probs."""
    plain = LocalPolicy(model_of(**case), entropy_gradient=True)
    micros = microbatches_of(count)
    expected = plain.forward_backward(micros, loss)
    whole = dict(plain.named_parameters())
    pipeline = pipeline_of(model_of(**case), schedule, ranks, per_rank)
    before = plain.log_probs(micros)
    after = [one.log_probs for one in pipeline.values(micros, functools.partial(project, entropy=False))]
    results = pipeline.forward_backward(micros, loss, project)
    pipeline.sum_tied()
    found: dict[str, Any] = {
        "names": set(whole),
        "gradients": {
            name: difference(p.grad, whole[name].grad) for name, p in pipeline.stages.named_parameters()
        },
    }
    if not pipeline.is_last:
        shapes = [(value.shape, value.dtype, bool(value.any())) for value in after]
        return {**found, "none": results, "zeros": shapes == [(v.shape, v.dtype, False) for v in before]}
    assert [index for index, _ in results] == [index for index, _ in expected]
    values = [difference(a, b) for (_, a), (_, b) in zip(results, expected, strict=True)]
    return {**found, "values": values + [difference(a, b) for a, b in zip(after, before, strict=True)]}


def difference(value: Tensor | None, expected: Tensor | None) -> float:
    assert value is not None
    assert expected is not None
    assert value.dtype == expected.dtype
    if not expected.numel():
        return 0.0 if value.shape == expected.shape else float("inf")
    return ((value - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()


CASES = [
    # schedule, ranks, stages per rank, layers, microbatches
    ("gpipe", 2, 1, 2, 3),
    ("gpipe", 4, 1, 2, 1),  # embedding, two blocks, projection
    ("1f1b", 2, 1, 3, 3),
    ("1f1b", 4, 1, 2, 5),
    ("interleaved_1f1b", 2, 2, 2, 4),
    ("interleaved_1f1b", 4, 2, 6, 3),
    ("looped_bfs", 2, 3, 4, 3),
    ("looped_bfs", 4, 2, 7, 2),
    ("interleaved_zero_bubble", 2, 2, 2, 4),
    ("interleaved_zero_bubble", 4, 2, 6, 3),
    ("zbv_zero_bubble", 2, 2, 2, 2),
    ("zbv_zero_bubble", 4, 2, 6, 3),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schedule", "size", "per_rank", "layers", "count"), CASES, ids=str)
def test_a_pipeline_computes_what_one_process_computes(
    ranks: Any, schedule: str, size: int, per_rank: int, layers: int, count: int, family: str
) -> None:
    tied = (list(FAMILIES).index(family) + size // 2) % 2 == 0  # each family once tied, once not
    case = {"family": family, "layers": layers, "tied": tied}
    assert worst(ranks.run(errors, case, schedule, size, per_rank, count)) < TOLERANCE


def worst(answers: list[dict[str, Any]]) -> float:
    """The largest difference, after making sure that nothing is missing."""
    assert {name for answer in answers for name in answer["gradients"]} == answers[0]["names"]
    last = [answer for answer in answers if "values" in answer]
    assert last
    assert all(answer["none"] == [] and answer["zeros"] for answer in answers if answer not in last)
    return max(
        error for answer in answers for error in (*answer["gradients"].values(), *answer.get("values", ()))
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_is_that_of_one_process(ranks: Any, schedule: str, dtype: str) -> None:
    """Where microbatches are added up in the same order."""
    assert worst(ranks.run(errors, {"family": "llama", "dtype": dtype}, schedule, 2, 1, 4)) == 0


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("1f1b", 1), ("looped_bfs", 2), ("interleaved_zero_bubble", 2), ("zbv_zero_bubble", 2)],
)
def test_blocks_that_are_computed_again_in_the_backward_pass(
    ranks: Any, schedule: str, per_rank: int
) -> None:
    case = {"family": "qwen3_moe", "checkpointing": True}
    assert worst(ranks.run(errors, case, schedule, 2, per_rank, 4)) < TOLERANCE


def sharded(
    case: dict[str, Any], schedule: str, per_rank: int, *, reshard: bool
) -> tuple[Stages, ProcessGroup]:
    """Stages of one of two pipelines of two ranks, under FSDP2 between the two."""
    mesh = mesh_of(2, 2)
    group = mesh["pp"].get_group()
    stages = stages_of(model_of(**case), schedule, group, per_rank)
    for model in stages.models:
        shard(model, reshard=reshard)
    return stages, group


def shard(model: PreTrainedModel, *, reshard: bool = True, dtype: torch.dtype | None = None) -> None:
    for block in (*blocks_of(model).values(), model):
        precision = MixedPrecisionPolicy(param_dtype=dtype)
        unit = fully_shard(
            block, mesh=mesh_of(2, 2)["fsdp"], reshard_after_forward=reshard, mp_policy=precision
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def sharded_errors(
    case: dict[str, Any], schedule: str, per_rank: int, count: int, reshard: bool
) -> dict[str, Any]:
    """As `errors`; each of the two pipelines has half of the microbatches."""
    plain = LocalPolicy(model_of(**case), entropy_gradient=True)
    micros = microbatches_of(2 * count)
    plain.forward_backward(micros, loss)
    whole = dict(plain.named_parameters())
    stages, group = sharded(case, schedule, per_rank, reshard=reshard)
    pipeline = Pipeline(stages, group, schedule=schedule, run=run)
    pipeline.forward_backward(micros[dist.get_rank() % 2 :: 2], loss, project)
    pipeline.sum_tied()
    gradients = {
        name: difference(p.grad.full_tensor(), whole[name].grad) if isinstance(p.grad, DTensor) else 1.0
        for name, p in pipeline.stages.named_parameters()
    }
    return {"names": set(whole), "gradients": gradients, "values": []}


def narrow_errors() -> dict[str, Any]:
    """Return the differences of pipelined FSDP2 in bfloat16 from FSDP2 without stages."""
    whole = model_of(dtype="float32")
    stages = stages_of(model_of(dtype="float32"), "gpipe", mesh_of(2, 2)["pp"].get_group(), 1)
    for model in (whole, *stages.models):
        shard(model, dtype=torch.bfloat16)
    micros = [microbatches_of(2)[0]]
    LocalPolicy(whole, entropy_gradient=True).forward_backward(micros, loss)
    group = mesh_of(2, 2)["pp"].get_group()
    narrow = torch.bfloat16
    pipeline = Pipeline(stages, group, schedule="gpipe", run=run, hidden_dtype=narrow)
    pipeline.forward_backward(micros, loss, project)
    expected = dict(whole.named_parameters())
    gradients = {
        name: difference(p.grad.full_tensor(), expected[name].grad.full_tensor())
        for name, p in stages.named_parameters()
    }
    return {"names": set(expected), "gradients": gradients, "values": []}


def test_stages_may_exchange_less_than_the_precision_of_their_weights(ranks: Any) -> None:
    assert worst(ranks.run(narrow_errors)) == 0


def parted(schedule: str, per_rank: int) -> str:
    stages, group = sharded({"tied": True}, schedule, per_rank, reshard=False)
    try:
        Pipeline(stages, group, schedule=schedule, run=run)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_tied_weight_cannot_be_sharded_twice_on_one_rank(ranks: Any) -> None:
    message = (
        "parallel.pp_schedule=zbv_zero_bubble: first and last stage lie on one rank, where fsdp and tp make two "
        "parameters of the tied model.embed_tokens.weight; choose another schedule or set "
        "model.tie_word_embeddings=false"
    )
    assert ranks.run(parted, "zbv_zero_bubble", 2) == [message] * 4


@functools.cache
def mesh_of(pp: int, fsdp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (pp, fsdp), mesh_dim_names=("pp", "fsdp"))


@pytest.mark.parametrize(
    ("schedule", "per_rank", "reshard", "tied"),
    [
        ("gpipe", 1, True, True),
        ("1f1b", 1, True, False),
        ("interleaved_1f1b", 2, True, True),
        ("interleaved_zero_bubble", 2, False, False),
        ("zbv_zero_bubble", 2, False, False),
    ],
)
def test_stages_may_be_sharded(ranks: Any, schedule: str, per_rank: int, reshard: bool, tied: bool) -> None:
    case = {"family": "qwen3", "tied": tied}
    assert worst(ranks.run(sharded_errors, case, schedule, per_rank, 2, reshard)) < TOLERANCE


def test_zero_bubble_schedules_lose_gradients_of_resharded_weights(ranks: Any) -> None:
    """Why the configuration refuses it; when this fails, torch has learned it."""
    answers = ranks.run(sharded_errors, {"family": "qwen3"}, "interleaved_zero_bubble", 2, 2, True)
    assert worst(answers) > 0.1


def records(folder: str, schedule: str, per_rank: int, checkpointing: bool) -> dict[str, Any]:
    """Return the records of a step by type, microbatch and name, of one process and of this rank."""
    micros = microbatches_of(4)
    group = group_of(2)
    case = {"family": "qwen3", "tied": True, "checkpointing": checkpointing}

    def tapped(micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, None]:
        value, _ = loss(micro, out)
        tap("loss", loss=value)
        return value, None

    plain = LocalPolicy(model_of(**case), entropy_gradient=True)
    modules = {name: module for name, module in plain.model.named_modules() if name}
    found = {}
    with recorded(modules, f"{folder}/plain{dist.get_rank()}", found, "plain"):
        plain.forward_backward(micros, tapped)
    pipeline = pipeline_of(model_of(**case), schedule, 2, per_rank)
    with recorded(pipeline.stages.modules(), f"{folder}/{dist.get_rank()}", found, "own"):
        pipeline.forward_backward(micros, tapped, project, taps.inputs)
    return {**found, "place": group.rank(), "last": pipeline.is_last}


@contextmanager
def recorded(modules: dict[str, nn.Module], folder: str, found: dict[str, Any], key: str) -> Iterator[None]:
    types = ("batch_inputs", "activations", "loss")
    recorder = Recorder(folder, options=dict.fromkeys(types, True))
    with recording(recorder), record_modules(modules), at(step=0, rank=dist.get_rank()):
        yield
    files = [read(file) for type in types for file in Path(folder, type).glob("*")]
    found[key] = {
        (record.type, record.micro): (record.tensors, record.meta.get("layout")) for record in files
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2)]
)
def test_what_a_step_records_lies_on_the_ranks_where_it_is_made(
    ranks: Any, tmp_path: Path, schedule: str, per_rank: int, checkpointing: bool
) -> None:
    pair = ranks.run(records, str(tmp_path), schedule, per_rank, checkpointing)[:2]
    expected = pair[0]["plain"]
    assert {kind for kind, _ in expected} == {"batch_inputs", "activations", "loss"}
    for (kind, micro), (tensors, layout) in expected.items():
        found = [rank["own"][kind, micro] for rank in pair if (kind, micro) in rank["own"]]
        assert len(found) == (1 if kind == "loss" else 2)
        assert all(own[1] == layout for own in found)
        names = [name for own, _ in found for name in own]
        assert sorted(names) == sorted([*tensors] * (2 if kind == "batch_inputs" else 1))
        for own, _ in found:
            for name, values in own.items():
                np.testing.assert_allclose(values, tensors[name], rtol=1e-12, atol=1e-14)
    assert all(key in expected for rank in pair for key in rank["own"])


def fails(schedule: str, per_rank: int, where: str) -> tuple[str, str, bool]:
    """Return the error that a rank raises when something goes wrong on the last stage, with microbatch 1."""
    group = group_of(2, patience=2, use=f"{schedule}-{where}")
    micros = microbatches_of(4)

    def refuse(micro: Microbatch) -> None:
        if micro is micros[1]:
            raise RegressError("microbatch 1 has no loss")

    def failing(micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, None]:
        if where == "loss":
            refuse(micro)
        return out.log_probs.sum(), None

    def projecting(model: PreTrainedModel, micro: Microbatch, hidden: Tensor | None) -> TokenLogProbs:
        if where == "project":
            refuse(micro)
        return project(model, micro, hidden)

    pipeline = pipeline_of(model_of(), schedule, 2, per_rank, group)
    try:
        pipeline.forward_backward(micros, failing, projecting)
    except Exception as error:
        return type(error).__name__, str(error), pipeline.is_last
    return "", "nothing was raised", pipeline.is_last


@pytest.mark.parametrize(
    ("schedule", "per_rank", "where"),
    [
        ("gpipe", 1, "loss"),
        ("1f1b", 1, "project"),
        ("zbv_zero_bubble", 2, "loss"),
        ("looped_bfs", 2, "project"),
    ],
)
def test_a_failure_on_the_last_stage_ends_all_ranks(
    ranks: Any, schedule: str, per_rank: int, where: str
) -> None:
    for kind, text, last in ranks.run(fails, schedule, per_rank, where):
        assert kind
        if last:
            assert (kind, text) == ("RegressError", "microbatch 1 has no loss")
        else:
            assert "imed out" in text or "timeout" in text


def refused(schedule: str, per_rank: int, count: int, ragged: bool) -> tuple[str, str]:
    micros = microbatches_of(count)
    if ragged:
        micros[1:2] = TokenBatch([trajectory(20, 0)]).microbatches(BatchPlan())
    try:
        pipeline_of(model_of(), schedule, 2, per_rank).forward_backward(micros, loss, project)
    except (ConfigError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_mini_batch_that_no_stage_can_begin_is_refused_on_all_ranks(ranks: Any) -> None:
    message = (
        "parallel.pp_schedule=1f1b needs at least 2, one for each stage, and the mini-batch has 1 microbatches on each "
        "rank; change batching.micro_batch_size (of a warm start: warm_start.batch_size), or choose "
        "parallel.pp_schedule=gpipe or looped_bfs"
    )
    assert ranks.run(refused, "1f1b", 1, 1, False) == [("ConfigError", message)] * 4
    message = (
        "microbatch 1 has hidden states (1, 20, 16) and microbatch 0 (2, 12, 16): stages exchange tensors of one "
        "shape, so pad all microbatches to it"
    )
    assert ranks.run(refused, "gpipe", 1, 3, True) == [("ValueError", message)] * 4
