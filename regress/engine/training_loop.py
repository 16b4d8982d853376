"""Training loop: what happens at each rollout step, one explicit call after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from regress.engine import run_log
from regress.engine.checkpoint.checkpoint_saver import Saver
from regress.engine.engine_ranks import raise_on_all_ranks
from regress.engine.evaluation import due
from regress.engine.grpo_trainer import UnfinishedStep
from regress.engine.run_construction import Run
from regress.engine.run_curriculum import at_stage, describe_advancement, observe, write_state
from regress.engine.step_metrics import (
    RunTotals,
    Values,
    is_dr_grpo,
    layout_metrics,
    loss_components,
    update_metrics,
)
from regress.engine.tracking.metrics_log import Log
from regress.engine.training_step import StepOutcome


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
        saver: writer of the run's checkpoints.
        totals: what counts from the start of the run.
        metrics: those of the last step.
        pass_rates: the held-out pass rate by step.
    """

    saver: Saver

    def __init__(self, run: Run, log: Log, advance: Callable[[], None], console: Console) -> None:
        self._run = run
        self._log = log
        self._advance = advance
        self._console = console
        self._start = Start()
        self._step = 0
        self.totals = RunTotals()
        self.metrics: Values = {}
        self.pass_rates: dict[int, float] = {}
        run.parts.update(tracking=log, totals=self.totals)

    def start(self, start: Start) -> None:
        """Take the place in the run from which `train` goes on."""
        self._start = start
        self.pass_rates = dict(start.pass_rates)
        for _ in range(start.step):
            self._advance()

    def checkpointed(self, step: int, update: int | None) -> None:
        """Log a checkpoint that is complete: after ``step`` steps, or inside one after ``update``."""
        self._log.log({"checkpoint/saved": 1.0, "checkpoint/step": float(step)}, step=step, update=update)

    def train(self) -> None:
        """Train until ``max_steps`` rollout steps are completed; all ranks call this together."""
        last = self._run.config.max_steps
        if self._start.resumed:  # a kill may have come between the checkpoint and its row
            inside = None if self._start.unfinished is None else self._run.trainer.updates - 1
            raise_on_all_ranks(self._run.trainer.world, lambda: self.checkpointed(self._start.step, inside))
        if self._run.curriculum is not None:
            run_log.curriculum(at_stage(self._run.curriculum, self._start.step))
        self._save_curriculum()
        for step in range(self._start.step, last + 1):
            self._step = step
            if step > self._start.step or not self._start.resumed:
                self._evaluate()
                self.saver.after_step(step, self.pass_rates)
            if step < last:
                self._train()
                self._advance()
        self._write(self.totals.final(self._run.trainer.updates))

    def _evaluate(self) -> None:
        """Evaluate the policy after as many steps as are completed, if that is due and not done yet."""
        run, step = self._run, self._step
        if not due(run.config, step):
            return
        outcome = run.evaluation.run(step)
        self.pass_rates[step] = outcome.pass_rate
        raise_on_all_ranks(run.trainer.world, lambda: run.evaluation.write(outcome))
        self._say(f"step {step}: greedy pass rate on held-out prompts {outcome.pass_rate:.3f}")
        row = {**run.evaluation.metrics, "_trainer_step": float(run.trainer.updates)}
        if run.curriculum is not None:
            found = observe(run.curriculum, outcome, run.config)
            if found is not None:
                run_log.curriculum(describe_advancement(found, run.curriculum))
            row |= run.curriculum.metrics(step)
            self._save_curriculum()
        self._write(row)

    def _follow(self) -> None:
        """Let the curriculum go to the stage of the next rollout, which a recording may decide."""
        run, place = self._run, self._run.prompts.place(self._step)
        if place is None or run.curriculum is None or place == run.curriculum.place:
            return
        run_log.curriculum(describe_advancement(run.curriculum.follow(place, self._step), run.curriculum))
        self._save_curriculum()

    def _save_curriculum(self) -> None:
        run = self._run
        if run.curriculum is not None:
            state = run.curriculum.state_dict()
            folder = Path(run.config.output_dir) if run.trainer.world.main else None
            raise_on_all_ranks(run.trainer.world, lambda: write_state(folder, state))

    def _say(self, line: str) -> None:
        if self._run.trainer.world.main:
            self._console.print(line)

    def _train(self) -> None:
        """Make one rollout step; its row holds what is not a value of a single update."""
        run = self._run
        self._follow()
        start = self._start.unfinished if self._step == self._start.step else None
        self.metrics = run.trainer.step(self._step, start=start, after_update=self._after_update)
        row = {name: value for name, value in self.metrics.items() if not name.startswith("training_step/")}
        row |= self.totals.count(self.metrics, several_turns=run.config.task.max_turns > 1)
        row |= layout_metrics(run.config, run.trainer.world, run.trainer.policy.device)
        self._write(row)

    def _after_update(self, outcome: StepOutcome, update: int, learning_rate: float) -> None:
        """Run what is due between two optimizer updates; ``update`` counts over the whole run, from 0."""
        row = update_metrics(outcome, learning_rate)
        if is_dr_grpo(self._run.config.algorithm):
            row |= loss_components(outcome)
        self._write(row, update)
        self.saver.after_update(self._step, self.pass_rates)

    def _write(self, row: Mapping[str, float | str], update: int | None = None) -> None:
        def write() -> None:
            self.saver.check()
            self._log.log(row, step=self._step, update=update)

        raise_on_all_ranks(self._run.trainer.world, write)
