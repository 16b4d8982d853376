"""Run on as many ranks as its configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from regress.engine import training_run
from regress.engine.config.config_schema import Config
from regress.engine.earlier_run import Earlier
from regress.parallel.distributed_ranks import opened_world


def train(
    config: Config,
    console: Console,
    *,
    allow_change: Sequence[str] = (),
    stop_after: int | None = None,
    before_resume: Callable[[], None] | None = None,
    earlier: Earlier = "keep",
) -> training_run.RunResult:
    """Run `regress.engine.training_run.train` on this rank, among those that a launcher has started.

    Args:
        allow_change: keys that may differ from those of the checkpoint although they change what is computed.
        stop_after: number of optimizer updates after whose checkpoint the run ends with `Stopped`.
        before_resume: looks at the checkpoint on the first rank; what it raises ends all of them.
        earlier: what becomes of another run in ``output_dir``.

    Raises:
        RegressError: whatever a user can mend, in one sentence.
    """
    with opened_world(config) as world:
        return training_run.train(
            config,
            console,
            world,
            allow_change=allow_change,
            stop_after=stop_after,
            before_resume=before_resume,
            earlier=earlier,
        )
