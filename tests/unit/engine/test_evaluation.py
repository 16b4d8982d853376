"""Evaluation: from generators of its own, on fixed prompts, and never on invented data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from regress.dump.metrics_file import read_metrics, read_rows, valid_rows
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.evaluation import PASS_RATE, Evaluation, pass_at_k
from regress.engine.run_construction import Run, build
from regress.engine.training_run import train
from regress.errors import ConfigError

MakeConfig = Callable[..., Config]

SAMPLED = (
    "evaluation.every_n_steps=1",
    "evaluation.samples_per_prompt=4",
    "evaluation.pass_at_k=[1,3]",
    "evaluation.max_samples=3",
    "warm_start.steps=12",
    "optimizer.learning_rate=1e-4",
)


@pytest.fixture
def built(config: MakeConfig) -> Iterator[Callable[..., Run]]:
    with ExitStack() as resources:

        def make(*overrides: str) -> Run:
            return build(config(*overrides), resources, lambda name, total: lambda: None)

        yield make


def test_training_is_the_same_to_the_last_bit_with_and_without_it(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    """An evaluation that draws from a shared generator, or leaves the model in another mode, shows here."""
    weights, rewards = [], []
    for name, overrides in (("off", SAMPLED[-2:]), ("on", SAMPLED)):
        train(config(*overrides, f"output_dir={tmp_path / name}"), console)
        weights.append(load_file(tmp_path / name / "final" / "model.safetensors"))
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        rewards.append([row["rollouts/returns_mean"] for row in rows if "rollouts/returns_mean" in row])
    assert rewards[0] == rewards[1]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    rows = [row for row in read_metrics(tmp_path / "on" / "metrics.jsonl") if PASS_RATE in row]
    assert [(row["step"], row["inference/step"], row["eval_samples_evaluated"]) for row in rows] == [
        (0, 0, 3),
        (1, 1, 3),
        (2, 2, 3),
    ]
    _check_table(tmp_path / "on" / "eval_samples.jsonl", rows)


def _check_table(path: Path, rows: list[dict[str, float]]) -> None:
    """Every metric of an evaluation follows from the table's rows of its step."""
    table = valid_rows(read_rows(path))
    prompts = {
        step: [r["prompt"] for r in table if r["step"] == step and r["kind"] == "greedy"]
        for step in (0, 1, 2)
    }
    assert prompts[0] == prompts[1] == prompts[2], "the same prompts each time"
    for row in rows:
        own = [found for found in table if found["step"] == row["step"]]
        greedy = [found for found in own if found["kind"] == "greedy"]
        assert len(own) == 3 + 3 * 4
        assert row[PASS_RATE] == sum(found["correct"] for found in greedy) / 3
        assert row["eval_level/basic/pass_rate"] == row[PASS_RATE]
        lengths = [found["completion_length"] for found in greedy]
        assert row["eval_completion_length_mean"] == sum(lengths) / 3
        assert row["eval_truncated_ratio"] == sum(found["finish_reason"] == "length" for found in greedy) / 3
        groups: dict[str, list[bool]] = {}
        for found in own:
            assert found["correct"] == (found["response"].strip() == found["ground_truth"])
            if found["kind"] == "sampled":
                groups.setdefault(found["group_id"], []).append(found["correct"])
        for k in (1, 3):
            rates = [pass_at_k(4, sum(right), k) for right in groups.values()]
            assert row[f"eval_pass_at_{k}"] == pytest.approx(sum(rates) / 3, abs=1e-12)


