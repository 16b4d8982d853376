"""Samples drawn anew by their rewards count as often as they are drawn, as if their rows were copied."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from regress import explain_dump
from regress.dump.dump_reader import DumpReader
from regress.dump.trajectory import Trajectory, from_record
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.rollout_resampling import drawn_counts
from regress.engine.training_run import train
from regress.errors import ConfigError
from regress.grpo.batch_resampling import PF_PPO_METHODS, resampling_weights
from regress.grpo.loss_aggregation import batch_weights, drawn_weights
from regress.grpo.objective_presets import make_objective

MakeConfig = Callable[..., Config]
EXPLAINED = ("token_gradient", "forward_data", "batch_inputs")


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=2, max_size=6).filter(any),
    aggregation=st.sampled_from(
        ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
    ),
    scope=st.sampled_from(["global", "microbatch"]),
    norm=st.sampled_from(["maximum", "longest"]),
    data=st.data(),
)
def test_weights_are_those_of_copied_rows(
    lengths: list[int], aggregation: str, scope: str, norm: str, data: st.DataObject
) -> None:
    N = len(lengths)
    draws = data.draw(st.lists(st.integers(0, N - 1), min_size=N, max_size=N))
    norm = norm if aggregation == "seq-mean-token-sum-norm" else "maximum"
    completions = [length + data.draw(st.integers(1, 3)) for length in lengths] if norm == "longest" else None
    objective = make_objective(aggregation=aggregation, denominator_scope=scope, norm_rule=norm)
    sequence = torch.arange(N).repeat_interleave(torch.tensor(lengths))
    values = torch.rand(len(sequence), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [list(range(N // 2)), list(range(N // 2, N))]
    found = drawn_weights(
        sequence,
        torch.bincount(torch.tensor(draws), minlength=N),
        objective,
        partition=parts,
        completion_lengths=completions,
        max_completion_length=9,
    )
    rows = sorted(draws)
    copied = torch.cat([values[sequence == row] for row in rows])
    own = torch.arange(N).repeat_interleave(torch.tensor([lengths[row] for row in rows]))
    places = [[place for place, row in enumerate(rows) if row in part] for part in parts]
    weights = batch_weights(
        own,
        N,
        objective,
        partition=places,
        completion_lengths=None if completions is None else [completions[row] for row in rows],
        max_completion_length=9,
    )
    torch.testing.assert_close((found * values).sum(), (weights * copied).sum(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("norm", "completions", "divisor"), [("longest", [4, 9], 4), ("maximum", None, 12)])
def test_what_is_not_drawn_divides_nothing(norm: str, completions: list[int] | None, divisor: int) -> None:
    """The first of two samples is drawn twice: it alone has a weight, and a longest completion."""
    found = drawn_weights(
        torch.tensor([0, 1, 1]),
        torch.tensor([2, 0]),
        make_objective(aggregation="seq-mean-token-sum-norm", norm_rule=norm),
        partition=[[0, 1]],
        completion_lengths=completions,
        max_completion_length=12,
    )
    assert found.tolist() == [pytest.approx(1 / divisor), 0, 0]


def rollout(rewards: list[float]) -> list[Trajectory]:
    return [
        Trajectory("g", run, [1, 2], [0, 1], reward, prompt_length=1) for run, reward in enumerate(rewards)
    ]


def settled(method: str) -> Config:
    return load_config(overrides=[f"trainer.resampling={method}"], environ={}).config


@pytest.mark.parametrize("method", PF_PPO_METHODS)
def test_samples_are_drawn_in_proportion_to_their_weights(method: str) -> None:
    rewards = [0.0, 0.5, 1.0, 1.0, -2.0, 0.25]
    total, config = torch.zeros(len(rewards)), settled(method)
    for seed in range(400):
        config.seed = seed
        found = drawn_counts(rollout(rewards), config)
        assert found is not None
        assert int(found.sum()) == len(rewards)
        total += found
    weights = resampling_weights(torch.tensor(rewards), method)
    torch.testing.assert_close(total / total.sum(), weights / weights.sum(), rtol=0, atol=0.04)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainer.mini_batch_size=8"], "draws from the whole rollout, of which trainer.mini_batch_size=8"),
        (
            ["algorithm.entropy_coef=0.1", "algorithm.entropy_aggregation=token-mean"],
            "counts its tokens once",
        ),
        (
            ["trainer.resampling=max_min", "trainer.resampling_power=3"],
            "trainer.resampling_power=3 is not read",
        ),
        (["algorithm.missing_rewards=exclude"], "draws by rewards, which each sample needs"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_config(overrides=["trainer.resampling=pow", *overrides], environ={})


def test_a_run_and_its_replay_draw_the_same_and_train_on_nothing_else(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    own = (
        "trainer.resampling=pow",
        "trainer.epochs=2",
        "debug.enable_data_dump=true",
        *(
            f"debug.dump_options.{name}=true"
            for name in ("trajectory", "is_loss_debug", "param", "old_log_probs", *EXPLAINED)
        ),
    )
    recorded = config(*own, f"output_dir={tmp_path / 'recorded'}")
    train(recorded, console)
    folder = Path(recorded.debug.dump_dir)
    replay = (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        f"rollout_worker.trajectory_load_path={folder}",
    )
    replayed = config(*own, *replay, f"output_dir={tmp_path / 'replayed'}")
    train(replayed, console)
    first, second = DumpReader(folder), DumpReader(Path(replayed.debug.dump_dir))
    assert first.names() == second.names()
    assert all(first.read(name).checksum() == second.read(name).checksum() for name in first.names())
    samples = from_record(next(one for one in first.records() if one.type == "trajectory" and one.step == 0))
    counts = drawn_counts(samples, recorded)
    assert counts is not None
    assert 0 in counts.tolist()
    tokens = sum(sum(one.loss_mask) for one, count in zip(samples, counts.tolist(), strict=True) if count)
    record = next(one for one in first.records() if one.type == "is_loss_debug" and one.step == 0)
    assert int((torch.from_numpy(record.tensors["advantages"]) != 0).sum()) <= tokens
    explained = explain_dump(folder, step=0, update=0)
    assert explained.departures == ()
    plain = config("trainer.epochs=2", f"output_dir={tmp_path / 'plain'}")
    train(plain, console)
    weights = [load_file(Path(one.output_dir) / "final" / "model.safetensors") for one in (recorded, plain)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
