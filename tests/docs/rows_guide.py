"""Rows of the guide to synchronized tracking, evaluation and curriculum."""

from __future__ import annotations

import filecmp
import json
from typing import Any

from tests.docs.rows_repair import CURRICULUM, copied, trained
from tests.docs.walking import Walk, shows

MANAGER = """\
import os

from regress.tracking import (
    get_wandb_sync_manager,
    initialize_wandb_sync_manager,
    safe_wandb_log,
    update_step_offset,
)

manager = initialize_wandb_sync_manager(output_dir="own", project_name="your-project", run_name="your-run", trackers=[])
assert safe_wandb_log({"loss": 0.5}, 100)
update_step_offset(100)
assert safe_wandb_log({"loss": 0.4}, 100)
print(get_wandb_sync_manager().get_sync_status())
manager.finish()
"""
CALLBACK = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from regress.tracking import EnhancedInferenceCallback

model = AutoModelForCausalLM.from_pretrained("RUN/final")
tokenizer = AutoTokenizer.from_pretrained("RUN/final")
callback = EnhancedInferenceCallback(
    eval_every_n_steps=2,
    max_samples=2,
    samples=[{"prompt": "abc", "answer": "cba"}],
    verify=lambda sample, completion: float(completion.strip() == sample["answer"]),
)
rows = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]}] * 4
arguments = TrainingArguments("hf", max_steps=4, per_device_train_batch_size=1, report_to=[], use_cpu=True)
trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[callback])
trainer.data_collator = lambda batch: {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}
trainer.train()
summary = callback.get_evaluation_summary()
print(summary)
assert any("eval_avg_test_pass_rate" in row for row in trainer.state.log_history)
assert summary["evaluation_count"] == 2 if "evaluation_count" in summary else 2 in summary.values()
"""


@shows("training-guide", "sync manager", "get_sync_status", "safe_wandb_log")
def the_sync_manager_serves_other_loops(walk: Walk) -> None:
    walk.write("manager.py", MANAGER)
    told = walk.run("python", "manager.py").told
    assert "'step': 100" in told
    assert "your-project" in told
    assert [row["loss"] for row in walk.metrics("own")] == [0.4]


@shows("training-guide", "EnhancedInferenceCallback in another trainer")
def the_callback_serves_other_trainers(walk: Walk) -> None:
    trained(walk)
    walk.write("callback.py", CALLBACK)
    walk.run("python", "callback.py")


@shows("training-guide", "a new run or the same run", "trouble 1|a new run", "--force_new_wandb_run")
def a_run_keeps_its_id_unless_it_is_told(walk: Walk) -> None:
    copied(walk, "same")
    before = walk.json("RUN/wandb_sync_state.json")["run_id"]
    on = (
        *CURRICULUM,
        "tracking.trackers=[tensorboard]",
        "trainer.resume_from_checkpoint=latest",
        "max_steps=5",
    )
    walk.train(*on, to="same")
    assert walk.json("same/wandb_sync_state.json")["run_id"] == before
    copied(walk, "new")
    walk.train(*on, "--force_new_wandb_run", to="new")
    assert walk.json("new/wandb_sync_state.json")["run_id"] != before
    copied(walk, "own_id")
    walk.train(*on, "tracking.run_id=chosen01", to="own_id")
    assert walk.json("own_id/wandb_sync_state.json")["run_id"] == "chosen01"


@shows(
    "training-guide",
    "training goes on when a tracker fails",
    "wandb_backup/",
    "wandb_sync_state.json",
    "local record",
)
def a_dead_tracker_stops_nothing(walk: Walk) -> None:
    walk.train("tracking.trackers=[]", to="untracked")
    walk.write("blocked/tensorboard", "a file where the tracker wants its folder")
    done = walk.train("tracking.trackers=[tensorboard]", "tracking.log_dir=blocked/tensorboard", to="tracked")
    assert done.told.count("warning: ") == 1, done.told
    finals = [walk.path(f"{run}/final/model.safetensors") for run in ("untracked", "tracked")]
    assert filecmp.cmp(*finals, shallow=False)
    (first, *_) = sorted(walk.path("tracked/wandb_backup").glob("step_*.json"))
    assert first.name == "step_000000.json"
    assert walk.path("tracked/wandb_sync_state.json").is_file()
    walk.regress("track", "replay", "tracked", "--to", "tensorboard", "--log-dir", "later")
    assert [*walk.path("later").rglob("events.out.tfevents*")]
    assert not [*walk.path("tracked/wandb_backup").glob("step_*.json")] or "whole run" in done.told


@shows(
    "training-guide",
    "eval_avg_test_pass_rate from",
    "evaluation changes no",
    "no evaluation twice",
    "inference/step",
    "_trainer_step",
)
def evaluation_is_real_and_harmless(walk: Walk) -> None:
    walk.train("evaluation.every_n_steps=2", "max_steps=4", to="evaluated")
    walk.train("evaluation.every_n_steps=0", "max_steps=4", to="unevaluated")
    name = "eval_avg_test_pass_rate"
    rates = {row["step"]: row[name] for row in walk.metrics("evaluated") if name in row}
    assert [*rates] == [0, 2, 4]
    rows = [json.loads(line) for line in walk.path("evaluated/eval_samples.jsonl").read_text().splitlines()]
    for step, rate in rates.items():
        mine = [row for row in rows if row["step"] == step]
        assert len(mine) == 6
        assert sum(row["correct"] for row in mine) / 6 == rate
    finals = [walk.path(f"{run}/final/model.safetensors") for run in ("evaluated", "unevaluated")]
    assert filecmp.cmp(*finals, shallow=False)
    assert walk.values("evaluated", "inference/step") == [0, 2, 4]
    assert walk.values("evaluated", "_trainer_step")


@shows("training-guide", "pass@k, levels")
def evaluation_has_pass_at_k(walk: Walk) -> None:
    more = ("evaluation.every_n_steps=2", "evaluation.samples_per_prompt=4", "evaluation.pass_at_k=[1,4]")
    walk.train(*more, to="passes")
    for name in ("eval_pass_at_1", "eval_pass_at_4", "eval_completion_length_mean"):
        walk.values("passes", name)
    assert any(name.startswith("eval_level/") for row in walk.metrics("passes") for name in row)
    assert walk.path("passes/eval_samples.jsonl").is_file()


@shows("training-guide", "simulated evaluation data", "missing evaluation data")
def nothing_is_made_up(walk: Walk) -> None:
    told = walk.train("evaluation.every_n_steps=2", "task.eval_size=0", to="nodata", code=2).told
    assert "task.eval_size" in told


@shows(
    "training-guide",
    *(
        "improved_training_script.py",
        "--output_dir",
        "--eval_every_n_steps",
        "--max_eval_samples",
        "--per_device",
    ),
    *(
        "--wandb_project",
        "--dataset_path",
        "--save_steps",
        "--save_total_limit",
        "--resume_from_checkpoint",
        "--model_name",
    ),
)
def the_commands_of_the_guide(walk: Walk) -> None:
    words = ("abc", "abd", "acd", "bcd", "bca", "dca", "bda", "cab")
    rows: list[dict[str, Any]] = [{"prompt": word, "answer": word[::-1]} for word in words]
    walk.write("data/train_dataset.json", json.dumps(rows))
    walk.write("data/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    import pandas

    pandas.DataFrame(rows).to_parquet(walk.path("data/rows.parquet"))
    trained(walk)
    flags = (
        *("--output_dir", "./enhanced", "--model_name", "RUN/final", "--eval_every_n_steps", 2),
        *(
            "--max_eval_samples",
            4,
            "--per_device_train_batch_size",
            1,
            "--wandb_project",
            "grpo-training-improved",
        ),
        *("--save_steps", 1, "--save_total_limit", 2, "task.eval_size=4", "data.prompts_per_step=2"),
        *("data.group_size=2", "tracking.trackers=[]"),
    )
    for number, file in enumerate(("train_dataset.json", "rows.jsonl", "rows.parquet")):
        out = () if number == 0 else ("--output_dir", f"enhanced{number}")
        told = [flag for flag in flags if not out or flag not in ("--output_dir", "./enhanced")]
        walk.regress("train", *told, *out, "--dataset_path", f"data/{file}", "max_steps=3")
    names = sorted(path.name for path in walk.path("enhanced").glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-3"]
    evaluated = [row for row in walk.metrics("enhanced") if "eval_samples_evaluated" in row]
    assert [row["step"] for row in evaluated] == [0, 2, 3]
    assert {row["eval_samples_evaluated"] for row in evaluated} <= {2, 4}
    config = walk.config(*flags)
    assert config["tracking.project"].startswith("grpo-training-improved")
    assert config["batching.micro_batch_size"].startswith("1")
    on = ("--resume_from_checkpoint", "./enhanced/checkpoint-3", "--dataset_path", "data/train_dataset.json")
    assert "checkpoint-3" in walk.regress("train", *flags, *on, "max_steps=4").told


@shows("training-guide", "--enable_curriculum", "curriculum/latest_performance")
def the_curriculum_is_switched(walk: Walk) -> None:
    trained(walk)
    assert walk.values("RUN", "curriculum/evaluation_count") == [1, 2, 3]
    walk.values("RUN", "curriculum/latest_performance")
    for words, value in (
        (("--enable_curriculum", "--eval_every_n_steps", 25), "true"),
        (("--enable_curriculum", "false"), "false"),
    ):
        assert walk.config(*words)["curriculum.enable"].lower().startswith(value)
    walk.train(*CURRICULUM[1:], "--enable_curriculum", "false", to="without")
    assert not any(name.startswith("curriculum/") for row in walk.metrics("without") for name in row)


SIZES = "hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 16"
WIDER = f"model.config={{{SIZES}}}"
STAGES = """\
defaults: [reverse_string, _self_]
task: {params: {alphabet: ab}}
evaluation: {every_n_steps: 1}
curriculum:
  enable: true
  min_evaluations: 1
  full_pass: false
  stages:
    - {name: short, levels: [basic], threshold: 0.99}
    - {name: long, levels: [intermediate], threshold: 0.99}
