"""Training loop: what happens at each rollout step, one explicit call after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from rich.console import Console

from regress.engine.build import Run
from regress.engine.evaluation import PASS_RATE, due, pass_rate
from regress.engine.step import StepOutcome
from regress.engine.tracking import Log
from regress.engine.world import raise_on_all_ranks


class Loop:
    """Loop over the rollout steps of a run.

    Attributes:
        metrics: those of the last step.
        pass_rates: the held-out pass rate by step.
    """

    def __init__(self, run: Run, log: Log, advance: Callable[[], None], console: Console) -> None:
        self._run = run
        self._log = log
        self._advance = advance
        self._console = console
        self._step = 0
        self.metrics: dict[str, float] = {}
        self.pass_rates: dict[int, float] = {}

    def train(self) -> None:
        """Train until ``max_steps`` rollout steps are completed; all ranks call this together."""
        last = self._run.config.max_steps
        for self._step in range(last + 1):
            row = self._evaluate()
            if self._step < last:
                self.metrics = self._train()
                row |= self.metrics
                self._advance()
            if row:
                self._write(row)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate the policy after as many steps as are completed, if that is due."""
        run, step = self._run, self._step
        if not due(run.config, step):
            return {}
        rate = pass_rate(run.trainer.worker, run.prompts.evaluation(), step)
        self.pass_rates[step] = rate
        if run.trainer.world.main:
            self._console.print(f"step {step}: greedy pass rate on held-out prompts {rate:.3f}")
        return {PASS_RATE: rate}

    def _train(self) -> dict[str, float]:
        return self._run.trainer.step(self._step, after_update=self._after_update)

    def _after_update(self, outcome: StepOutcome, update: int, learning_rate: float) -> None:
        """Do what is due between two optimizer updates; ``update`` counts over the whole run, from 0."""

    def _write(self, row: Mapping[str, float]) -> None:
        raise_on_all_ranks(self._run.trainer.world, functools.partial(self._log, self._step, row))
