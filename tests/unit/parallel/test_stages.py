"""Stages, put together again, are the model: its values, its parameters and their names."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import FAMILIES, pipeline_of
from torch import Tensor, nn
from transformers import PreTrainedModel

from regress.engine.config import load_config
from regress.engine.config.model_config import ModelConfig
from regress.engine.model_loading import build_model
from regress.engine.numeric_types import arithmetic
from regress.errors import ConfigError
from regress.parallel.pipeline_parallel import timetable
from regress.parallel.pipeline_schedules import (
    SCHEDULES,
    ranks_of_stages,
    require_microbatches,
)
from regress.parallel.pipeline_stages import blocks_of_stage, cut, owners_of, split, tied_parameters

TOKENS = torch.tensor([[1, 2, 3, 4, 5], [7, 6, 5, 4, 3]])
POSITIONS = torch.tensor(
    [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0]]
)  # restarts, and so differs from what a model assumes


@functools.cache
def built(family: str, tied: bool, dtype: str) -> PreTrainedModel:
    config = ModelConfig(family=family, config=FAMILIES[family], dtype=dtype, tie_word_embeddings=tied)
    return build_model(config, seed=1, vocab_size=11, pad_id=0, eos_id=1)


def model_of(family: str, *, tied: bool = False, dtype: str = "float64") -> PreTrainedModel:
    return copy.deepcopy(built(family, tied, dtype))


def logits(model: PreTrainedModel, **start: Tensor) -> Tensor:
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()[None, None].expand(2, 1, 5, 5)
    with arithmetic(model.dtype):
        out: Tensor = model(**start, position_ids=POSITIONS, attention_mask=allowed, use_cache=False).logits
    return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "tied"), [("float64", False), ("bfloat16", True)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_one_after_the_other_are_the_model(family: str, count: int, tied: bool, dtype: str) -> None:
    whole = model_of(family, tied=tied, dtype=dtype)
    expected = logits(whole, input_ids=TOKENS)
    stages = split(whole, range(count), count)
    out = logits(stages.models[0], input_ids=TOKENS)
    for model in stages.models[1:]:
        out = logits(model, inputs_embeds=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("schedule", "size", "per_rank", "last"),
    [("1f1b", 3, 1, 2), ("interleaved_1f1b", 2, 2, 1), ("looped_bfs", 2, 2, 1), ("zbv_zero_bubble", 2, 2, 0)],
)
def test_one_rank_has_the_last_stage(schedule: str, size: int, per_rank: int, last: int) -> None:
    found = []
    for rank in range(size):
        group: Any = SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)
        pipeline = pipeline_of(model_of("llama"), schedule, size, per_rank, group)
        found.append(pipeline.is_last)
    assert found == [rank == last for rank in range(size)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_lies_on_its_stage_under_its_name(family: str, count: int, tied: bool) -> None:
    whole = dict(model_of(family, tied=tied).named_parameters())
    found: dict[str, list[int]] = {}
    for stage in range(count):
        part = cut(model_of(family, tied=tied), stage, count)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, whole[name])
            found.setdefault(name, []).append(stage)
    owners = owners_of(model_of(family, tied=tied), count)
    shared = tied_parameters(model_of(family, tied=tied))
    assert len(shared) == tied
    assert found == {
        name: [stage, count - 1] if name in shared else [stage] for name, stage in owners.items()
    }
    assert found.keys() == whole.keys()
    assert list(owners.values()) == sorted(owners.values())  # in the order in which parameters are listed


def test_several_stages_share_the_parameters_of_the_model() -> None:
    model = model_of("qwen3", tied=True)
    whole = dict(model.named_parameters())
    stages = split(model, (0, 3), 4)
    assert [name for name, _ in stages.named_parameters()] == [
        "model.embed_tokens.weight",
        "model.norm.weight",
    ]
    assert all(parameter is whole[name] for name, parameter in stages.named_parameters())
    assert stages.tied == ("model.embed_tokens.weight",)
    assert set(stages.modules()) == {
        "model",
        "model.layers",
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
    }


@pytest.mark.parametrize("ranks", [((0,), (1,)), ((0, 2), (1,)), ((0, 3), (1, 2))], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_output_is_made_on_one_stage(family: str, ranks: tuple[tuple[int, ...], ...]) -> None:
    whole = model_of(family, tied=True)
    expected = watch({name: module for name, module in whole.named_modules() if name})
    logits(whole, input_ids=TOKENS)
    count = sum(map(len, ranks))
    parts = [split(model_of(family, tied=True), own, count) for own in ranks]
    found = [watch(stages.modules()) for stages in parts]
    models = {stage: model for part in parts for stage, model in zip(part.indices, part.models, strict=True)}
    out = logits(models[0], input_ids=TOKENS)
    for stage in range(1, count):
        out = logits(models[stage], inputs_embeds=out)
    names = [name for own in found for name in own]
    assert sorted(names) == sorted(expected)
    for own in found:
        for name, values in own.items():
            assert len(values) == len(expected[name])
            assert all(map(torch.equal, values, expected[name])), name


def watch(modules: Mapping[str, nn.Module]) -> dict[str, list[Tensor]]:
    """Collect the outputs of modules, by name; of several tensors the first."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, output: Any) -> None:
        while not isinstance(output, Tensor):
            output = next(iter(output.values() if isinstance(output, Mapping) else output))
        found.setdefault(name, []).append(output)

    for name, module in modules.items():
        module.register_forward_hook(lambda _module, _args, output, name=name: keep(name, output))
    return found


