"""Tracking for other trainers: nothing is lost or shifted, evaluation is real and leaves the training as it was."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import regress.tracking as api
from regress.dump.metrics_file import metrics_of, read_metrics
from regress.engine.tracking import tracking_functions
from regress.engine.tracking.tracker_state import read_sync_state
from regress.errors import RegressError, TaskError
from regress.tracking import (
    EnhancedInferenceCallback,
    WandBSyncManager,
    get_wandb_sync_manager,
    initialize_wandb_sync_manager,
    safe_wandb_log,
    update_step_offset,
)


@pytest.fixture(autouse=True)
def no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_functions, "_manager", None)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.delenv("WANDB_RESUME", raising=False)


def values(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: metrics_of(row) for row in read_metrics(folder / "metrics.jsonl")}


def test_the_functions_of_the_guide_work_together(tmp_path: Path) -> None:
    assert get_wandb_sync_manager() is None
    assert not safe_wandb_log({"loss": 1.0}, 0)
    with pytest.raises(RegressError, match="call initialize_wandb_sync_manager"):
        update_step_offset(3)
    manager = initialize_wandb_sync_manager(
        output_dir=str(tmp_path), project_name="project", run_name="run", trackers=[]
    )
    assert get_wandb_sync_manager() is manager
    assert safe_wandb_log({"loss": 0.5}, 3)
    status = manager.get_sync_status()
    assert (status["step"], status["project"], status["segment"]) == (3, "project", 0)
    saved = json.loads(manager.save_state().read_text())
    assert saved["run_id"] == status["run_id"]
    assert (tmp_path / "wandb_sync_state.json").exists()


def test_a_second_log_of_a_step_is_kept(tmp_path: Path) -> None:
    """After a commit, wandb drops what follows for the same step; curriculum values were lost so."""
    initialize_wandb_sync_manager(tmp_path, trackers=[])
    assert safe_wandb_log({"eval_avg_test_pass_rate": 0.5}, 25, commit=True)
    assert safe_wandb_log({"curriculum/latest_performance": 0.5}, 25, commit=False)
    assert values(tmp_path) == {25: {"eval_avg_test_pass_rate": 0.5, "curriculum/latest_performance": 0.5}}


def test_an_older_step_shifts_nothing_and_hides_what_is_made_again(tmp_path: Path) -> None:
    manager = initialize_wandb_sync_manager(tmp_path, trackers=[])
    for step in range(1, 151):
        safe_wandb_log({"loss": float(step)}, step)
    run_id = manager.get_sync_status()["run_id"]
    assert update_step_offset(101) == 50
    assert max(values(tmp_path)) == 150
    for step in range(101, 201):
        safe_wandb_log({"loss": -float(step)}, step)
    assert values(tmp_path) == {
        step: {"loss": float(step) if step <= 100 else -float(step)} for step in range(1, 201)
    }
    assert update_step_offset(201) == 0
    status = manager.get_sync_status()
    assert (status["run_id"], status["segment"]) == (run_id, 1)


def test_another_process_goes_on_with_the_same_run(tmp_path: Path) -> None:
    """Even if it was killed before it wrote its state a second time."""
    first = initialize_wandb_sync_manager(tmp_path, trackers=[])
    safe_wandb_log({"loss": 1.0}, 1)
    run_id = first.get_sync_status()["run_id"]
    first.save_state()
    safe_wandb_log({"loss": 2.0}, 2)
    second = WandBSyncManager(tmp_path, trackers=[])
    assert second.safe_log({"loss": 3.0}, 3)
    assert second.get_sync_status()["run_id"] == run_id
    assert values(tmp_path) == {1: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 3.0}}
    third = WandBSyncManager(tmp_path, trackers=[], force_new_run=True)
    third.safe_log({"loss": 4.0}, 4)
    assert third.get_sync_status()["run_id"] != run_id


def test_values_that_cannot_be_written_are_one_warning(tmp_path: Path) -> None:
    told: list[str] = []
    manager = WandBSyncManager(tmp_path, trackers=[], warn=told.append)
    assert not manager.safe_log({"loss": [1, 2]}, 1)  # type: ignore[dict-item]
    assert not manager.safe_log({"loss": {}}, 1)  # type: ignore[dict-item]
    assert manager.safe_log({"loss": 1.0}, 1)
    (sentence,) = told
    assert "the metric 'loss' is a list" in sentence


def test_times_differ(tmp_path: Path) -> None:
    manager = WandBSyncManager(tmp_path, trackers=[])
    for step in range(3):
        manager.safe_log({"loss": 1.0}, step)
    times = [row["time"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert times == sorted(set(times))


def test_the_door_names_everything() -> None:
    assert all(getattr(api, name).__doc__ for name in api.__all__)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Dropout()


def event(callback: EnhancedInferenceCallback, name: str, state: TrainerState, **more: Any) -> None:
    getattr(callback, name)(SimpleNamespace(), state, TrainerControl(), model=Model(), **more)


def trained(callback: EnhancedInferenceCallback, steps: int, **more: Any) -> TrainerState:
    """Call a callback as a trainer does in so many steps."""
    state = TrainerState()
    event(callback, "on_train_begin", state, **more)
    for state.global_step in range(1, steps + 1):
        event(callback, "on_step_end", state, **more)
        event(callback, "on_step_end", state, **more)
    return state


def test_an_evaluation_goes_to_the_history_and_to_the_manager(tmp_path: Path) -> None:
    initialize_wandb_sync_manager(tmp_path, trackers=[])
    rates = iter([[0.0, 1.0], [0.5, 1.0]])
    callback = EnhancedInferenceCallback(5, samples=["a", "b"], evaluate=lambda model, samples: next(rates))
    state = trained(callback, 12)
    rows = [row for row in state.log_history if "eval_avg_test_pass_rate" in row]
    assert [(row["step"], row["eval_avg_test_pass_rate"]) for row in rows] == [(5, 0.5), (10, 0.75)]
    assert values(tmp_path)[10]["curriculum/evaluation_count"] == 2.0
    summary = callback.get_evaluation_summary()
    assert (summary["evaluation_count"], summary["best_pass_rate"], summary["last_step"]) == (2, 0.75, 10)
    resumed = TrainerState(log_history=list(state.log_history))
    event(callback, "on_train_begin", resumed)
    assert callback.get_evaluation_summary() == summary


def test_an_evaluation_leaves_generators_and_modes_alone() -> None:
    def evaluate(model: Any, samples: Any) -> list[float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        return [random.random() * 0 + float(torch.rand(1)) * 0 + np.random.rand() * 0 for _ in samples]

    def draws() -> tuple[float, float, float]:
        return random.random(), float(torch.rand(1)), float(np.random.rand())

    callback = EnhancedInferenceCallback(samples=range(20), evaluate=evaluate, max_samples=3)
    model = Model()
    model.inner.eval()
    found = []
    for step in (0, 1):
        random.seed(1), torch.manual_seed(1), np.random.seed(1)
        if step:
            callback.evaluate(model, step)
        found.append(draws())
    assert found[0] == found[1]
    assert (model.training, model.inner.training) == (True, False)


def test_the_samples_of_every_evaluation_are_the_same() -> None:
    seen: list[Any] = []
    callback = EnhancedInferenceCallback(
        1, 4, samples=range(50), evaluate=lambda model, samples: seen.append(samples) or [0.0] * len(samples)
    )
    trained(callback, 3)
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 4


class Words:
    """A tokenizer of which every word is a number."""

    pad_token_id, eos_token_id = None, 0

    def __call__(self, text: str, return_tensors: str) -> Any:
        ids = torch.tensor([[int(word) for word in text.split()]])
        return type("Batch", (dict,), {"to": lambda self, device: self})(input_ids=ids)

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(str(int(value)) for value in ids)


def test_completions_are_generated_and_failures_count_zero() -> None:
    """Half of the samples fail; leaving them out would make the rate 1."""
    model = Model()
    model.device = "cpu"  # type: ignore[assignment]
    model.generate = lambda input_ids, **options: torch.cat([input_ids, input_ids + 1], 1)  # type: ignore[assignment]
    callback = EnhancedInferenceCallback(
        samples=[{"prompt": str(n), "answer": "2"} for n in (1, 1, 5, 5)],
        verify=lambda sample, completion: float(completion == sample["answer"]),
        tokenizer=Words(),
    )
    assert callback.evaluate(model, 1)["eval_avg_test_pass_rate"] == 0.5


def test_no_evaluation_data_is_an_error() -> None:
    callback = EnhancedInferenceCallback(evaluate=lambda model, samples: [])
    with pytest.raises(TaskError, match="has no evaluation data, and makes none up"):
        event(callback, "on_train_begin", TrainerState(), eval_dataloader=None)
    loader = SimpleNamespace(dataset=[1, 2])
    event(callback, "on_train_begin", TrainerState(), eval_dataloader=loader)


@pytest.mark.parametrize("rates", [[], [0.5], [0.5, 1.5], [0.5, float("nan")]])
def test_an_evaluation_that_is_none_is_refused(rates: list[float]) -> None:
    callback = EnhancedInferenceCallback(samples=[1, 2], evaluate=lambda model, samples: rates)
    with pytest.raises(TaskError, match="must return one pass rate from 0 to 1 for each sample"):
        callback.evaluate(Model(), 1)


def test_an_error_of_the_verifier_is_not_swallowed() -> None:
    def evaluate(model: Any, samples: Any) -> list[float]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        EnhancedInferenceCallback(samples=[1], evaluate=evaluate).evaluate(Model(), 1)


def test_there_is_one_way_to_evaluate() -> None:
    with pytest.raises(TaskError, match="leave one of them away"):
        EnhancedInferenceCallback(evaluate=lambda model, samples: [], verify=lambda sample, completion: 0.0)


def test_the_documented_call_judges_by_the_answers_of_the_trainers_data(tmp_path: Path) -> None:
    """A trainer of transformers shows its callbacks no evaluation data before an evaluation of its own."""
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    model.generate = lambda input_ids, **options: torch.cat([input_ids, input_ids + 1], 1)
    callback = EnhancedInferenceCallback(eval_every_n_steps=25, max_samples=8)
    off = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(tmp_path), max_steps=25, **off)
    rows = [{"input_ids": torch.tensor([3, 4]), "labels": torch.tensor([3, 4])}] * 8
    exam = [{"prompt": str(n), "answer": 2} for n in (1, 1, 1, 5)]
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=exam, callbacks=[callback])
    trainer.processing_class = trainer.callback_handler.processing_class = Words()  # type: ignore[assignment]
    trainer.train()
    assert callback.get_evaluation_summary()["latest_pass_rate"] == 0.75
    (row,) = [row for row in trainer.state.log_history if "eval_avg_test_pass_rate" in row]
    assert row["step"] == 25


@pytest.mark.parametrize("sample", [{"prompt": "1"}, {"input_ids": [1]}, "text"])
def test_samples_without_answers_are_named(sample: Any) -> None:
    with pytest.raises(
        TaskError, match=r"compares the completion .* give verify=function\(sample, completion\)"
    ):
        event(EnhancedInferenceCallback(samples=[sample]), "on_train_begin", TrainerState())


def test_messages_are_written_as_the_tokenizer_does() -> None:
    model, words = Model(), Words()
    model.device = "cpu"  # type: ignore[assignment]
    model.generate = lambda input_ids, **options: torch.cat([input_ids, input_ids + 1], 1)  # type: ignore[assignment]
    words.apply_chat_template = lambda messages, **_: messages[-1]["content"]  # type: ignore[attr-defined]
    samples = [{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}]
    callback = EnhancedInferenceCallback(samples=samples, tokenizer=words)
    assert callback.evaluate(model, 1)["eval_avg_test_pass_rate"] == 1.0


def test_the_state_of_a_manager_is_read(tmp_path: Path) -> None:
    manager = WandBSyncManager(tmp_path, trackers=[])
    manager.safe_log({"a": 1.0}, 4)
    manager.finish()
    state = read_sync_state(tmp_path)
    assert state is not None
    assert state["step"] == 4
