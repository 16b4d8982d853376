"""Names of all metrics of a run: definition, unit and moment of logging, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from regress.grpo.update_metrics import TOKEN_METRICS

UPDATE = "each optimizer update"
STEP = "end of each rollout step"
EVALUATION = "each evaluation"
CHECKPOINT = "each checkpoint, once it is complete"
END = "end of the run"


@dataclass(frozen=True)
class Metric:
    """Metric of a run; ``*`` in its name stands for a part that the definition explains.

    Attributes:
        moment: when it is logged, at which its row's ``step`` and ``update`` are.
        needs: kind of run that logs it; empty: all.
    """

    name: str
    unit: str
    moment: str
    definition: str
    needs: str = ""


_REFERENCE = "a reference model"
_DR = "Dr. GRPO"
_TURNS = "several turns"
_DYNAMIC = "data.filter_groups"
_STD = "standard deviation (divided by N - 1; 0 for one value)"
_K3 = "k3 = exp(d) - 1 - d, d = log p_ref - log p"

METRICS = (
    Metric(
        "rollouts/returns_sum",
        "reward",
        STEP,
        "sum of the rewards of all samples of the rollout, of all ranks",
    ),
    Metric("rollouts/returns_mean", "reward", STEP, "mean reward of the samples"),
    Metric("rollouts/returns_std", "reward", STEP, f"{_STD} of the samples' rewards"),
    Metric("rollouts/returns_max", "reward", STEP, "greatest reward of a sample"),
    Metric("rollouts/returns_min", "reward", STEP, "least reward of a sample"),
    Metric(
        "rollouts/returns_best_mean",
        "reward",
        STEP,
        "greatest rollouts/returns_mean of the run so far, this step included; continued by a resume",
    ),
    Metric(
        "rollouts/kl_mean",
        "nats",
        STEP,
        f"mean over all loss tokens of {_K3}, with log p of the policy before the step's first update",
        _REFERENCE,
    ),
    Metric("rollouts/kl_std", "nats", STEP, f"{_STD} of the same values", _REFERENCE),
    Metric("rollouts/kl_max", "nats", STEP, "greatest of the same values", _REFERENCE),
    Metric(
        "rollouts/advantages_mean",
        "1",
        STEP,
        "mean over samples of the sample's advantage, itself the mean over its loss tokens",
    ),
    Metric("rollouts/advantages_std", "1", STEP, f"{_STD} of the samples' advantages"),
    Metric(
        "rollouts/total_rollouts",
        "samples",
        STEP,
        "samples of the run so far, of all ranks; continued by a resume",
    ),
    Metric("rollouts/batch_step", "steps", STEP, "rollout batches of the run so far, this one included"),
    Metric("rollouts/completion_length_mean", "tokens", STEP, "mean number of tokens after the prompt"),
    Metric("rollouts/truncated_ratio", "share", STEP, "samples that ended at the length limit"),
    Metric(
        "rollouts/generation_batches",
        "batches",
        STEP,
        "batches of prompts that were sampled until enough groups had rewards that differ",
        _DYNAMIC,
    ),
    Metric(
        "rollouts/constant_groups",
        "groups",
        STEP,
        "groups left out because their rewards are equal",
        _DYNAMIC,
    ),
    Metric("training_step/loss", "1", UPDATE, "loss of the whole mini-batch, of all ranks and microbatches"),
    Metric("training_step/grad_norm", "1", UPDATE, "2-norm of the whole gradient before it is clipped"),
    Metric("training_step/learning_rate", "1", UPDATE, "learning rate of this update"),
    *(
        Metric(f"training_step/{name}", entry.unit, UPDATE, entry.definition, entry.needs)
        for name, entry in TOKEN_METRICS.items()
    ),
    Metric(
        "training_step/dr_component_*",
        "1",
        UPDATE,
        "share of a term in training_step/loss: policy, kl and entropy, coefficients included; they add up to it",
        _DR,
    ),
    Metric(
        "training_epoch/loss_mean",
        "1",
        STEP,
        "mean of training_step/loss over the step's updates, all epochs",
    ),
    Metric("training_epoch/loss_std", "1", STEP, f"{_STD} of the same values"),
    Metric(
        "training_epoch/kl_mean", "nats", STEP, "mean of training_step/kl over the step's updates", _REFERENCE
    ),
    Metric("training_epoch/kl_std", "nats", STEP, f"{_STD} of the same values", _REFERENCE),
    Metric(
        "training_epoch/grad_norm_mean", "1", STEP, "mean of training_step/grad_norm over the step's updates"
    ),
    Metric(
        "training_epoch/grad_norm_max", "1", STEP, "greatest training_step/grad_norm of the step's updates"
    ),
    Metric(
        "training_epoch/steps_per_epoch",
        "updates",
        STEP,
        "optimizer updates of the step, in all its epochs, those left out included",
    ),
    Metric(
        "training/invalid_loss_count",
        "updates",
        STEP,
        "updates of the step that were left out because loss or gradient was not finite",
    ),
    Metric("system/replay_buffer_size", "samples", STEP, "samples that the step's updates were drawn from"),
    Metric(
        "system/gpu_memory_allocated_gb",
        "GiB (2**30 bytes)",
        STEP,
        "memory that tensors take on the device, of the rank that uses most",
        "CUDA",
    ),
    Metric(
        "system/gpu_memory_reserved_gb",
        "GiB (2**30 bytes)",
        STEP,
        "memory that torch's allocator holds on the device, of the rank that holds most",
        "CUDA",
    ),
    Metric("checkpoint/saved", "1", CHECKPOINT, "1: a checkpoint was written and verified", "checkpoints"),
    Metric("checkpoint/step", "steps", CHECKPOINT, "completed rollout steps in it", "checkpoints"),
    Metric("final/total_steps", "updates", END, "optimizer updates of the run"),
    Metric("final/total_batches", "steps", END, "rollout batches of the run"),
    Metric("final/total_rollouts", "samples", END, "samples of the run, of all ranks"),
    Metric("final/best_mean_return", "reward", END, "greatest rollouts/returns_mean of the run"),
    Metric(
        "dr_grpo/advantages_variance",
        "1",
        STEP,
        "variance (divided by N - 1) of the samples' advantages",
        _DR,
    ),
    Metric(
        "dr_grpo/advantages_skewness",
        "1",
        STEP,
        "skewness of the samples' advantages: third central moment over the second to the power 1.5 (both divided by "
        "N); 0 where all are equal",
        _DR,
    ),
    Metric("dr_grpo/critic_type", "text", STEP, "what stands in for a critic", _DR),
    Metric("accelerate/device", "text", STEP, "device of the main rank", "parallel.data_parallel=accelerate"),
    Metric(
        "accelerate/sync_gradients",
        "1",
        STEP,
        "1: gradients were summed over processes before each update (microbatches before the last are not)",
        "parallel.data_parallel=accelerate",
    ),
    Metric("ddp/num_processes", "processes", STEP, "ranks of the run", "DDP"),
    Metric("ddp/process_index", "1", STEP, "rank that writes the row: 0", "DDP"),
    Metric("ddp/local_process_index", "1", STEP, "its number on its machine (LOCAL_RANK)", "DDP"),
    Metric("ddp/sync_gradients", "1", STEP, "as accelerate/sync_gradients", "DDP"),
    Metric("batch_returns/mean", "reward", STEP, "as rollouts/returns_mean", _TURNS),
    Metric("batch_returns/max", "reward", STEP, "as rollouts/returns_max", _TURNS),
    Metric("batch_returns/best_mean", "reward", STEP, "as rollouts/returns_best_mean", _TURNS),
    Metric(
        "examples/completion", "text", STEP, "completion of the first sample, at every tenth step", _TURNS
    ),
    Metric(
        "eval_avg_test_pass_rate",
        "share",
        EVALUATION,
        "mean over all evaluated samples of the greedy completion's pass rate; a failure counts 0",
        "evaluation",
    ),
    Metric("eval_samples_evaluated", "samples", EVALUATION, "samples of the evaluation", "evaluation"),
    Metric("eval_reward_mean", "reward", EVALUATION, "mean reward of the greedy completions", "evaluation"),
    Metric(
        "eval_completion_length_mean", "tokens", EVALUATION, "mean length of the completions", "evaluation"
    ),
    Metric(
        "eval_completion_length_max", "tokens", EVALUATION, "length of the longest completion", "evaluation"
    ),
    Metric(
        "eval_truncated_ratio",
        "share",
        EVALUATION,
        "completions that ended at the length limit",
        "evaluation",
    ),
    Metric(
        "eval_level/*/pass_rate",
        "share",
        EVALUATION,
        "eval_avg_test_pass_rate of the samples of one level",
        "evaluation",
    ),
    Metric("eval_level/*/samples", "samples", EVALUATION, "samples of one level", "evaluation"),
    Metric(
        "eval_pass_at_*",
        "share",
        EVALUATION,
        "mean over prompts of the unbiased estimate of pass@k from the sampled completions, arXiv 2107.03374",
        "evaluation.samples_per_prompt",
    ),
    Metric(
        "eval_level/*/pass_at_*",
        "share",
        EVALUATION,
        "the same for the prompts of one level",
        "evaluation.samples_per_prompt",
    ),
    *(
        Metric(
            f"eval_{name}_pass_rate",
            "share",
            EVALUATION,
            f"{text} pass rate of a sample",
            "EnhancedInferenceCallback",
        )
        for name, text in (("max", "greatest"), ("min", "least"), ("std", f"{_STD} of the"))
    ),
    Metric(
        "inference/step", "steps", EVALUATION, "rollout steps completed before the evaluation", "evaluation"
    ),
    Metric(
        "_trainer_step",
        "updates",
        EVALUATION,
        "optimizer updates completed before the evaluation",
        "evaluation",
    ),
    Metric(
        "curriculum/latest_performance",
        "share",
        EVALUATION,
        "eval_avg_test_pass_rate that the curriculum was told last",
        "a curriculum",
    ),
    Metric(
        "curriculum/evaluation_count",
        "evaluations",
        EVALUATION,
        "evaluations of the run so far",
        "a curriculum",
    ),
    Metric(
        "curriculum/mean_performance",
        "share",
        EVALUATION,
        "performance that is compared with the threshold",
        "a curriculum",
    ),
    Metric(
        "curriculum/stage_evaluations",
        "evaluations",
        EVALUATION,
        "evaluations in the stage so far",
        "a curriculum",
    ),
    Metric("curriculum/current_stage", "1", EVALUATION, "number of the stage, from 0", "a curriculum"),
    Metric("curriculum/stage_name", "text", EVALUATION, "name of the stage", "a curriculum"),
    Metric("curriculum/stage_count", "stages", EVALUATION, "stages of the curriculum", "a curriculum"),
    Metric("curriculum/round", "1", EVALUATION, "round of the curriculum, from 1", "a curriculum"),
    Metric(
        "curriculum/threshold",
        "share",
        EVALUATION,
        "performance at which the stage is left, in this round",
        "a curriculum",
    ),
    Metric(
        "curriculum/current_step",
        "steps",
        EVALUATION,
        "rollout steps completed before the evaluation",
        "a curriculum",
    ),
    Metric(
        "curriculum/stage_steps", "steps", EVALUATION, "rollout steps in the stage so far", "a curriculum"
    ),
    Metric(
        "curriculum/stage_steps_needed",
        "steps",
        EVALUATION,
        "rollout steps of a full pass of the stage's data",
        "a curriculum",
    ),
    Metric("curriculum/advancements", "promotions", EVALUATION, "promotions so far", "a curriculum"),
)
"""All metrics; of several that match a name, the first says what it is."""


@cache
def metric(name: str) -> Metric | None:
    """Return the metric of a logged name, or ``None`` if the table has none."""
    return next((one for one in METRICS if fnmatchcase(name, one.name)), None)


UNJUDGED: Mapping[str, str] = {
    "system/gpu_memory_*": "memory depends on the machine and the layout",
    "ddp/*": "the number of a process and their count are the layout",
    "accelerate/*": "the device and who sums the gradients are the layout",
    "examples/*": "it is text, which the trajectory holds",
    "dr_grpo/critic_type": "it is text, which the configuration decides",
    "curriculum/stage_name": "it is text, which the configuration decides",
}
"""Metrics that no comparison judges, and why; ``*`` stands for any part."""


def reason_unjudged(name: str) -> str | None:
    """Return why no comparison judges a metric, or ``None`` for one that is judged."""
    return next((why for pattern, why in UNJUDGED.items() if fnmatchcase(name, pattern)), None)
