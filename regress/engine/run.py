"""A run from start to end: build, train, evaluate, save."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils.logging import disable_progress_bar

from regress.dump.hooks import record_activations
from regress.dump.taps import recording
from regress.engine.build import Run, build
from regress.engine.config.schema import Config
from regress.engine.environment import configure_torch
from regress.engine.evaluation import PASS_RATE, due, pass_rate
from regress.errors import RegressError


@dataclass(frozen=True)
class RunResult:
    """Where a run left its files, the metrics of its last step, and the held-out pass rate by step."""

    output_dir: Path
    dump_dir: Path | None
    metrics: dict[str, float]
    pass_rates: dict[int, float]


def train(config: Config, console: Console) -> RunResult:
    """Train as configured. A progress bar and a line per evaluation go to the console, the rest to files.

    Raises:
        RegressError: whatever a user can mend, in one sentence.
    """
    configure_torch(config.threads)
    output = Path(config.output_dir)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bars, ExitStack() as resources:

        def progress(name: str, total: int) -> Callable[[], None]:
            task = bars.add_task(name, total=total)
            return lambda: bars.advance(task)

        log = resources.enter_context(metrics_log(output))
        run = build(config, resources, progress)
        _record(run, resources)
        metrics, pass_rates = _loop(run, log, progress("training", config.max_steps), console)
        save(run, output / "final")
    dump_dir = run.recorder.folder if run.recorder is not None else None
    return RunResult(output, dump_dir, metrics, pass_rates)


def _loop(
    run: Run,
    log: Callable[[Mapping[str, float]], None],
    advance: Callable[[], None],
    console: Console,
) -> tuple[dict[str, float], dict[int, float]]:
    metrics: dict[str, float] = {}
    pass_rates: dict[int, float] = {}
    for step in range(run.config.max_steps + 1):
        if due(run.config, step):
            pass_rates[step] = pass_rate(run.trainer.worker, run.prompts.evaluation(), step)
            log({"step": step, PASS_RATE: pass_rates[step]})
            console.print(f"step {step}: greedy pass rate on held-out prompts {pass_rates[step]:.3f}")
        if step < run.config.max_steps:
            metrics = run.trainer.step(step)
            log({"step": step, **metrics})
            advance()
    return metrics, pass_rates


def _record(run: Run, resources: ExitStack) -> None:
    """From here on everything tapped is recorded; a normal end of ``resources`` completes the dump."""
    if run.recorder is None:
        return
    resources.enter_context(recording(run.recorder))
    debug = run.config.debug
    if debug.dump_options.activations:
        resources.enter_context(record_activations(run.trainer.policy.model, debug.target_module_pattern))


@contextmanager
def metrics_log(output: Path) -> Iterator[Callable[[Mapping[str, float]], None]]:
    """``metrics.jsonl`` in the output directory: one line per step, flushed as it is written; NaN is null."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / "metrics.jsonl").open("w")
    except OSError as error:
        raise RegressError(
            f"output_dir={str(output)!r} cannot be written ({error.strerror}); choose another output_dir"
        ) from error

    def log(metrics: Mapping[str, float]) -> None:
        finite = {key: value if value == value else None for key, value in metrics.items()}
        file.write(json.dumps(finite, allow_nan=False) + "\n")
        file.flush()

    with file:
        yield log


def save(run: Run, folder: Path) -> None:
    """Model and tokenizer as ``save_pretrained`` writes them."""
    disable_progress_bar()
    try:
        run.trainer.policy.model.save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
    except OSError as error:
        raise RegressError(
            f"{folder} cannot be written ({error.strerror}); free space there or change output_dir"
        ) from error