"""


@shows("training-guide", "a curriculum that advances")
def the_curriculum_advances(walk: Walk) -> None:
    walk.write("stages.yaml", STAGES)
    more = ("--config-path", "stages.yaml", "task.train_size=24", "task.eval_size=24", WIDER)
    walk.train(*more, "warm_start.steps=80", "warm_start.batch_size=24", to="kept")
    assert {*walk.values("kept", "curriculum/current_stage")} == {0}
    lower = {"CURRICULUM_PERFORMANCE_THRESHOLD_1": "0.01"}
    told = walk.train(*more, "warm_start.steps=80", "warm_start.batch_size=24", to="lowered", **lower).told
    assert max(walk.values("lowered", "curriculum/current_stage")) == 1, walk.values(
        "lowered", "eval_avg_test_pass_rate"
    )
    assert "curriculum goes from stage short (round 1) to long" in told
    assert "of 0.010" in told
    named = ("--config-name", "reverse_string_curriculum")
    found = walk.config(*named, CURRICULUM_PERFORMANCE_THRESHOLD_1="0.6")
    assert found["curriculum.thresholds.short"].startswith("0.6  # environment")


@shows("training-guide", "test_wandb_sync.py")
def trackers_have_tests_of_their_own(walk: Walk) -> None:
    from tests.docs.walking import ROOT

    assert "[testenv:trackers]" in (ROOT / "tox.ini").read_text()
