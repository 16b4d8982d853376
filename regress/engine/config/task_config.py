"""What is trained on: task, sizes of its batches, warm start, evaluation and curriculum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from regress.engine.config.config_messages import COMMAND_LINE, DEFAULT, ENVIRONMENT, FILE, PRESET, Origin
from regress.engine.config.config_option import (
    Bounds,
    Count,
    Entry,
    Flag,
    Fraction,
    KeyPath,
    NonNegative,
    Origins,
    Positive,
    Section,
    Seed,
    Size,
    Variable,
    one_of,
)
from regress.errors import ConfigError, TaskError
from regress.grpo.objective_catalogue import ADVANTAGES
from regress.tasks.curriculum import Rules
from regress.tasks.curriculum_stages import Stage, read_stages
from regress.tasks.problem_split import TRAIN_SIZE

if TYPE_CHECKING:
    from regress.engine.config.config_schema import Config
    from regress.engine.config.config_values import Values


CUSTOM = "custom"
SHARES = {"balanced": 0.5, "prompt_heavy": 0.6, "completion_heavy": 0.4}
"""Share of the prompt in a sequence, by strategy."""
STRATEGIES = (*SHARES, CUSTOM)
THRESHOLD = "CURRICULUM_PERFORMANCE_THRESHOLD_"
JUDGED_ON = ("stage", "all")


@dataclass
class TaskConfig(Section):
    """Training task."""

    name: str | None = "reverse_string"
    """name of the task, or your own as package.module:function; null: prompts come from the recording that is
    replayed"""
    dataset_path: Annotated[str | None, Flag("dataset-path", "FILE")] = None
    """file of prompts with answers, in place of name: a JSON array, JSON lines or parquet; null: none"""
    prompt_field: str = "prompt"
    """dataset_path: field of the prompt (text, one chat message or token ids)"""
    answer_field: str = "answer"
    """dataset_path: field of the right answer"""
    level_field: str = "level"
    """dataset_path: field of the difficulty (a name or a number), if it is there"""
    complexity_field: str = "complexity"
    """dataset_path: field of the complexity (0 to 10), if it is there"""
    level: Size = 1
    """difficulty of the generated prompts"""
    params: dict[str, Any] = field(default_factory=dict)
    """parameters of the generator that override the level's"""
    train_size: Annotated[Size | None, Flag("max-prompts")] = None
    """prompts in the training split; null: 512, or all of dataset_path but eval_size"""
    eval_size: Count = 64
    """prompts in the held-out split"""
    eval_path: str | None = None
    """file of held-out prompts with answers, as dataset_path, in place of a split; null: none"""
    max_turns: Size = 1
    """completions in a conversation, at most"""
    environment: str | None = None
    """what answers every completion but the last: checker, calculator, search, or your own as
    package.module:function"""
    answer_tags: bool = False
    """the warm start shows answers as <answer>...</answer>, which answers at once then take"""
    rewards: dict[str, float] = field(default_factory=lambda: {"exact_match": 1.0})
    """weight of each reward of a conversation, by name"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        if not any(self.rewards.values()):
            yield """task.rewards names no reward with a weight other than 0, so that every advantage is zero; give one,
            for example task.rewards.exact_match=1.0."""
        if self.max_turns > 1 and self.environment is None:
            yield f"""task.max_turns={self.max_turns} needs somebody to answer the completions before the last; set
            task.environment, for example to checker, or task.max_turns=1."""
        if self.max_turns == 1 and self.environment is not None:
            yield f"""task.environment={self.environment} never has its turn while task.max_turns=1; set task.max_turns
            to at least 2 or task.environment=null."""
        if not run.has_task:
            yield from self._conflicts_without_task(run)
        path = origin(("task", "dataset_path"))
        for key in ("name", "level", "params"):
            if self.dataset_path and path.layer != DEFAULT and path.author == origin(("task", key)).author:
                yield f"""task.dataset_path={self.dataset_path} and task.{key} are both given ({path.author}), and the
                file already holds the problems; leave task.{key} away or set task.dataset_path=null."""

    def _conflicts_without_task(self, run: Config) -> Iterator[str]:
        stated = "task.name=null leaves the prompts to a recording"
        if not run.replays:
            yield f"""{stated}, but rollout_worker.type={run.rollout_worker.type} samples; set task.name or
            task.dataset_path, or replay trajectories with rollout_worker.type=mock."""
        asked = {
            "evaluation.every_n_steps": run.evaluation.every_n_steps,
            "warm_start.steps": run.warm_start.steps,
            "curriculum.enable": run.curriculum.enable,
            "task.max_turns": self.max_turns > 1,
        }
        for key in (key for key, value in asked.items() if value):
            yield f"{stated}, but {key} needs problems of a task; set task.name, or {key} to its default."


@dataclass
class DataConfig(Section):
    """Batch and sequence sizes."""

    prompts_per_step: Annotated[Size, Flag("rollouts-per-step")] = 8
    """prompts (groups) in a rollout batch"""
    group_size: Annotated[Size, Flag("group-size")] = 8
    """completions sampled per prompt"""
    filter_groups: bool = False
    """dynamic sampling (DAPO): groups whose samples have equal rewards are replaced by groups of further prompts"""
    filter_metric: str = "reward"
    """filter_groups: reward that must differ, the whole one or one of task.rewards"""
    max_generation_batches: Count = 10
    """filter_groups: batches of prompts sampled for a step, at most; 0: any number"""
    max_prompt_length: Annotated[Size, Variable("MAX_PROMPT_LENGTH")] = 32
    """longest prompt in tokens"""
    max_completion_length: Annotated[Size, Variable("MAX_COMPLETION_LENGTH")] = 16
    """longest completion in tokens; with several turns, everything after the prompt"""
    max_seq_length: Annotated[int, Bounds(least=2), Flag("max-length")] = 48
    """longest prompt and completion together, in tokens"""
    length_allocation_strategy: Annotated[
        str | None, one_of(*STRATEGIES), Variable("LENGTH_ALLOCATION_STRATEGY")
    ] = None
    """division of max_seq_length between prompt and completion: halves, 60 to 40, 40 to 60, or as the two lengths say;
    null: halves where max_seq_length alone is given"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        prompt, completion, longest = self.max_prompt_length, self.max_completion_length, self.max_seq_length
        if prompt + completion > longest:
            yield f"""data.max_prompt_length={prompt} and data.max_completion_length={completion} add up to
            {prompt + completion}, more than data.max_seq_length={longest}; shorten one of them or set
            data.max_seq_length={prompt + completion}."""
        algorithm = run.algorithm
        alone = self.group_size == 1 and algorithm.single_sample == "zero"
        if alone and ADVANTAGES[algorithm.advantage].compares:
            yield f"""data.group_size=1 leaves algorithm.advantage={algorithm.advantage} nothing to compare a completion
            with, so that every advantage is zero; set data.group_size to at least 2, algorithm.single_sample=raw or
            algorithm.advantage=reinforce_plus_plus."""
        size = TRAIN_SIZE if run.task.dataset_path is None else self.prompts_per_step
        size = size if run.task.train_size is None else run.task.train_size
        if self.prompts_per_step > size:
            yield f"""data.prompts_per_step={self.prompts_per_step} is more than task.train_size={size}, so that a step
            would hold a prompt twice; set task.train_size to at least {self.prompts_per_step} or lower
            data.prompts_per_step."""
        if not self.filter_groups and self.filter_metric != "reward":
            yield f"""data.filter_metric={self.filter_metric} is not read while data.filter_groups=false; set that to
            true or data.filter_metric=reward."""
        if self.filter_groups and self.group_size == 1:
            yield """data.filter_groups=true compares the samples of a group, and data.group_size=1 leaves nothing to
            compare; set data.group_size to at least 2 or data.filter_groups=false."""
        if self.filter_groups and self.filter_metric not in ("reward", *run.task.rewards) and run.has_task:
            yield f"""data.filter_metric={self.filter_metric} is not a reward of task.rewards, which has
            {", ".join(run.task.rewards)}; name one of them, or reward for their sum."""


