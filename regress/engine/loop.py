"""Training loop: what happens at each rollout step, one explicit call after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rich.console import Console

from regress.engine.build import Run
from regress.engine.checkpoint.saver import Saver
from regress.engine.evaluation import PASS_RATE, due, pass_rate
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

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the policy after as many steps as are completed, if that is due."""
        run, step = self._run, self._step
        if step in self.pass_rates:  # before the checkpoint that the run goes on from
            return {PASS_RATE: self.pass_rates[step]}
        if not due(run.config, step) or (step == self._start.step and self._start.resumed):
            return {}
        rate = pass_rate(run.trainer.worker, run.prompts.evaluation(), step)
        self.pass_rates[step] = rate
        if run.trainer.world.main:
            self._console.print(f"step {step}: greedy pass rate on held-out prompts {rate:.3f}")
        return {PASS_RATE: rate}

    def _train(self) -> dict[str, float]:
        start = self._start.unfinished if self._step == self._start.step else None
        return self._run.trainer.step(self._step, start=start, after_update=self._after_update)

    def _after_update(self, outcome: StepOutcome, update: int, learning_rate: float) -> None:
        """Do what is due between two optimizer updates; ``update`` counts over the whole run, from 0."""
        self._saver.after_update(self._step, self.pass_rates)

    def _write(self, row: Mapping[str, float]) -> None:
        def write() -> None:
            self._saver.check()
            self._log(self._step, row)

        raise_on_all_ranks(self._run.trainer.world, write)
