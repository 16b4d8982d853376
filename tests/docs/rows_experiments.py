"""Rows of the document on logging across six experiments."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.docs.rows_repair import trained
from tests.docs.walking import Walk, shows

TINY = (
    "model.config={hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 16}",
    *(
        "warm_start.steps=4",
        "task.train_size=32",
        "task.eval_size=4",
        "data.prompts_per_step=4",
        "max_steps=3",
    ),
    *(
        "data.group_size=4",
        "trainer.mini_batch_size=8",
        "optimizer.warmup_steps=0",
        "evaluation.every_n_steps=2",
    ),
)
PROJECTS = {
    "experiment_base": "tiny_grpo",
    "experiment_drgrpo": "drgrpo_experiment",
    "experiment_accelerate": "accelerate_grpo",
    "experiment_accelerate_ddp": "grpo_accelerate_ddp",
    "experiment_multiturn_qa": "tiny_grpo_multiturn_qa",
    "experiment_multiturn_tool_calling": "tiny_grpo_multiturn_tool_calling",
}


def experiment(walk: Walk, name: str, *more: str) -> str:
    """The output directory of a small run of an experiment."""
    walk.regress("train", "--config-name", name, *TINY, f"output_dir={name}", *more)
    return name


@shows(
    "experiments",
    *(
        f"rollouts|{text}"
        for text in ("rollouts/returns_sum", "rollouts/kl", "rollouts/adv", "rollouts/total")
    ),
)
def rollouts_are_logged(walk: Walk) -> None:
    run = experiment(walk, "experiment_base")
    names = (
        *("returns_sum", "returns_mean", "returns_std", "returns_max", "returns_min", "returns_best_mean"),
        *("kl_mean", "kl_std", "kl_max", "advantages_mean", "advantages_std", "total_rollouts", "batch_step"),
    )
    for name in names:
        assert len(walk.values(run, f"rollouts/{name}")) == 3, name
    assert walk.values(run, "rollouts/total_rollouts") == [16, 32, 48]


@shows("experiments", "training_step/loss", "training_epoch/", "system/replay", "final/total_steps")
def updates_are_logged(walk: Walk) -> None:
    run = experiment(walk, "experiment_base")
    for name in ("loss", "kl", "grad_norm", "learning_rate"):
        assert len(walk.values(run, f"training_step/{name}")) == 6, name
    for name in ("loss_mean", "loss_std", "kl_mean", "kl_std", "grad_norm_mean", "grad_norm_max"):
        assert len(walk.values(run, f"training_epoch/{name}")) == 3, name
    assert walk.values(run, "system/replay_buffer_size")[0] == 16
    for name in ("total_steps", "total_batches", "total_rollouts", "best_mean_return"):
        assert len(walk.values(run, f"final/{name}")) == 1, name


@shows("experiments", "system/gpu_memory")
def memory_of_a_device_is_that_of_a_device(walk: Walk) -> None:
    import torch

    run = experiment(walk, "experiment_base")
    found = any(name.startswith("system/gpu_") for row in walk.metrics(run) for name in row)
    assert found == torch.cuda.is_available() or not found


@shows("experiments", "checkpoint/saved", "--checkpoint-interval")
def checkpoints_are_logged(walk: Walk) -> None:
    walk.train("--checkpoint-interval", "2", "max_steps=4", "--no-wandb", to="intervals")
    assert walk.values("intervals", "checkpoint/saved") == [1, 1]
    assert walk.values("intervals", "checkpoint/step") == [2, 4]


@shows("experiments", "dr_grpo/advantages", "training_step/dr_component", "experiments|DR-GRPO")
def dr_grpo_logs_its_parts(walk: Walk) -> None:
    run = experiment(walk, "experiment_drgrpo")
    for name in ("advantages_variance", "advantages_skewness", "critic_type"):
        walk.values(run, f"dr_grpo/{name}")
    parts = {
        name for row in walk.metrics(run) for name in row if name.startswith("training_step/dr_component_")
    }
    assert len(parts) >= 2, parts


@shows("experiments", "accelerate/device", "experiments|Accelerate")
def accelerate_logs_its_state(walk: Walk) -> None:
    run = experiment(walk, "experiment_accelerate")
    assert {*walk.values(run, "accelerate/device")} == {"cpu"}
    assert {*walk.values(run, "accelerate/sync_gradients")} <= {0, 1}


@shows("experiments", "ddp/num_processes", "Accelerate DDP")
def several_processes_log_theirs(walk: Walk) -> None:
    experiment(walk, "experiment_accelerate_ddp")
    launcher = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
    port = (
        "--main_process_port",
        "0",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    )
    run = ("-m", "regress", "train", "--config-name", "experiment_accelerate_ddp", *TINY, "output_dir=ddp")
    walk.run(*launcher, *port, *run)
    assert {*walk.values("ddp", "ddp/num_processes")} == {2}
    for name in ("process_index", "local_process_index", "sync_gradients"):
        walk.values("ddp", f"ddp/{name}")


@shows("experiments", "batch_returns/", "examples/completion", "multi-turn QA", "multi-turn tool calling")
def conversations_are_logged(walk: Walk) -> None:
    for name in ("experiment_multiturn_tool_calling", "experiment_multiturn_qa"):
        run = experiment(walk, name)
        assert any(key.startswith("batch_returns/") for row in walk.metrics(run) for key in row)
        assert all(isinstance(text, str) and text for text in walk.values(run, "examples/completion"))
        assert walk.values(run, "training/invalid_loss_count") == [0, 0, 0]


@shows("experiments", "training/invalid_loss_count")
def losses_that_are_not_finite_are_counted(walk: Walk) -> None:
    """A learning rate that ruins the weights in the first update."""
    ruin = (
        "optimizer.learning_rate=1e20",
        "task.rewards={character_match: 1.0}",
        "optimizer.max_grad_norm=null",
        "trainer.mini_batch_size=8",
    )
    stopped = walk.train(*ruin, "--no-wandb", to="ruined", code=2)
    assert "nan" in stopped.errors or "finite" in stopped.errors
    walk.train(*ruin, "--no-wandb", "trainer.on_nonfinite=skip", to="skipped")
    assert sum(walk.values("skipped", "training/invalid_loss_count")) > 0


@shows("experiments", "base GRPO", "wandb project of each", "one naming scheme")
def every_experiment_has_its_project(walk: Walk) -> None:
    for name, project in PROJECTS.items():
        assert walk.config("--config-name", name)["tracking.project"].split()[0] == project
    rows = [
        {key for row in walk.metrics(experiment(walk, name)) for key in row if key.startswith("rollouts/")}
        for name in PROJECTS
    ]
    assert all(found == rows[0] for found in rows)


@shows(
    "experiments",
    *(
        "--wandb, --no-wandb",
        "--wandb-project",
        "--run-name",
        "--log-dir",
        "--lr",
        "--group-size",
        "--rollouts-per",
    ),
    *("--train-batch-size", "--temperature", "--max-length", "--seed", "--max-prompts", "--model-name"),
)
def flags_are_keys(walk: Walk) -> None:
    trained(walk)
    flags = {
        "--no-wandb": ("", "tracking.trackers", "[]"),
        "--wandb": ("", "tracking.trackers", "[wandb]"),
        "--wandb-project": ("mine", "tracking.project", "mine"),
        "--run-name": ("first", "tracking.run_name", "first"),
        "--log-dir": ("logs", "tracking.log_dir", "logs"),
        "--model-name": ("RUN/final", "model.path", "RUN/final"),
        "--lr": ("5e-6", "optimizer.learning_rate", "5.0e-06"),
        "--group-size": ("4", "data.group_size", "4"),
        "--rollouts-per-step": ("4", "data.prompts_per_step", "4"),
        "--train-batch-size": ("4", "trainer.mini_batch_size", "4"),
        "--temperature": ("0.7", "rollout_worker.temperature", "0.7"),
        "--max-length": ("512", "data.max_seq_length", "512"),
        "--seed": ("42", "seed", "42"),
        "--max-prompts": ("1024", "task.train_size", "1024"),
    }
    for flag, (text, key, value) in flags.items():
        found = walk.config(flag, *([text] if text else []))
        assert found[key].split("  #")[0].strip() == value, (flag, found[key])
        assert "#" in found[key]
        assert "default" not in found[key].partition("#")[2], flag
    few = (
        "--group-size",
        2,
        "--rollouts-per-step",
        2,
        "--train-batch-size",
        2,
        "--lr",
        "5e-6",
        "--temperature",
        0.7,
    )
    more = ("--no-wandb", "--run-name", "first", "--model-name", "RUN/final", "max_steps=2")
    walk.train(*few, *more, to="flagged", small=False)
    assert walk.values("flagged", "rollouts/total_rollouts") == [4, 8]
    assert len(walk.values("flagged", "training_step/loss")) == 4


@shows("experiments", "wandb as tracker", "TensorBoard when wandb", "WANDB_MODE=offline")
def trackers_are_chosen(walk: Walk) -> None:
    home = {"HOME": str(walk.folder), "NETRC": str(walk.path("nowhere"))}
    walk.train(
        "--wandb", "--wandb-project", "mine", to="offline", WANDB_MODE="offline", WANDB_DIR="wandbs", **home
    )
    assert [*walk.path("wandbs").rglob("run-*.wandb")]
    walk.train("tracking.trackers=null", to="fallback", **home)
    assert [*walk.path("fallback").rglob("events.out.tfevents*")]
    project = walk.config("--config-name", "experiment_base", WANDB_PROJECT="my_default_project")
    assert project["tracking.project"].startswith("my_default_project")


@shows("experiments", "report of a run with curves")
def a_run_has_a_page(walk: Walk) -> None:
    experiment(walk, "experiment_base")
    told = walk.regress("report", "experiment_base").output
    (page,) = [Path(word) for word in told.split() if word.endswith(".html")]
    assert "rollouts/returns_mean" in (walk.folder / page).read_text()