@dataclass
class WarmStartConfig(Section):
    """Supervised steps before the first rollout."""

    steps: Count = 0
    """supervised steps before the first rollout"""
    batch_size: Size = 32
    """examples per supervised step"""
    learning_rate: NonNegative = 0.003
    """learning rate of the supervised steps"""


@dataclass
class EvaluationConfig(Section):
    """Evaluation: greedy pass rate on held-out prompts, and pass@k from samples."""

    every_n_steps: Annotated[Count, Flag("eval-every-n-steps")] = 0
    """evaluate before the first step, every so many steps and at the end; 0: never"""
    max_samples: Annotated[Size | None, Flag("max-eval-samples")] = None
    """held-out prompts that are evaluated, the same ones each time; null: all"""
    samples_per_prompt: Count = 0
    """completions sampled of each prompt besides the greedy one, for pass@k; 0: none"""
    pass_at_k: Annotated[list[int], Bounds(least=1)] = field(default_factory=list)
    """values of k for pass@k, each at most samples_per_prompt; []: 1 and samples_per_prompt"""
    temperature: Positive | None = None
    """temperature of the sampled completions; null: rollout_worker.temperature"""
    seed: Seed | None = None
    """seed of the sampled completions; null: seed"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        size = run.task.eval_size if run.task.eval_path is None else None  # a file has its own
        if self.every_n_steps and size == 0:
            yield f"""evaluation.every_n_steps={self.every_n_steps} finds no prompts while task.eval_size=0; set
            task.eval_size to at least 1 or evaluation.every_n_steps=0."""
        if not self.every_n_steps and self.samples_per_prompt:
            yield f"""evaluation.samples_per_prompt={self.samples_per_prompt} never samples while
            evaluation.every_n_steps=0; set evaluation.every_n_steps to at least 1 or
            evaluation.samples_per_prompt=0."""
        largest = max(self.pass_at_k, default=0)
        if largest > self.samples_per_prompt:
            yield f"""evaluation.pass_at_k={self.pass_at_k} needs {largest} samples of each prompt, and
            evaluation.samples_per_prompt is {self.samples_per_prompt}; set evaluation.samples_per_prompt to at least
            {largest}."""
        if self.every_n_steps and size is not None and (self.max_samples or 0) > size:
            yield f"""evaluation.max_samples={self.max_samples} is more than the task.eval_size={size} held-out prompts;
            set task.eval_size to at least {self.max_samples} or lower evaluation.max_samples."""


@dataclass
class CurriculumConfig(Section):
    """Curriculum over levels and complexity of the problems."""

    enable: Annotated[bool, Flag("enable-curriculum", "true|false", given="true", optional=True)] = False
    """train on one stage after the other, as evaluations end them"""
    stages: list[Any] | None = None
    """stages, each with name, levels, complexity, threshold, min_evaluations, min_steps and full_pass; null:
    foundation, elementary, intermediate, advanced, expert, comprehensive, for problems of five levels"""
    thresholds: dict[str, float] = field(default_factory=dict)
    """pass rate of the first round that ends a stage, by its name, in place of the stage's own"""
    min_evaluations: Size = 5
    """least evaluations in a stage that does not tell"""
    full_pass: bool = True
    """whether each problem of a stage that does not tell must have been trained on once"""
    window: Size = 2
    """latest evaluations of a stage whose mean must reach the threshold"""
    judged_on: Annotated[str, one_of(*JUDGED_ON)] = "stage"
    """held-out problems whose pass rate counts: those of the stage, or all"""
    max_rounds: Size = 5
    """rounds through the stages; after the last one the last stage stays"""
    threshold_increment: Annotated[float, Bounds(least=0, most=1)] = 0.1
    """what every round adds to the thresholds"""
    threshold_limit: Fraction = 0.95
    """highest threshold of a later round"""

    def conflicts(self, run: Config, origin: Origins) -> Iterator[str]:
        if self.enable:
            try:
                self.read_stages()
            except ConfigError as error:
                yield str(error)
        if self.enable and not run.evaluation.every_n_steps and not run.replays:
            yield """curriculum.enable=true never leaves its first stage while evaluation.every_n_steps=0, because only
            an evaluation ends a stage; set evaluation.every_n_steps to at least 1 or curriculum.enable=false."""

    def read_stages(self) -> tuple[Stage, ...]:
        """Return the stages. Raises `ConfigError` naming the stage and field that cannot be."""
        try:
            return read_stages(
                self.stages, self.thresholds, min_evaluations=self.min_evaluations, full_pass=self.full_pass
            )
        except TaskError as error:
            raise ConfigError(str(error)) from error

    def rules(self) -> Rules:
        """Return what all stages have in common."""
        return Rules(self.max_rounds, self.threshold_increment, self.threshold_limit, self.window)


