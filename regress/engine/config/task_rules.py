"""Contradictory settings of task, evaluation and curriculum; see `regress.engine.config.rules`."""

from collections.abc import Callable

from regress.engine.config.curriculum import stages_of
from regress.engine.config.leaves import KeyPath
from regress.engine.config.origins import DEFAULT, Origin, author
from regress.engine.config.rollout_rules import Rule
from regress.engine.config.schema import Config
from regress.errors import ConfigError


def replays(c: Config) -> bool:
    """Return True if rollouts come from a recording."""
    return c.rollout_worker.type == "mock" or (c.rollout_mock.enable and c.rollout_mock.mode == "mock")


def without_task(c: Config) -> bool:
    """Return True if there is no task: prompts come from the recording too."""
    return c.task.name is None and c.task.dataset_path is None


def _no_task(c: Config) -> str | None:
    if not without_task(c):
        return None
    stated = "task.name=null leaves the prompts to a recording"
    if not replays(c):
        return (
            f"{stated}, but rollout_worker.type={c.rollout_worker.type} samples; set task.name or task.dataset_path, "
            "or replay trajectories with rollout_worker.type=mock."
        )
    asked = {
        "evaluation.every_n_steps": c.evaluation.every_n_steps,
        "warm_start.steps": c.warm_start.steps,
        "curriculum.enable": c.curriculum.enable,
        "task.max_turns": c.task.max_turns > 1,
    }
    for key, value in asked.items():
        if value:
            return f"{stated}, but {key} needs problems of a task; set task.name, or {key} to its default."
    return None


def _pass_at_k(c: Config) -> str | None:
    chosen = c.evaluation
    if not chosen.every_n_steps and chosen.samples_per_prompt:
        return (
            f"evaluation.samples_per_prompt={chosen.samples_per_prompt} never samples while "
            "evaluation.every_n_steps=0; set evaluation.every_n_steps to at least 1 or evaluation.samples_per_prompt=0."
        )
    largest = max(chosen.pass_at_k, default=0)
    if largest <= chosen.samples_per_prompt:
        return None
    return (
        f"evaluation.pass_at_k={chosen.pass_at_k} needs {largest} samples of each prompt, and "
        f"evaluation.samples_per_prompt is {chosen.samples_per_prompt}; set evaluation.samples_per_prompt to at least "
        f"{largest}."
    )


def _max_samples(c: Config) -> str | None:
    most, size = c.evaluation.max_samples, c.task.eval_size
    if c.task.eval_path is not None:
        return None  # all that the file holds
    if most is None or most <= size or not c.evaluation.every_n_steps:
        return None
    return (
        f"evaluation.max_samples={most} is more than the task.eval_size={size} held-out prompts; set task.eval_size "
        f"to at least {most} or lower evaluation.max_samples."
    )


def _stages(c: Config) -> str | None:
    if not c.curriculum.enable:
        return None
    try:
        stages_of(c)
    except ConfigError as error:
        return str(error)
    return None


def _evaluated(c: Config) -> str | None:
    if not c.curriculum.enable or c.evaluation.every_n_steps or replays(c):
        return None
    return (
        "curriculum.enable=true never leaves its first stage while evaluation.every_n_steps=0, because only an "
        "evaluation ends a stage; set evaluation.every_n_steps to at least 1 or curriculum.enable=false."
    )


def file_beside_task(c: Config, origin: Callable[[KeyPath], Origin]) -> str | None:
    """Refuse a file and a generated task from one author; a file wins only over a task from another layer."""
    path = origin(("task", "dataset_path"))
    if c.task.dataset_path is None or path.layer == DEFAULT:
        return None
    for key in ("name", "level", "params"):
        if author(origin(("task", key))) == author(path):
            return (
                f"task.dataset_path={c.task.dataset_path} and task.{key} are both given ({author(path)}), and the file "
                f"already holds the problems; leave task.{key} away or set task.dataset_path=null."
            )
    return None


def _filter(c: Config) -> str | None:
    data = c.data
    if not data.filter_groups:
        if data.filter_metric == "reward":
            return None
        return (
            f"data.filter_metric={data.filter_metric} is not read while data.filter_groups=false; set that to true or "
            "data.filter_metric=reward."
        )
    if data.group_size == 1:
        return (
            "data.filter_groups=true compares the samples of a group, and data.group_size=1 leaves nothing to compare; "
            "set data.group_size to at least 2 or data.filter_groups=false."
        )
    if data.filter_metric != "reward" and data.filter_metric not in c.task.rewards and not without_task(c):
        return (
            f"data.filter_metric={data.filter_metric} is no reward of task.rewards, which has "
            f"{', '.join(c.task.rewards)}; name one of them, or reward for their sum."
        )
    return None


TASK_RULES: tuple[Rule, ...] = (_no_task, _pass_at_k, _max_samples, _stages, _evaluated, _filter)