def test_what_lies_elsewhere_runs_no_hooks() -> None:
    model = cut(model_of("gpt2"), 1, 2)
    found = watch(dict(model.named_modules()))
    logits(model, inputs_embeds=torch.ones(2, 5, 16, dtype=torch.float64))
    assert not {"transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"} & set(found)
    assert {"transformer.h.1", "transformer.ln_f", "lm_head"} < set(found)


@settings(deadline=None)
@given(blocks=st.integers(1, 9), data=st.data())
def test_blocks_are_dealt_out_evenly_and_in_order(blocks: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, blocks + 2))
    parts = [blocks_of_stage(blocks, stage, count) for stage in range(count)]
    assert [block for part in parts for block in part] == list(range(blocks))
    sizes = [len(part) for part in parts]
    held = [size for size in sizes if size]
    assert max(held) - min(held) <= 1
    assert [bool(size) for size in sizes] in (
        [True] * count,
        [True] * blocks + [False],
        [False] + [True] * blocks + [False],
    )


def test_more_stages_than_parts_are_refused() -> None:
    message = (
        "5 pipeline stages (parallel.pp * parallel.pp_stages_per_rank): the model has 4 parts to lay on them "
        "(embedding, 2 blocks, output projection); lower one of them, or use a deeper model"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        split(model_of("qwen3"), (0,), 5)


def test_a_family_whose_forward_is_not_known_is_refused() -> None:
    model = model_of("llama")
    model.config.model_type = "gemma"
    message = (
        "parallel.pp: a gemma model cannot be cut into stages; set parallel.pp=1, or model.family to one of gpt2, "
        "llama, mistral, qwen2, qwen3, qwen3_moe"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        cut(model, 0, 2)
    assert cut(model, 0, 1) is model


@pytest.mark.parametrize(
    ("schedule", "per_rank", "rule"),
    [
        ("gpipe", 2, "has exactly 1 on each rank; set parallel.pp_stages_per_rank=1"),
        ("1f1b", 2, "has exactly 1 on each rank; set parallel.pp_stages_per_rank=1"),
        ("looped_bfs", 1, "has at least 2 on each rank; set parallel.pp_stages_per_rank=2"),
        ("interleaved_1f1b", 1, "has at least 2 on each rank; set parallel.pp_stages_per_rank=2"),
        ("interleaved_zero_bubble", 1, "has at least 2 on each rank; set parallel.pp_stages_per_rank=2"),
        ("zbv_zero_bubble", 3, "has exactly 2 on each rank; set parallel.pp_stages_per_rank=2"),
    ],
)
def test_a_schedule_says_how_many_stages_it_takes(schedule: str, per_rank: int, rule: str) -> None:
    message = (
        f"parallel.pp_stages_per_rank={per_rank}: the schedule {schedule} {rule} "
        "or choose another parallel.pp_schedule"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        ranks_of_stages(schedule, 2, per_rank)


def test_stages_lie_in_turns_or_there_and_back() -> None:
    assert ranks_of_stages("gpipe", 3, 1) == [0, 1, 2]
    assert ranks_of_stages("looped_bfs", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert ranks_of_stages("zbv_zero_bubble", 3, 2) == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("schedule", "count", "rule"),
    [
        ("1f1b", 3, "at least 4, one for each stage"),
        (
            "interleaved_1f1b",
            9,
            "a number of them that its 2 rounds divide (such as a multiple of parallel.pp=4)",
        ),
        (
            "interleaved_zero_bubble",
            9,
            "a number of them that its 2 rounds divide (such as a multiple of parallel.pp=4)",
        ),
    ],
)
def test_a_schedule_says_how_many_microbatches_it_takes(schedule: str, count: int, rule: str) -> None:
    message = (
        f"parallel.pp_schedule={schedule} needs {rule}, and the mini-batch has {count} microbatches on each rank; "
        "change batching.micro_batch_size (of a warm start: warm_start.batch_size), or choose "
        "parallel.pp_schedule=gpipe or looped_bfs"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        require_microbatches(schedule, count, 4, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_split_backward_pass_needs_its_parameters(schedule: str) -> None:
    """See `test_sharded_stages.py` for the failures without it."""
    chosen = [f"parallel.pp_schedule={schedule}", "parallel.pp=2", "parallel.fsdp=2"]
    load_config(overrides=[*chosen, "parallel.reshard_after_forward=false"], environ={})
    if "zero_bubble" not in schedule:
        load_config(overrides=chosen, environ={})
        return
    message = (
        f"parallel.pp_schedule={schedule} computes gradients of weights after those of inputs, and torch loses those "
        "of weights that parallel.fsdp=2 has given back in between; set parallel.reshard_after_forward=false."
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_config(overrides=chosen, environ={})


@settings(deadline=None)
@given(
    schedule=st.sampled_from(["gpipe", "looped_bfs", "zbv_zero_bubble"]),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 7),
)
def test_a_relay_computes_all_once_and_nothing_before_its_input(
    schedule: str, ranks: int, microbatches: int
) -> None:
    places = ranks_of_stages(schedule, ranks, SCHEDULES[schedule].least)
    ticks = timetable(places, microbatches)
    at_tick = {item: tick for tick, items in enumerate(ticks) for item in items}
    assert sum(map(len, ticks)) == len(at_tick) == len(places) * microbatches
    for (stage, micro), tick in at_tick.items():
        assert stage == 0 or at_tick[stage - 1, micro] < tick
    for items in ticks:
        busy = [places[stage] for stage, _ in items]
        assert 0 < len(busy) == len(set(busy))
    assert len(ticks) <= microbatches * SCHEDULES[schedule].least + len(places) - 1