def allocated(longest: int, strategy: str) -> tuple[int, int]:
    """Return the prompt's and the completion's share of a sequence of so many tokens, in tokens."""
    prompt = int(SHARES[strategy] * longest)
    return prompt, longest - prompt


def derive_lengths(values: Values, environ: Mapping[str, str]) -> None:
    """Set the lengths of prompt and completion that follow from that of the sequence.

    A part given where the sequence's length or the strategy is given, or later, stays; the other one is then the rest.
    Without a strategy only a sequence's length that is given later than both parts is divided, ``balanced``. Where both
    parts are given and the sequence's length nowhere, it is at least their sum.
    """
    parts = ("data.max_prompt_length", "data.max_completion_length")
    length, choice = "data.max_seq_length", "data.length_allocation_strategy"
    rank = {key: _rank(values.origin(tuple(key.split(".")))) for key in (*parts, length, choice)}
    total = sum(map(values.value, parts))
    if not rank[length] and all(rank[part] for part in parts) and total > values.value(length):
        _derive(values, length, total, Origin(DEFAULT, "sum of prompt and completion"))
    strategy, longest = values.value(choice), values.value(length)
    latest = max(rank[length], rank[choice])
    stays = [rank[part] >= latest for part in parts]
    if strategy == CUSTOM or latest == 0 or all(stays) or (strategy is None and any(stays)):
        return
    name = strategy or STRATEGIES[0]
    lengths = list(allocated(longest, name))
    if any(stays):
        known = stays.index(True)
        lengths[1 - known] = longest - values.value(parts[known])
        if lengths[1 - known] <= 0:
            return  # the rule of the lengths says so
    for part, size, stay in zip(parts, lengths, stays, strict=True):
        if not stay:
            _derive(values, part, size, Origin("strategy", f"{name} of data.max_seq_length={longest}"))


