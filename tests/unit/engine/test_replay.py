"""A recorded run, replayed in mock mode, gives the same bits; and recording changes none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file

from regress.dump.dump_reader import DumpReader
from regress.engine.config.config_schema import Config
from regress.engine.config.rollout_config import DumpOptions
from regress.engine.training_run import train
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.grpo.objective_presets import PRESETS, make_objective

ALL = [f"debug.dump_options.{name}=true" for name in vars(DumpOptions())]
MODELS = ["qwen3_moe", "gpt2", "llama", "qwen3"]

MakeConfig = Callable[..., Config]


def record_and_replay(config: MakeConfig, console: Console, root: Path, *overrides: str) -> None:
    common = ("max_steps=2", "data.group_size=3", *overrides)
    dumping = ("debug.enable_data_dump=true", *ALL)
    recorded = config(*common, *dumping, f"output_dir={root / 'recorded'}")
    train(recorded, console)
    replay = (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        f"rollout_worker.trajectory_load_path={recorded.debug.dump_dir}",
    )
    replayed = config(*common, *dumping, *replay, f"output_dir={root / 'replayed'}")
    train(replayed, console)
    assert_same_records(Path(recorded.debug.dump_dir), Path(replayed.debug.dump_dir))
    train(config(*common, f"output_dir={root / 'silent'}"), console)
    weights = [
        load_file(root / name / "final" / "model.safetensors") for name in ("recorded", "replayed", "silent")
    ]
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        for name, tensor in weights[0].items():
            assert tensor.equal(other[name]), f"{name} differs with dumping off or in mock mode"


def assert_same_records(first: Path, second: Path) -> None:
    ours, theirs = DumpReader(first), DumpReader(second)
    assert ours.names() == theirs.names()
    types = {record.type for record in ours.records()}
    assert {"trajectory", "old_log_probs", "forward_data", "loss", "gradient", "param", "optimizer"} <= types
    for name in ours.names():
        assert ours.read(name).checksum() == theirs.read(name).checksum(), f"{name} differs"


@pytest.mark.one_in(4)  # other tests replay qwen3
@pytest.mark.parametrize("family", MODELS)
def test_every_model_family(family: str, config: MakeConfig, console: Console, tmp_path: Path) -> None:
    record_and_replay(config, console, tmp_path, f"model.family={family}", "algorithm.preset=grpo")


def test_tied_embeddings(config: MakeConfig, console: Console, tmp_path: Path) -> None:
    record_and_replay(config, console, tmp_path, "model.tie_word_embeddings=true")


@pytest.mark.one_in(28)
@pytest.mark.parametrize(
    "preset",
    [name for name in sorted(PRESETS) if not ADVANTAGES[make_objective(name).advantage].needs],
)
def test_every_preset(preset: str, config: MakeConfig, console: Console, tmp_path: Path) -> None:
    record_and_replay(config, console, tmp_path, f"algorithm.preset={preset}", "trainer.epochs=2")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_mini_batches_epochs_and_microbatches(
    layout: str, config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    record_and_replay(
        config,
        console,
        tmp_path,
        f"batching.layout={layout}",
        "trainer.epochs=2",
        "trainer.mini_batch_size=3",
        "batching.micro_batch_size=2",
        "model.attn_implementation=varlen",
        "rollout_worker.temperature=0.7",
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize("format", ["pt", "jsonl", "safetensors"])
def test_every_format_replays(format: str, config: MakeConfig, console: Console, tmp_path: Path) -> None:
    record_and_replay(config, console, tmp_path, f"debug.dump_format={format}")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions(dtype: str, config: MakeConfig, console: Console, tmp_path: Path) -> None:
    record_and_replay(config, console, tmp_path, f"model.dtype={dtype}")


def test_rollout_mock_records_and_replays_training_and_evaluation(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    dump_dir = tmp_path / "rollouts"
    common = ("rollout_mock.enable=true", f"rollout_mock.dump_dir={dump_dir}", "evaluation.every_n_steps=1")
    first = train(config(*common, "rollout_mock.mode=dump", f"output_dir={tmp_path / 'a'}"), console)
    files = sorted(path.relative_to(dump_dir).as_posix() for path in dump_dir.glob("*/*"))
    assert files == [
        *(f"train/step_{step:06d}.safetensors" for step in range(2)),
        *(f"val/step_{step:06d}.safetensors" for step in range(3)),
    ]
    second = train(config(*common, "rollout_mock.mode=mock", f"output_dir={tmp_path / 'b'}"), console)
    assert second.metrics == first.metrics
    assert second.pass_rates == first.pass_rates


def test_the_ratio_of_the_first_update_is_exactly_one(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    run = config("debug.enable_data_dump=true", *ALL, "trainer.epochs=2", "algorithm.preset=dapo")
    train(run, console)
    for record in DumpReader(run.debug.dump_dir).records("is_loss_debug"):
        valid = record.tensors["effective_valid"].astype(bool)
        ratio = record.tensors["prob_ratio"][valid]
        if record.update == 0:
            assert (ratio == 1.0).all()
        else:
            assert (ratio != 1.0).any(), "the second epoch is off-policy, or nothing was updated"


def test_shares_of_the_loss_add_up_to_its_definition(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    """A denominator taken per microbatch would break this: microbatches hold unequal numbers of tokens."""
    run = config(
        "debug.enable_data_dump=true",
        *ALL,
        "batching.micro_batch_size=3",
        "trainer.epochs=2",
        "model.dtype=float64",
    )
    train(run, console)
    reader = DumpReader(run.debug.dump_dir)
    for update in (0, 1):
        terms = [r for r in reader.records("is_loss_debug", 0) if r.update == update]
        shares = [r for r in reader.records("loss", 0) if r.update == update]
        valid = [r.tensors["effective_valid"].astype(bool) for r in terms]
        losses = np.concatenate([r.tensors["elementwise_loss"][m] for r, m in zip(terms, valid, strict=True)])
        assert len(terms) == 3
        np.testing.assert_allclose(
            sum(float(r.tensors["loss"]) for r in shares), losses.mean(), rtol=1e-12, atol=1e-15
        )


def test_every_share_of_the_loss_is_the_weighted_sum_of_its_own_tokens(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    run = config(
        "debug.enable_data_dump=true",
        *ALL,
        "batching.layout=packed",
        "batching.micro_batch_size=3",
        "batching.row_order=reversed",
        "trainer.epochs=2",
        "model.dtype=float64",
        "algorithm.kl_coef=0.1",
        "algorithm.entropy_coef=0.01",
    )
    train(run, console)
    reader = DumpReader(run.debug.dump_dir)
    parts = {
        "loss": "elementwise_loss",
        "pg_loss": "policy_loss",
        "kl_loss": "kl",
        "entropy_loss": "entropy_loss",
    }
    scales = dict.fromkeys(parts, 0.0)
    for terms, shares in zip(reader.records("is_loss_debug"), reader.records("loss"), strict=True):
        assert terms.where == shares.where
        for share, term in parts.items():
            weighted = terms.tensors["weights"] * terms.tensors[term]
            scale = np.abs(weighted).sum()
            scales[share] += scale
            assert abs(weighted.sum() - float(shares.tensors[share])) <= 1e-12 * scale, (shares.where, share)
        tensors = terms.tensors
        np.testing.assert_allclose(
            tensors["elementwise_loss"],
            tensors["policy_loss"] + 0.1 * tensors["kl"] - 0.01 * tensors["entropy_loss"],
            rtol=1e-12,
            atol=1e-14,
        )
    assert all(scale > 0 for scale in scales.values()), "a term that is zero everywhere shows nothing"
