"""A run that starts from given weights: a reference of its own, and an optimizer state that is warm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from regress.dump.coordinates import Coordinates
from regress.dump.dump_reader import read
from regress.dump.formats import format_named
from regress.dump.record import Record
from regress.engine.config.config_schema import Config
from regress.engine.config.training_config import OPTIMIZERS
from regress.engine.run_construction import Run, build
from regress.engine.training_run import train
from regress.errors import ConfigError

MakeConfig = Callable[..., Config]
FLOAT64 = "model.dtype=float64"


@pytest.fixture
def built(config: MakeConfig) -> Iterator[Callable[..., Run]]:
    with ExitStack() as resources:

        def make(*overrides: str) -> Run:
            return build(config(*overrides), resources, lambda name, total: lambda: None)

        yield make


@pytest.fixture
def first(config: MakeConfig, console: Console, tmp_path: Path) -> tuple[str, Path]:
    """A finished run of one update: its checkpoint, and the file of its optimizer's state."""
    run = config(
        FLOAT64,
        "max_steps=1",
        f"output_dir={tmp_path / 'first'}",
        "debug.enable_data_dump=true",
        "debug.dump_options.optimizer=true",
    )
    train(run, console)
    (state,) = (Path(run.debug.dump_dir) / "optimizer").iterdir()
    return f"{run.output_dir}/final", state


def changed(path: Path, folder: Path, change: Callable[[Record], None]) -> Path:
    record = read(path)
    change(record)
    out = folder / "changed.safetensors"
    out.write_bytes(b"".join(format_named("safetensors").encode(record)))
    return out


@pytest.mark.parametrize("implementation", OPTIMIZERS)
@pytest.mark.one_in(2)  # that all of them learn the same is seen below
def test_an_update_from_a_recorded_state_is_the_one_that_would_have_followed(
    implementation: str, first: tuple[str, Path], built: Callable[..., Run]
) -> None:
    """By the formula: the moments, the step count in the bias correction, and their pairing with the parameters."""
    checkpoint, state = first
    run = built(
        FLOAT64,
        f"model.path={checkpoint}",
        "warm_start.steps=0",
        f"optimizer.implementation={implementation}",
        f"optimizer.state_path={state}",
    )
    parameters = dict(run.trainer.policy.named_parameters())
    recorded = read(state).tensors
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for name, parameter in parameters.items():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        m, v = (torch.from_numpy(recorded[f"{name}/{key}"].copy()) for key in ("exp_avg", "exp_avg_sq"))
        assert recorded[f"{name}/step"] == 1
        m = 0.9 * m + 0.1 * parameter.grad
        v = 0.999 * v + 0.001 * parameter.grad**2
        move = 1e-3 * (m / (1 - 0.9**2)) / ((v / (1 - 0.999**2)).sqrt() + 1e-8)
        expected[name] = parameter.detach() - move
    run.trainer.optimizer.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-12, atol=1e-15)


def test_the_state_takes_the_precision_of_the_policy_and_leaves_the_settings_alone(
    first: tuple[str, Path], built: Callable[..., Run]
) -> None:
    rates = ("optimizer.learning_rate=0.5", "optimizer.lr_scheduler=linear")
    run = built(f"model.path={first[0]}", "model.dtype=bfloat16", *rates, f"optimizer.state_path={first[1]}")
    optimizer = run.trainer.optimizer
    for state in optimizer.state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert state["step"].dtype == torch.float32
        assert state["step"] == 1
    assert run.trainer.scheduler.get_last_lr() == [0.5]
    run.trainer.step(0)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def drop(record: Record) -> None:
    del record.tensors["lm_head.weight/exp_avg"]


def add(record: Record) -> None:
    record.tensors["lm_head.bias/step"] = np.float32(1).reshape(())


def reshape(record: Record) -> None:
    record.tensors["lm_head.weight/exp_avg"] = record.tensors["lm_head.weight/exp_avg"].T.copy()


def spoil(record: Record) -> None:
    record.tensors["lm_head.weight/exp_avg"].flat[3] = np.nan


