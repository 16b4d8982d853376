"""Evaluation of a run on its held-out problems: greedy pass rate, pass@k from samples, and a table of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from pathlib import Path
from typing import Any

from regress.dump.metrics_file import MetricsWriter
from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.engine.rollout_worker import SAMPLES, VAL, Prompt, RolloutWorker
from regress.errors import ConfigError, RegressError, ReplayError, reason
from regress.tasks.difficulty_vocabulary import level_name
from regress.tasks.problem import Problem, is_correct

PASS_RATE = "eval_avg_test_pass_rate"
TABLE = "eval_samples.jsonl"
"""File of the completions of every evaluation, with the header of each row of metrics."""

Metrics = dict[str, float | str]


@dataclass(frozen=True)
class Judged:
    """Completion of an evaluation, and the verdict on it."""

    problem: Problem
    found: Trajectory
    right: bool


@dataclass(frozen=True)
class Outcome:
    """Evaluation after a number of rollout steps.

    Attributes:
        greedy: one completion of each prompt.
        sampled: completions of each prompt, group by group.
    """

    step: int
    greedy: list[Judged]
    sampled: list[list[Judged]]

    @property
    def pass_rate(self) -> float:
        """The share of the prompts whose greedy completion is right."""
        return pass_rate([judged.right for judged in self.greedy])

    def pass_rate_of(self, admits: Callable[[Problem], bool]) -> float:
        """Return the same of some of the problems."""
        return pass_rate([judged.right for judged in self.greedy if admits(judged.problem)])


class Evaluation:
    """Evaluates the policy, each time on the same prompts and from generators of its own.

    Args:
        config: its section ``evaluation``.
        worker: source of the completions.
        prompts: the held-out prompts.
        table: file of the completions; None on ranks that write none.

    Attributes:
        step: the last step that was evaluated; None before the first.
        metrics: those of the last evaluation of this process.
    """

    def __init__(
        self, config: Config, worker: RolloutWorker, prompts: Sequence[Prompt], table: Path | None
    ) -> None:
        self._config = config
        self._worker = worker
        self._prompts = prompts
        self._table = None if table is None else Table(table)
        self.step: int | None = None
        self.metrics: Metrics = {}

    def run(self, step: int) -> Outcome:
        """Evaluate after `step` rollout steps; all ranks call this together.

        Raises:
            ConfigError: if there are no prompts to evaluate.
            ReplayError: for a recorded trajectory without its text.
        """
        if not self._prompts:
            raise ConfigError(f"""evaluation.every_n_steps={self._config.evaluation.every_n_steps} finds no held-out
            prompts; set task.eval_size to at least 1 or evaluation.every_n_steps=0.""")
        greedy = _judged(self._prompts, self._worker.rollout(step, self._prompts, VAL))
        sampled: list[list[Judged]] = []
        count = self._config.evaluation.samples_per_prompt
        if count:
            asked = [replace(prompt, group_size=count) for prompt in self._prompts]
            drawn = _judged(asked, self._worker.rollout(step, asked, SAMPLES))
            sampled = [drawn[start : start + count] for start in range(0, len(drawn), count)]
        outcome = Outcome(step, greedy, sampled)
        self.step, self.metrics = step, metrics_of(outcome, ks_of(self._config))
        return outcome

    def write(self, outcome: Outcome) -> None:
        """Append the completions of an evaluation to the table.

        Raises:
            RegressError: if the file cannot be written.
        """
        if self._table is not None:
            self._table.write(outcome)

    def close(self) -> None:
        """Close the table."""
        if self._table is not None:
            self._table.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the last evaluation, and the place of its last row in the table."""
        rows = -1 if self._table is None else self._table.sequence
        return {"step": self.step, "table_sequence": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the evaluation of a state: rows of the table that came later are no longer valid."""
        self.step = state["step"]
        if self._table is not None:
            self._table.resume(self.step or 0, int(state["table_sequence"]))


@dataclass
class Table:
    """File of completions, opened when the first row is written."""

    path: Path
    sequence: int = -1
    _writer: MetricsWriter | None = None
    _resumed: dict[str, Any] = field(default_factory=dict)

    def resume(self, step: int, sequence: int) -> None:
        """Go on after the row of this number, which belongs to the evaluation after `step` steps."""
        self.sequence = sequence
        self._resumed = {"resumed_from": f"evaluation-{step}", "step": step, "after": sequence}

    def write(self, outcome: Outcome) -> None:
        """Append one row for each completion."""
        try:
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = MetricsWriter(self.path, **self._resumed)
            for row in _rows(outcome):
                self._writer.write(row, step=outcome.step)
            self.sequence = self._writer.sequence
        except OSError as error:
            raise RegressError(f"""{self.path} cannot be written ({reason(error)}); free space there, or set output_dir
            to a directory in which you may write""") from error

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def ks_of(config: Config) -> list[int]:
    """Return the values of k for which pass@k is estimated, ascending."""
    count = config.evaluation.samples_per_prompt
    return sorted({*config.evaluation.pass_at_k} or {1, count}) if count else []


def metrics_of(outcome: Outcome, ks: Sequence[int]) -> Metrics:
    """Return the metrics of an evaluation, over all problems and for each level."""
    lengths = [len(judged.found.tokens) - judged.found.prompt_length for judged in outcome.greedy]
    truncated = [judged.found.finish_reason == "length" for judged in outcome.greedy]
    metrics: Metrics = {
        PASS_RATE: outcome.pass_rate,
        "eval_samples_evaluated": len(outcome.greedy),
        "eval_reward_mean": sum(judged.found.reward for judged in outcome.greedy) / len(outcome.greedy),
        "eval_completion_length_mean": sum(lengths) / len(lengths),
        "eval_completion_length_max": max(lengths),
        "eval_truncated_ratio": sum(truncated) / len(truncated),
        "inference/step": outcome.step,
    }
    for k in ks:
        metrics[f"eval_pass_at_{k}"] = _mean_pass_at_k(outcome.sampled, k)
    for level in sorted(
        {judged.problem.level for judged in outcome.greedy if judged.problem.level is not None}
    ):
        own = [judged.right for judged in outcome.greedy if judged.problem.level == level]
        groups = [group for group in outcome.sampled if group[0].problem.level == level]
        name = f"eval_level/{level_name(level)}"
        metrics[f"{name}/pass_rate"] = pass_rate(own)
        metrics[f"{name}/samples"] = len(own)
        for k in ks:
            metrics[f"{name}/pass_at_{k}"] = _mean_pass_at_k(groups, k)
    return metrics


def _mean_pass_at_k(groups: Sequence[Sequence[Judged]], k: int) -> float:
    rates = [pass_at_k(len(group), sum(judged.right for judged in group), k) for group in groups]
    return sum(rates) / len(rates)


def _judged(prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[Judged]:
    problems = [prompt.problem for prompt in prompts for _ in range(prompt.group_size)]
    return [
        Judged(problem, found, _is_right(problem, found))
        for problem, found in zip(problems, trajectories, strict=True)
    ]


def _is_right(problem: Problem, found: Trajectory) -> bool:
    if found.response is None:
        raise ReplayError(f"""the recorded trajectory of group {found.group_id!r} run {found.run_id} has no response
        text to judge; set evaluation.every_n_steps=0 or record with regress""")
    return is_correct(problem, found.response)


def _rows(outcome: Outcome) -> Iterator[dict[str, Any]]:
    kinds = ("greedy", outcome.greedy), ("sampled", [judged for group in outcome.sampled for judged in group])
    for kind, completions in kinds:
        for judged in completions:
            problem, found = judged.problem, judged.found
            yield {
                "kind": kind,
                "group_id": found.group_id,
                "run_id": found.run_id,
                "task_id": problem.task_id,
                "level": None if problem.level is None else level_name(problem.level),
                "complexity": problem.complexity,
                "prompt": problem.prompt,
                "response": found.response,
                "ground_truth": problem.answer,
                "correct": judged.right,
                "reward": float(found.reward),
                "completion_length": len(found.tokens) - found.prompt_length,
                "finish_reason": found.finish_reason,
            }


def due(config: Config, step: int) -> bool:
    """Return True if the policy is evaluated after ``step`` steps: at the start, at the end and at every interval."""
    every = config.evaluation.every_n_steps
    return every > 0 and (step % every == 0 or step == config.max_steps)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is right.

    Chen et al. 2021 (arXiv:2107.03374), equation 1: ``1 - C(n - c, k) / C(n, k)``, here with exact integers.

    Args:
        samples: n, completions sampled of the problem.
        correct: c, those that are right.
        k: at least 1 and at most n.

    Raises:
        ValueError: for other numbers.
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(f"pass@{k} cannot be estimated from {correct} right ones of {samples} samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def pass_rate(right: Sequence[bool]) -> float:
    """Return the share of right completions; those that failed for any reason count as 0.

    Raises:
        ValueError: if there are none.
    """
    if not right:
        raise ValueError("there is nothing to take the pass rate of")
    return sum(right) / len(right)
