"""Material that a run is trained on: its problems, the tokenizer that writes them, and the curriculum over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from regress.engine.adapters.adapter_settings import base_of, is_adapter
from regress.engine.config.config_schema import Config
from regress.engine.dialogue_rollouts import Dialogue, environment_texts
from regress.engine.model_hub import local_folder
from regress.engine.pretrained_checkpoint import checkpoint_config
from regress.engine.prompt_tokens import NoPrompts, Prompts, PromptSource
from regress.engine.tokenizer import load_tokenizer, train_tokenizer
from regress.errors import ConfigError, TaskError
from regress.tasks.curriculum import Curriculum
from regress.tasks.curriculum_stages import Stage, levels_of, problems_of
from regress.tasks.data_files import read_task
from regress.tasks.data_rows import RowFields
from regress.tasks.dialogue_environments import Environment, make_environment
from regress.tasks.problem_split import Dataset, make_dataset, make_graded_dataset, with_answer_tags
from regress.tasks.task_registry import Task, make_task


@dataclass(frozen=True)
class DataComponents:
    """Tokenizer, prompts, the dialogue of conversations with several turns, and the curriculum, if there is one."""

    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    dialogue: Dialogue | None = None
    curriculum: Curriculum | None = None


def make_material(config: Config) -> DataComponents:
    """Make what a configuration asks to train on.

    Raises:
        ConfigError: if prompts, tokenizer and lengths do not fit each other.
        TaskError: if the problems cannot be made or read, or leave a stage of the curriculum empty.
    """
    if not config.has_task:
        return DataComponents(_given_tokenizer(config), NoPrompts())
    stages = config.curriculum.read_stages() if config.curriculum.enable else ()
    dataset = _held_out(config, _dataset(config, stages))
    if config.task.answer_tags:
        dataset = with_answer_tags(dataset)
    environment = None if config.task.environment is None else make_environment(config.task.environment)
    tokenizer = _tokenizer(config, dataset, environment)
    dialogue = None
    if environment is not None:
        dialogue = Dialogue(environment, tokenizer, config.task.max_turns, dataset.train[0])
    prompts = PromptSource(dataset, tokenizer, config, dialogue)
    curriculum = _curriculum(config, dataset, stages, prompts) if stages else None
    return DataComponents(tokenizer, prompts, dialogue, curriculum)


def _held_out(config: Config, dataset: Dataset) -> Dataset:
    """Return the dataset with the held-out problems of ``task.eval_path``, if there is one."""
    if config.task.eval_path is None:
        return dataset
    try:
        found = read_task(Path(config.task.eval_path), _fields(config), config.seed)
    except TaskError as error:
        raise TaskError(str(error).replace("task.dataset_path", "task.eval_path", 1)) from error
    return replace(dataset, evaluation=found.problems)


def _fields(config: Config) -> RowFields:
    chosen = config.task
    return RowFields(chosen.prompt_field, chosen.answer_field, chosen.level_field, chosen.complexity_field)


def _dataset(config: Config, stages: tuple[Stage, ...]) -> Dataset:
    chosen = config.task
    if chosen.dataset_path is not None:
        task: Task = read_task(Path(chosen.dataset_path), _fields(config), config.seed)
        return make_dataset(task, chosen.train_size, chosen.eval_size)
    levels = levels_of(stages) if stages else (chosen.level,)
    if levels is None:
        raise ConfigError(f"""curriculum.stages: a stage takes any level, but task.name={chosen.name} makes problems
        level by level; name the levels of every stage""")
    assert chosen.name is not None
    tasks = [make_task(chosen.name, level, chosen.params, config.seed) for level in levels]
    return make_graded_dataset(tasks, chosen.train_size, chosen.eval_size)


def _curriculum(
    config: Config, dataset: Dataset, stages: tuple[Stage, ...], prompts: PromptSource
) -> Curriculum:
    """Return the curriculum, whose stages all have problems to train on and to be judged by."""
    least = config.data.prompts_per_step
    train = problems_of(stages, dataset.train, least, "task.train_size")
    recorded = config.replays
    if config.curriculum.judged_on == "stage" and config.evaluation.every_n_steps:
        evaluated = [prompt.problem for prompt in prompts.evaluation()]
        problems_of(stages, evaluated, 1, "task.eval_size and evaluation.max_samples")
    passes = [len(problems) // least for problems in train]
    curriculum = Curriculum(stages, passes, config.curriculum.rules(), recorded=recorded)
    prompts.set_stages(train, lambda step: curriculum.place)
    return curriculum


def _tokenizer(config: Config, dataset: Dataset, environment: Environment | None) -> PreTrainedTokenizerBase:
    texts = any(problem.tokens is None for problem in (*dataset.train, *dataset.evaluation))
    path = tokenizer_path(config)
    if path is not None:
        return load_tokenizer(path, chat=texts)
    if not texts:
        raise ConfigError(f"""task.dataset_path={config.task.dataset_path} holds prompts as token ids, which only their
        own tokenizer can read; set tokenizer.path""")
    found = dataset.texts()
    if environment is not None:
        found += environment_texts(environment, dataset.train + dataset.evaluation)
    return train_tokenizer(found, tool=environment is not None)


def _given_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run without a task, which neither writes prompts nor samples."""
    path = tokenizer_path(config)
    if path is None:
        raise TaskError("""task.name=null leaves no text that a tokenizer could be made from; set tokenizer.path to that
        of the recorded run""")
    return load_tokenizer(path, chat=False, sampling=False)


def tokenizer_path(config: Config) -> str | None:
    """Return the path of a checkpoint's own tokenizer: another one of the same size would go unnoticed."""
    if config.tokenizer.path is not None or config.model.path is None:
        return config.tokenizer.path
    folders = [local_folder(config.model.path, "model.path")]
    if is_adapter(folders[0]):
        folders.append(base_of(folders[0], config.model.lora.base_path, "model.path"))
    checkpoint_config(folders[-1])  # a broken checkpoint is not the tokenizer's fault
    return next((str(folder) for folder in folders if (folder / "tokenizer_config.json").is_file()), None)
