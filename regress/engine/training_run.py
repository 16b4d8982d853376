"""Run from start to end: build, train, evaluate, save."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from transformers.utils.logging import disable_progress_bar

from regress.dump.dump_location import Location, is_remote
from regress.engine import run_log
from regress.engine.checkpoint.checkpoint_resume import dump_places, open_checkpoint, restore
from regress.engine.checkpoint.checkpoint_saver import Saver
from regress.engine.checkpoint.trainer_state import CheckpointState
from regress.engine.config.config_messages import absolute
from regress.engine.config.config_schema import Config
from regress.engine.determinism_environment import configure_torch, export_environment
from regress.engine.earlier_run import Earlier, check_earlier, remove_earlier
from regress.engine.engine_ranks import SingleProcess, World, raise_on_all_ranks
from regress.engine.evaluation import due
from regress.engine.run_construction import Places, Progress, Run, build
from regress.engine.run_files import Outputs
from regress.engine.run_log import LOGGER, MOCK, megabytes, printed
from regress.engine.step_metrics import Values
from regress.engine.tracking.metrics_log import Log, open_log
from regress.engine.training_loop import Loop, Start
from regress.errors import RegressError, reason


class Builder(Protocol):
    """Function that builds the parts of a run, with the arguments of `regress.engine.run_construction.build`."""

    def __call__(
        self,
        config: Config,
        resources: ExitStack,
        progress: Progress,
        world: World | None = None,
        *,
        resumed: Places | None = None,
    ) -> Run: ...


@dataclass(frozen=True)
class RunResult:
    """Directory of a run's files, the metrics of its last step, and the held-out pass rate by step.

    ``main`` is True on the rank that wrote them.
    """

    output_dir: Path
    dump_dir: Location | None
    metrics: Values
    pass_rates: dict[int, float]
    main: bool = True


def train(
    config: Config,
    console: Console,
    world: World | None = None,
    *,
    allow_change: Sequence[str] = (),
    stop_after: int | None = None,
    builder: Builder = build,
    before_resume: Callable[[], None] | None = None,
    earlier: Earlier = "keep",
) -> RunResult:
    """Train as configured. A progress bar and a line per evaluation go to the console, the rest to files.

    With several ranks, the first writes the files, and each records its own tensors.

    Args:
        allow_change: keys that may differ from those of the checkpoint although they change what is computed.
        stop_after: number of optimizer updates after whose checkpoint the run ends with `Stopped`.
        builder: builds the parts of the run.
        before_resume: called on the first rank before a run that goes on is opened; what it raises ends all ranks.
        earlier: what becomes of another run in ``output_dir``; one that is replaced stays until the new one is built.

    Raises:
        RegressError: whatever a user can mend, in one sentence.
    """
    export_environment(config.system_envs)
    configure_torch(config.threads)
    disable_progress_bar()
    world = world or SingleProcess()
    bars = _bars(console, shown=console.is_terminal and world.main)

    def warn(text: str) -> None:
        console.print(f"warning: {text}", style="yellow", markup=False)

    with bars, printed(console, world.main), _memory_errors(), ExitStack() as files:
        if before_resume is not None and config.trainer.resume_from_checkpoint is not None:
            raise_on_all_ranks(world, before_resume if world.main else lambda: None)
        raise_on_all_ranks(world, lambda: check_earlier(config, earlier) if world.main else None)
        _announce(config)
        outputs = raise_on_all_ranks(world, lambda: files.enter_context(_outputs(config, world)))
        opened = partial(open_log, config, main=world.main, warn=warn, anew=earlier == "replace")
        log = raise_on_all_ranks(world, lambda: files.enter_context(opened()))
        with ExitStack() as resources:
            progress = partial(_task, bars)
            state = open_checkpoint(config, world, allow_change, files)
            run = builder(config, resources, progress, world, resumed=dump_places(config, state))
            if earlier == "replace":
                raise_on_all_ranks(world, lambda: remove_earlier(config) if world.main else None)
            loop = Loop(run, log, progress("training", config.max_steps), console)
            loop.start(_started(run, log, state, console))
            said, wrote = run_log.LOGGER.info, loop.checkpointed
            saver = Saver(run, state, stop_after=stop_after, said=said, wrote=wrote)
            loop.saver = resources.enter_context(saver)
            loop.train()
            loop.saver.finish()
            _save(run, outputs)
        raise_on_all_ranks(world, files.close)
    recorded = run.recorder.folder if run.recorder is not None else None
    dump_dir = recorded if run.remote is None else run.remote.dump_dir
    return RunResult(Path(config.output_dir), dump_dir, loop.metrics, loop.pass_rates, world.main)


def _save(run: Run, outputs: Outputs | None) -> None:
    """Save the model of a run at its end, in ``final/`` or where it lies; all ranks call this together."""
    if run.remote is not None:
        facts = run.remote.finish()
        if outputs is not None:
            outputs.save_elsewhere(facts, run.tokenizer)
        return
    model = run.trainer.policy.whole_model()

    def save() -> None:
        if outputs is not None:
            outputs.save(model, run.tokenizer, merged=run.config.model.lora.save_merged)

    raise_on_all_ranks(run.trainer.world, save)


def _bars(console: Console, *, shown: bool) -> Bars:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Bars(*columns, console=console, transient=True, disable=not shown)


def _task(bars: Bars, name: str, total: int) -> Callable[[], None]:
    """Add a bar, and return what advances it by one."""
    task = bars.add_task(name, total=total)
    return lambda: bars.advance(task)


def _announce(config: Config) -> None:
    """Log what the run will do, before it does anything."""
    run_log.lengths(config)
    if config.rollout_mock.enable:
        run_log.rollout_mock(config)
        if config.rollout_mock.mode == "dump":
            log_estimate(config)


def _started(run: Run, log: Log, state: CheckpointState | None, console: Console) -> Start:
    """Return where the run starts, after putting the state of a checkpoint into it."""
    main = run.trainer.world.main
    if state is None:
        if run.config.trainer.resume_from_checkpoint is not None and main:
            console.print(f"no checkpoint in {run.config.trainer.checkpoint_dir} yet: starting at step 0")
        return Start()
    log.resumed(state.path.name, step=state.step, update=state.update)
    unfinished = restore(run, state)
    if main:
        console.print(f"going on from {state.path}: {state.step} steps and {state.update} updates are done")
        run_log.tracking_resumed(log.state_dict(), run.config.tracking.project)
    return Start(state.step, unfinished, state.pass_rates, resumed=True)


def _outputs(config: Config, world: World) -> AbstractContextManager[Outputs | None]:
    """Open the files of a run, which its first rank writes."""
    return Outputs(Path(config.output_dir)) if world.main else nullcontext()


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
    return RegressError(f"""the memory does not suffice ({reason(error)}); lower batching.micro_batch_size,
    batching.pad_to_multiple_of, the sizes in data, or those of the model""")


_TOKEN_BYTES = 8 + 1 + 8
"""Token, loss mask and log-prob."""
_TEXT_BYTES = 2 * 4
"""Text of a token, in the completion and in its turn."""
_SAMPLE_BYTES = 1024
"""Ids, rewards and field names of a sample."""


def recording_size(config: Config) -> tuple[int, int]:
    """Return the bytes that the recording of one step may take, and that of all steps and evaluations."""
    sample = config.data.max_seq_length * (_TOKEN_BYTES + _TEXT_BYTES) + _SAMPLE_BYTES
    step = config.data.prompts_per_step * config.data.group_size * sample
    evaluations = sum(due(config, number) for number in range(config.max_steps + 1))
    return step, step * config.max_steps + evaluations * config.task.eval_size * sample


def log_estimate(config: Config) -> None:
    """Log the disk space of recorded rollouts; warn if less is free."""
    folder = config.rollout_mock.dump_dir
    step, whole = recording_size(config)
    estimate = f"disk: up to {megabytes(step)} a step, {megabytes(whole)} for max_steps={config.max_steps}"
    if is_remote(folder):
        LOGGER.info("%s %s", MOCK, estimate)
        return
    free = shutil.disk_usage(_existing(Path(folder))).free
    say = LOGGER.warning if free < whole else LOGGER.info
    say("%s %s; %s are free for %s", MOCK, estimate, megabytes(free), folder)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = absolute(folder)
    return next(path for path in (folder, *folder.parents) if path.exists())
