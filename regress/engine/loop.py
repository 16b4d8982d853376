"""Training loop: what happens at each rollout step, one explicit call after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from regress.engine.build import Run
from regress.engine.checkpoint.saver import Saver
from regress.engine.curriculum import observe, told, write_state
from regress.engine.evaluation import PASS_RATE, due
from regress.engine.step import StepOutcome
from regress.engine.tracking import Log
from regress.engine.trainer import UnfinishedStep
from regress.engine.world import raise_on_all_ranks


@dataclass(frozen=True)
class Start:
    """Place in a run at which the loop starts.

    Attributes:
        step: completed rollout steps.
        unfinished: the next step, if some of its updates are made.
        pass_rates: the held-out pass rate by step, so far.
        resumed: True if an earlier process was here; an evaluation after ``step`` steps is then done.
    """

    step: int = 0
    unfinished: UnfinishedStep | None = None
    pass_rates: Mapping[int, float] = field(default_factory=dict)
    resumed: bool = False


class Loop:
    """Loop over the rollout steps of a run.

    Attributes:
        metrics: those of the last step.
        pass_rates: the held-out pass rate by step.
    """

    def __init__(
        self,
        run: Run,
        log: Log,
        advance: Callable[[], None],
        console: Console,
        saver: Saver,
        start: Start | None = None,
    ) -> None:
        self._run = run
        self._log = log
        self._advance = advance
        self._console = console
        self._saver = saver
        self._start = start or Start()
        self._step = 0
        self.metrics: dict[str, float] = {}
        self.pass_rates: dict[int, float] = dict(self._start.pass_rates)

    def train(self) -> None:
        """Train until ``max_steps`` rollout steps are completed; all ranks call this together."""
        last = self._run.config.max_steps
        for _ in range(self._start.step):
            self._advance()
        self._save_curriculum()
        for step in range(self._start.step, last + 1):
            self._step = step
            row = self._evaluate()
            self._saver.after_step(self._step, self.pass_rates)
            if self._step < last:
                self.metrics = self._train()
                row |= self.metrics
                self._advance()
            if row:
                self._write(row)

    def _evaluate(self) -> dict[str, float | str]:
        """Evaluate the policy after as many steps as are completed, if that is due."""
        run, step = self._run, self._step
        if step in self.pass_rates:  # before the checkpoint that the run goes on from
            known = run.evaluation.step == step
            return (
                {**run.evaluation.metrics, **self._observed} if known else {PASS_RATE: self.pass_rates[step]}
            )
        if not due(run.config, step) or (step == self._start.step and self._start.resumed):
            return {}
        outcome = run.evaluation.run(step)
        self.pass_rates[step] = outcome.pass_rate
        promoted = None if run.curriculum is None else observe(run.curriculum, outcome, run.config)
        raise_on_all_ranks(run.trainer.world, lambda: run.evaluation.write(outcome))
        self._save_curriculum()
        if run.trainer.world.main:
            self._console.print(f"step {step}: greedy pass rate on held-out prompts {outcome.pass_rate:.3f}")
            if promoted is not None and run.curriculum is not None:
                self._console.print(told(promoted, run.curriculum))
        return {**run.evaluation.metrics, **self._observed}

    @property
    def _observed(self) -> dict[str, float | str]:
        """The metrics of the curriculum after as many steps as are completed."""
        return {} if self._run.curriculum is None else self._run.curriculum.metrics(self._step)

    def _save_curriculum(self) -> None:
        run = self._run
        if run.curriculum is not None:
            state = run.curriculum.state_dict()
            folder = Path(run.config.output_dir) if run.trainer.world.main else None
            raise_on_all_ranks(run.trainer.world, lambda: write_state(folder, state))

    def _train(self) -> dict[str, float]:
        place = self._run.prompts.place(self._step)
        if place is not None and self._run.curriculum is not None:
            self._run.curriculum.follow(place, self._step)
        start = self._start.unfinished if self._step == self._start.step else None
        return self._run.trainer.step(self._step, start=start, after_update=self._after_update)

    def _after_update(self, outcome: StepOutcome, update: int, learning_rate: float) -> None:
        """Do what is due between two optimizer updates; ``update`` counts over the whole run, from 0."""
        self._saver.after_update(self._step, self.pass_rates)

    def _write(self, row: Mapping[str, float | str]) -> None:
        def write() -> None:
            self._saver.check()
            self._log(self._step, row)

        raise_on_all_ranks(self._run.trainer.world, write)