def _rank(origin: Origin) -> int:
    """Return how late a layer is; all that is given with the command counts alike."""
    return {DEFAULT: 0, PRESET: 0, FILE: 1}.get(origin.layer, 2)


def _derive(values: Values, key: str, value: Any, origin: Origin) -> None:
    values.put(Entry(tuple(key.split(".")), value, origin))


def derive_thresholds(values: Values, environ: Mapping[str, str]) -> None:
    """Let ``CURRICULUM_PERFORMANCE_THRESHOLD_<n>`` set the threshold of the n-th stage, from 1.

    They beat a file, as every variable does. An entry for the stage in ``curriculum.thresholds``, or a threshold of the
    stage itself in ``curriculum.stages``, wins where the command line or a ``REGRESS_*`` variable gives it. Without a
    curriculum the variables mean nothing. Raises `ConfigError` for one that belongs to no stage, or is not a number.
    """
    given = {name: environ[name] for name in sorted(environ) if name.startswith(THRESHOLD)}
    if not given or not values.value("curriculum.enable"):
        return
    chosen = values.built(CurriculumConfig, "curriculum.")
    names = [stage.name for stage in chosen.read_stages()]
    for variable, text in given.items():
        number = variable.removeprefix(THRESHOLD)
        if not number.isdecimal() or not 1 <= int(number) <= len(names):
            raise ConfigError(f"""The environment variable {variable} belongs to no stage of the curriculum; they are
            numbered from 1 to {len(names)}, so correct its name or unset it.""")
        name = names[int(number) - 1]
        own = chosen.stages is not None and "threshold" in chosen.stages[int(number) - 1]
        deciding: list[KeyPath] = [("curriculum", "stages")] * own
        deciding += [("curriculum", "thresholds", name)] * (name in chosen.thresholds)
        if not any(values.origin(path).layer in (COMMAND_LINE, ENVIRONMENT) for path in deciding):
            origin = Origin(ENVIRONMENT, variable)
            values.put(Entry(("curriculum", "thresholds", name), _pass_rate(variable, text), origin))


def _pass_rate(variable: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate <= 1:
        raise ConfigError(
            f"The environment variable {variable}={text} must be a pass rate greater than 0 and at most 1."
        )
    return rate
