"""Run of a golden case under a variant: the engine's own training steps on recorded rollouts, dumped.

A single rank runs in this process; several run in a pool, or under a launcher, and then this process needs no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regress.dump.dump_files import write_atomically
from regress.dump.dump_reader import DumpReader
from regress.dump.formats import format_named
from regress.dump.record import Record
from regress.dump.trajectory import to_record
from regress.engine.config.config_schema import Config
from regress.errors import ConfigError
from regress.golden.golden_case import GREEDY, GoldenCase
from regress.parallel.launch.cluster_launchers import Launch
from regress.replay.case_reads import trajectories_of
from regress.replay.replay_configuration import replay_config
from regress.replay.replay_plan import world_size
from regress.replay.replay_pool import shared_pool, standstill_of
from regress.replay.run_changes import Around, Prepare
from regress.replay.variant import Precision, Variant

if TYPE_CHECKING:
    from regress.engine.run_construction import Run

FORMAT = format_named("safetensors")


def replay(
    case: GoldenCase,
    variant: Variant,
    precision: Precision,
    folder: Path,
    *,
    steps: int | None = None,
    prepare: Prepare | None = None,
    launch: Launch | None = None,
    overrides: Mapping[str, Any] | None = None,
    around: Around | None = None,
) -> DumpReader:
    """Replay a case and return the dump, which lies in ``folder/dump``.

    Args:
        prepare: function that prepares the run; for several ranks one of a module, which runs on each.
        launch: starts the ranks instead.
        overrides: configuration specific to this machine, such as the device.
        around: makes the context of the run in every rank, such as one that breaks the engine; for several ranks it is
            pickled.

    Raises:
        RegressError: if the case is damaged, the configuration impossible, or a step or a rank fails.
    """
    count = len(trajectories_of(case)) if steps is None else steps
    if variant.program:
        if prepare is not None or launch is not None:
            raise ConfigError(f"""variant {variant.name} runs the whole program in processes of this machine's pool,
            which neither a launcher starts nor a fault changes; leave it out""")
        from regress.replay.program_replay import replay_program

        return DumpReader(replay_program(case, variant, precision, folder, count, overrides, around))
    config = replay_config(case, variant, precision, count, folder, overrides)
    ranks = world_size(case.config, variant.overrides)
    what = f"{case.name}/{variant.name}{precision.suffix}"
    seconds = standstill_of(config)
    if launch is not None:
        launch.run(folder / "config.yaml", ranks, folder / "ranks", what, standstill=seconds)
    elif ranks == 1:
        run_steps(config, prepare, around)
    else:
        arguments = {"config": config, "prepare": prepare, "around": around}
        shared_pool().run(run_steps, arguments, ranks, standstill=seconds, folder=folder / "ranks", what=what)
    return DumpReader(config.debug.dump_dir)


def run_steps(config: Config, prepare: Prepare | None = None, around: Around | None = None) -> None:
    """Run all training steps of a configuration, without evaluation, tracking or a final model; on every
    rank of it, in the context that is made around it.
    """
    from regress.engine.run_construction import build
    from regress.parallel.distributed_ranks import opened_world

    with (
        torch_settings(config.threads),
        (around or nullcontext)() as broken,
        opened_world(config) as world,
        ExitStack() as resources,
    ):
        run = build(config, resources, no_progress, world)
        for change in (prepare, broken):
            if change is not None:
                change(run)
        for step in range(config.max_steps):
            if config.rollout_worker.type != "mock":
                record_greedy(run, step, Path(config.output_dir))
            run.trainer.step(step)


def record_greedy(run: Run, step: int, folder: Path) -> None:
    """Sample the prompts of a step greedily, by all ranks together; the first one writes ``greedy/`` of a folder."""
    from regress.engine.rollout_worker import VAL

    trainer = run.trainer
    found = trainer.worker.rollout(step, trainer.prompts(step), VAL)
    if trainer.world.main:
        write_rollouts(folder / GREEDY, to_record(found, step, trainer.trajectory_meta(step)))


def write_rollouts(folder: Path, record: Record) -> Path:
    """Write the rollouts of a step as a file of a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.where.stem}.{FORMAT.name}"
    write_atomically(path, FORMAT.encode(record))
    return path


def no_progress(_: str, __: int) -> Callable[[], None]:
    """Return a function that shows no progress."""
    return lambda: None


@contextmanager
def torch_settings(threads: int) -> Iterator[None]:
    """Set threads and deterministic switches of the run; restore those of the surrounding process afterwards."""
    import torch
    from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    from regress.engine.determinism_environment import configure_torch

    before = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    recursion = sys.getrecursionlimit()  # torch.compile raises it for good
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    bars = is_progress_bar_enabled()
    configure_torch(threads)
    disable_progress_bar()
    try:
        yield
    finally:
        sys.setrecursionlimit(recursion)
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
        if bars:
            enable_progress_bar()
