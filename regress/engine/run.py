"""A run from start to end: build, train, evaluate, save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils.logging import disable_progress_bar

from regress.dump.hooks import record_activations
from regress.dump.taps import recording
from regress.engine.build import Run, build
from regress.engine.config.schema import Config
from regress.engine.environment import configure_torch
from regress.engine.evaluation import PASS_RATE, due, pass_rate
from regress.engine.outputs import Outputs
from regress.engine.tracking import Log, tracking
from regress.errors import RegressError, reason


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
    disable_progress_bar()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bars, _memory_errors(), Outputs(Path(config.output_dir)) as outputs, ExitStack() as resources:

        def progress(name: str, total: int) -> Callable[[], None]:
            task = bars.add_task(name, total=total)
            return lambda: bars.advance(task)

        log = resources.enter_context(tracking(config, outputs))
        run = build(config, resources, progress)
        _record(run, resources)
        metrics, pass_rates = _loop(run, log, progress("training", config.max_steps), console)
        outputs.save(run.trainer.policy.model, run.tokenizer)
    dump_dir = run.recorder.folder if run.recorder is not None else None
    return RunResult(outputs.folder, dump_dir, metrics, pass_rates)


def _loop(
    run: Run, log: Log, advance: Callable[[], None], console: Console
) -> tuple[dict[str, float], dict[int, float]]:
    metrics: dict[str, float] = {}
    pass_rates: dict[int, float] = {}
    for step in range(run.config.max_steps + 1):
        row: dict[str, float] = {}
        if due(run.config, step):
            row[PASS_RATE] = pass_rates[step] = pass_rate(run.trainer.worker, run.prompts.evaluation(), step)
            console.print(f"step {step}: greedy pass rate on held-out prompts {pass_rates[step]:.3f}")
        if step < run.config.max_steps:
            metrics = run.trainer.step(step)
            row |= metrics
            advance()
        if row:
            log(step, row)
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
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _too_large(error) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise _too_large(error) from error


def _too_large(error: BaseException) -> RegressError:
    return RegressError(
        f"the memory does not suffice ({reason(error)}); lower batching.micro_batch_size, batching.pad_to_multiple_of, "
        "the sizes in data, or those of the model"
    )