@pytest.mark.extended
def test_recorded_evaluations_replay_with_their_samples(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    mock = (
        "rollout_mock.enable=true",
        f"rollout_mock.dump_dir={tmp_path / 'rollouts'}",
        "evaluation.temperature=0.7",
    )
    found = []
    for mode in ("dump", "mock"):
        train(config(*SAMPLED, *mock, f"rollout_mock.mode={mode}", f"output_dir={tmp_path / mode}"), console)
        rows = read_metrics(tmp_path / mode / "metrics.jsonl")
        found.append([{k: v for k, v in row.items() if k.startswith("eval_")} for row in rows])
    assert found[0] == found[1]
    assert sum(len(row) for row in found[0]) > 20
    assert len([*(tmp_path / "rollouts" / "val_samples").iterdir()]) == 3
    with pytest.raises(Exception, match=r"sampled at temperature 0\.7 but evaluation\.temperature is 1\.0"):
        train(config(*SAMPLED, *mock[:2], "rollout_mock.mode=mock", f"output_dir={tmp_path / 'x'}"), console)


@pytest.mark.extended
def test_the_samples_have_a_seed_and_a_temperature_of_their_own(built: Callable[..., Run]) -> None:
    def texts(*overrides: str) -> tuple[list[str | None], list[str | None]]:
        outcome = built(*SAMPLED, *overrides).evaluation.run(0)
        groups = [judged for group in outcome.sampled for judged in group]
        return [j.found.response for j in outcome.greedy], [j.found.response for j in groups]

    greedy, sampled = texts()
    assert texts() == (greedy, sampled)
    other_greedy, other = texts("evaluation.seed=7")
    assert (other_greedy, other != sampled) == (greedy, True)
    cold = texts("evaluation.temperature=1e-4")
    assert cold[0] == greedy
    assert cold[1] == [text for text in greedy for _ in range(4)]


def test_failures_of_every_kind_count_as_0(built: Callable[..., Run]) -> None:
    """Truncated and empty completions stay in the denominator: dropped ones have made bad models look good."""
    outcome = built("evaluation.every_n_steps=1", "warm_start.steps=0").evaluation.run(0)
    assert any(judged.found.finish_reason == "length" for judged in outcome.greedy)
    assert (outcome.pass_rate, len(outcome.greedy)) == (0.0, 4)


def test_no_prompts_are_an_error_and_nothing_is_invented(built: Callable[..., Run]) -> None:
    run = built("evaluation.every_n_steps=0", "task.eval_size=0")
    with pytest.raises(ConfigError, match=r"finds no held-out prompts; set task\.eval_size to at least 1"):
        run.evaluation.run(0)
    with pytest.raises(ConfigError, match=r"finds no prompts while task\.eval_size=0"):
        load_config(overrides=["task.eval_size=0", "evaluation.every_n_steps=5"], environ={})


def test_an_evaluation_that_fails_is_no_warning(
    built: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = built("evaluation.every_n_steps=1")
    with torch.no_grad():
        next(p for _, p in run.trainer.policy.named_parameters()).fill_(math.nan)
    with pytest.raises(Exception, match="nothing can be sampled for group 'eval-0000' run 0 in val step 0"):
        run.evaluation.run(0)


def test_the_table_goes_on_after_a_resume_and_leaves_repeated_steps_out(
    built: Callable[..., Run], tmp_path: Path
) -> None:
    run = built("evaluation.every_n_steps=1")
    path = tmp_path / "table.jsonl"

    def evaluated(steps: range, state: dict[str, int] | None = None) -> dict[str, int]:
        found = Evaluation(run.config, run.trainer.worker, run.prompts.evaluation(), path)
        if state is not None:
            found.load_state_dict(state)
        for step in steps:
            found.write(found.run(step))
        found.close()
        return found.state_dict()

    state = evaluated(range(2))
    evaluated(range(2, 4), state)  # killed after it; the checkpoint is that of `state`
    evaluated(range(2, 3), state)
    steps = [row["step"] for row in valid_rows(read_rows(path))]
    assert steps == [step for step in range(3) for _ in range(4)]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ("evaluation.every_n_steps=1", "evaluation.pass_at_k=[1,9]", "evaluation.samples_per_prompt=4"),
            "evaluation.pass_at_k=[1, 9] needs 9 samples of each prompt, and evaluation.samples_per_prompt is 4; set",
        ),
        (
            ("evaluation.samples_per_prompt=4",),
            "evaluation.samples_per_prompt=4 never samples while evaluation.every_n_steps=0; set",
        ),
        (
            ("evaluation.every_n_steps=1", "evaluation.max_samples=65"),
            "evaluation.max_samples=65 is more than the task.eval_size=64 held-out prompts; set task.eval_size to at",
        ),
    ],
)
def test_contradictions(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides, environ={})
    assert says in str(caught.value)
