"""Compiled transformer blocks: compiled where they should be, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch._dynamo.testing import CompileCounterWithBackend

from regress.dump.dump_reader import DumpReader
from regress.engine import compiled_blocks
from regress.engine.compiled_blocks import CompiledBlocks, blocks_of
from regress.engine.config.config_schema import Config
from regress.engine.config.model_config import ModelConfig
from regress.engine.model_loading import build_model
from regress.engine.run_construction import Run, build
from regress.engine.training_run import train
from regress.errors import ConfigError, RegressError

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Drop the compiled code of earlier tests."""
    torch._dynamo.reset()


@pytest.fixture
def built(config: MakeConfig) -> Iterator[Callable[..., Run]]:
    with ExitStack() as resources:

        def make(*overrides: str) -> Run:
            return build(config(*overrides), resources, lambda name, total: lambda: None)

        yield make


def tiny() -> torch.nn.Module:
    return build_model(ModelConfig(dtype="float64"), seed=0, vocab_size=24, pad_id=0, eos_id=1)


def test_blocks_are_compiled_within_the_context_only_and_never_in_a_copy() -> None:
    model = tiny()
    names = [name for name, _ in model.named_parameters()]
    counter = CompileCounterWithBackend("eager")
    blocks = CompiledBlocks(model, counter)  # type: ignore[arg-type]  # a backend by itself, to be counted
    counter.clear()
    assert list(blocks_of(model)) == ["model.layers.0", "model.layers.1"]
    tokens = torch.tensor([[2, 3, 4]])
    expected = model(input_ids=tokens, use_cache=False).logits
    assert counter.frame_count == 0
    with blocks.active():
        actual = model(input_ids=tokens, use_cache=False).logits
    assert counter.frame_count == 1, "both blocks are of one shape and share their code"
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-15)
    counter.clear()
    bitwise_reference = copy.deepcopy(model)
    for plain in (model, bitwise_reference):
        plain(input_ids=tokens[:, :2], use_cache=False)
    assert counter.frame_count == 0
    assert (
        [name for name, _ in model.named_parameters()]
        == names
        == [n for n, _ in bitwise_reference.named_parameters()]
    )


def test_a_block_that_is_compiled_too_often_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would go on uncompiled: a comparison of compiled and uncompiled would compare nothing."""
    monkeypatch.setattr(compiled_blocks, "LIMIT", 1)
    model = tiny()
    blocks = CompiledBlocks(model, "eager")

    def forward(lengths: tuple[int, ...]) -> None:
        with blocks.active():
            for length in lengths:
                model(input_ids=torch.zeros(1, length, dtype=torch.long), use_cache=False)

    forward((2, 3))  # one compilation for all sizes but 1, which torch compiles apart
    with pytest.raises(
        RegressError, match="a block was compiled 1 times and still meets new shapes; give all"
    ):
        forward((1,))
    model(input_ids=torch.zeros(1, 5, dtype=torch.long))


def test_a_backend_that_cannot_compile_here_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch, built: Callable[..., Run]
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", broken)
    with pytest.raises(
        ConfigError, match=r"model\.compile=inductor cannot compile on this machine \(.*C\+\+ comp"
    ):
        built("model.compile=inductor")


@pytest.mark.extended  # by default, golden replays of compiled blocks say it
def test_a_compiled_run_records_what_an_uncompiled_one_does(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    """The backend `eager` leaves the arithmetic alone, so every bit is the same; sampler and reference included."""
    options = ["trajectory", "forward_data", "is_loss_debug", "loss", "activations", "gradient", "param"]
    readers = []
    for name, backend in (("plain", "null"), ("compiled", "eager")):
        run = config(
            "debug.enable_data_dump=true",
            *(f"debug.dump_options.{option}=true" for option in options),
            "model.dtype=float64",
            f"model.compile={backend}",
            "batching.micro_batch_size=4",
            "batching.log_prob_chunk_size=5",
            "algorithm.kl_coef=0.1",
            "max_steps=1",
            f"output_dir={tmp_path / name}",
        )
        train(run, console)
        readers.append(DumpReader(run.debug.dump_dir))
    assert readers[0].names() == readers[1].names()
    for plain, other in zip(*readers, strict=True):
        assert plain.checksum() == other.checksum(), plain.where


def test_modules_within_a_compiled_block_cannot_be_recorded(
    built: Callable[..., Run], tmp_path: Path
) -> None:
    dump = (
        "debug.enable_data_dump=true",
        "debug.dump_options.activations=true",
        f"debug.dump_dir={tmp_path / 'dump'}",
        r"debug.target_module_pattern='layers\.1\.mlp$'",
    )
    with pytest.raises(
        ConfigError,
        match=r"target_module_pattern names model\.layers\.1\.mlp, which does not run by itself under",
    ):
        built(*dump, "model.compile=eager")
    built(*dump)