def negate(record: Record) -> None:
    record.tensors["lm_head.weight/exp_avg_sq"].flat[3] = -1.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            drop,
            "the file lacks lm_head.weight/exp_avg (1 in all), but it has to hold step, exp_avg, exp_avg_sq",
        ),
        (add, "the file has additional lm_head.bias/step (1 in all)"),
        (reshape, "lm_head.weight/exp_avg has shape [64, 14] and the policy asks for [14, 64]"),
        (spoil, "lm_head.weight/exp_avg holds nan; give a state of finite numbers"),
        (
            negate,
            "lm_head.weight/exp_avg_sq holds -1.0; give a state of finite numbers that are not negative",
        ),
    ],
)
def test_a_state_of_another_policy_is_refused(
    change: Callable[[Record], None],
    sentence: str,
    first: tuple[str, Path],
    built: Callable[..., Run],
    tmp_path: Path,
) -> None:
    record = read(first[1])

    def writable(found: Record) -> None:
        found.tensors = {name: array.copy() for name, array in record.tensors.items()}
        change(found)

    path = changed(first[1], tmp_path, writable)
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        built(FLOAT64, f"model.path={first[0]}", f"optimizer.state_path={path}")
    assert str(caught.value).startswith(f"optimizer.state_path='{path}': ")


def test_a_file_that_is_no_state_is_refused(built: Callable[..., Run], tmp_path: Path) -> None:
    missing = tmp_path / "none.safetensors"
    with pytest.raises(ConfigError, match=r"optimizer\.state_path='.*' does not exist|does not exist"):
        built(f"optimizer.state_path={missing}")
    other = tmp_path / "loss.safetensors"
    record = Record.of("loss", Coordinates(0), {"loss": np.zeros(())})
    other.write_bytes(b"".join(format_named("safetensors").encode(record)))
    with pytest.raises(ConfigError, match="the file holds loss, not the state of an optimizer; give one of"):
        built(f"optimizer.state_path={other}")


@pytest.mark.extended
@pytest.mark.parametrize("implementation", OPTIMIZERS)
def test_every_optimizer_implementation_learns_the_same(
    implementation: str, first: tuple[str, Path], built: Callable[..., Run]
) -> None:
    """Basis of 1e-9: the first steps of AdamW divide by roots of moments near zero; 1e-14 was measured."""
    start = (FLOAT64, f"model.path={first[0]}", f"optimizer.state_path={first[1]}", "warm_start.steps=0")
    runs = [built(*start, f"optimizer.implementation={name}") for name in ("for_loop", implementation)]
    for run in runs:
        run.trainer.step(0)
    group = runs[1].trainer.optimizer.param_groups[0]
    chosen = {name for name in ("foreach", "fused") if group[name]}
    assert chosen == {implementation} & {"foreach", "fused"}
    for (name, ours), (_, theirs) in zip(
        *(run.trainer.policy.named_parameters() for run in runs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)


def test_a_reference_of_its_own_is_read_whole_and_stays(
    first: tuple[str, Path], built: Callable[..., Run]
) -> None:
    run = built(FLOAT64, "algorithm.kl_coef=0.1", f"reference.path={first[0]}")
    saved = load_file(f"{first[0]}/model.safetensors")
    assert run.trainer.reference is not None

    def same() -> bool:
        assert run.trainer.reference is not None
        named = run.trainer.reference.parameters()
        return all(torch.equal(parameter, saved[name]) for name, parameter in named)

    assert same()
    metrics = run.trainer.step(0)
    assert metrics["training_step/kl"] > 1e-6, "the first update already sees a reference that differs"
    assert same()


def test_a_reference_that_cannot_serve_is_refused(
    first: tuple[str, Path], built: Callable[..., Run], tmp_path: Path
) -> None:
    kl = ("algorithm.kl_coef=0.1", f"reference.path={first[0]}")
    with pytest.raises(ConfigError, match=r"reference\.path='.*': there is no such directory"):
        built("algorithm.kl_coef=0.1", f"reference.path={tmp_path / 'none'}")
    with pytest.raises(
        ConfigError, match=r"its parameter model\.\S+ is not that of the policy, which reference"
    ):
        built(*kl, "model.config={num_hidden_layers: 1}", "reference.sync_every_n_steps=1")
    built(*kl, "model.config={num_hidden_layers: 1}")
    with pytest.raises(
        ConfigError, match=r"reference\.path='.*': the model knows 14 tokens and the tokenizer"
    ):
        built(*kl, "task.params={alphabet: abcdefghijklmnopqrstuvwxyz}")
    window = tmp_path / "window"
    train_window = built("model.config={use_sliding_window: true, sliding_window: 48, max_window_layers: 0}")
    train_window.trainer.policy.model.save_pretrained(window)
    longer = ("algorithm.kl_coef=0.1", f"reference.path={window}", "data.max_seq_length=64")
    built(*longer)
    with pytest.raises(ConfigError, match="no sliding window, and that of the reference is 48, shorter than"):
        built(*longer, "model.attn_implementation=varlen")
