"""Functions that ranks run in tests of killed and resumed training; a module of its own, because ranks import it."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from resource import RLIMIT_FSIZE, setrlimit
from typing import Any

from rich.console import Console
from torch import distributed

from regress import durable_files
from regress.dump import metrics_file
from regress.engine import causal_lm_policy, evaluation, grpo_trainer, optimizer, rollout_worker
from regress.engine.checkpoint import checkpoint_saver, checkpoint_writer
from regress.engine.config import load_config
from regress.engine.run_files import Outputs
from regress.errors import RegressError
from regress.parallel.parallel_policy import ParallelPolicy
from regress.parallel.parallel_run import train


def trained(
    overrides: Sequence[str],
    config_name: str | None = None,
    window: tuple[str, int] | None = None,
    after: float | None = None,
    victim: int | None = None,
    allow_change: Sequence[str] = (),
) -> dict[str, Any]:
    """A whole run of ``regress train``, or one that the kernel ends.

    Args:
        config_name: name of the configuration; None: the default one.
        window: name of a place in ``WINDOWS``, and the number of times that it is passed unharmed; then comes SIGKILL.
        after: seconds of this process's time on the processor after which it ends, wherever it is.
        victim: the only rank that is killed; None: all of them.
    """
    if victim is None or distributed.get_rank() == victim:
        if window is not None:
            WINDOWS[window[0]](_Fuse(window[1]))
        if after is not None:  # nothing handles SIGPROF, so its end is that of SIGKILL: no line more is run
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, after)
    said = io.StringIO()
    result = train(
        load_config(config_name=config_name, overrides=list(overrides), environ={}).config,
        Console(file=said, width=200),
        allow_change=allow_change,
    )
    return {
        "metrics": result.metrics,
        "pass_rates": result.pass_rates,
        "said": said.getvalue(),
        "cpu": time.process_time(),
    }


def refused(overrides: Sequence[str], room: tuple[int, int] | None = None) -> str:
    """Return the sentence with which a run ends on this rank, and nothing if it ends well.

    Args:
        room: number of checkpoints after which the kernel lets no file grow larger, and the size in bytes.
    """
    if room is not None:
        count, size = room
        _after(checkpoint_writer, "publish")(_AtLast(count, lambda: setrlimit(RLIMIT_FSIZE, (size, size))))
    try:
        trained(overrides)
    except RegressError as error:
        return str(error)
    return ""


class _AtLast:
    """Calls a function when it is called for the n-th time."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left, self._then = count, then

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._then()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Fuse:
    """Kills this process when it is called for the n-th time."""

    def __init__(self, unharmed: int) -> None:
        self._left = unharmed

    def __call__(self) -> None:
        if self._left == 0:
            _die()
            threading.Event().wait()  # a signal may take a moment
        self._left -= 1


def _before(target: Any, name: str) -> Callable[[Callable[[], None]], None]:
    def arm(fuse: Callable[[], None]) -> None:
        known = getattr(target, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            fuse()
            return known(*args, **kwargs)

        setattr(target, name, wrapped)

    return arm


def _after(target: Any, name: str) -> Callable[[Callable[[], None]], None]:
    def arm(fuse: Callable[[], None]) -> None:
        known = getattr(target, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = known(*args, **kwargs)
            fuse()
            return found

        setattr(target, name, wrapped)

    return arm


def _half_weights(fuse: _Fuse) -> None:
    known = checkpoint_writer.save_weights

    def wrapped(model: Any, weights: Any, folder: Path) -> None:
        known(model, weights, folder)
        path = next(folder.glob("*.safetensors"))
        os.truncate(path, path.stat().st_size // 2)
        fuse()
        known(model, weights, folder)

    checkpoint_writer.save_weights = wrapped


def _while_pruning(fuse: _Fuse) -> None:
    known = shutil.rmtree

    def wrapped(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith(".pruned-") and Path(path).exists():
            next(iter(Path(path).glob("*.json"))).unlink()
            fuse()
        known(path, *args, **kwargs)

    shutil.rmtree = wrapped  # type: ignore[assignment]


def _torn_row(fuse: _Fuse) -> None:
    known = metrics_file.MetricsWriter._put

    def wrapped(self: Any, data: bytes) -> None:
        known(self, data[: len(data) // 2])
        fuse()
        known(self, data[len(data) // 2 :])

    metrics_file.MetricsWriter._put = wrapped  # type: ignore[method-assign]


def _half_a_file(of: Callable[[Path], bool]) -> Callable[[_Fuse], None]:
    """While a file is written under the name that it has until it is whole."""

    def arm(fuse: _Fuse) -> None:
        known = durable_files._fill

        def wrapped(path: Path, chunks: Any, *rest: Any) -> Any:
            if of(path):
                chunks = [bytes(chunk) for chunk in chunks]
                whole = b"".join(chunks)
                known(path, [whole[: len(whole) // 2]], *rest)
                fuse()
            return known(path, chunks, *rest)

        durable_files._fill = wrapped

    return arm


def _while_sampling(greedy: bool) -> Callable[[Callable[[], None]], None]:
    def arm(fuse: Callable[[], None]) -> None:
        known = rollout_worker.sample

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if args[2].greedy == greedy:
                fuse()
            return known(*args, **kwargs)

        rollout_worker.sample = wrapped

    return arm


def _accumulation(fuse: _Fuse) -> None:
    """After the first microbatch of an update."""
    known, first = grpo_trainer.train_step, [False]

    def stepping(*args: Any, **kwargs: Any) -> Any:
        first[0] = True
        return known(*args, **kwargs)

    def passed() -> None:
        if first[0]:
            first[0] = False
            fuse()

    grpo_trainer.train_step = stepping
    for kind in (causal_lm_policy.LocalPolicy, ParallelPolicy):
        _after(kind, "_backward")(passed)


def _tracker_flush(fuse: _Fuse) -> None:
    from torch.utils.tensorboard import SummaryWriter

    _before(SummaryWriter, "flush")(fuse)


WINDOWS: dict[str, Callable[[Callable[[], None]], None]] = {
    "snapshot": _after(checkpoint_saver, "take"),
    "half of the weights": _half_weights,
    "before the manifest": _before(checkpoint_writer, "write_manifest"),
    "before the rename": _before(checkpoint_writer, "publish"),
    "after the rename": _after(checkpoint_writer, "publish"),
    "pruning": _while_pruning,
    "evaluation": _while_sampling(greedy=True),
    "after an evaluation": _after(evaluation.Evaluation, "run"),
    "rollout": _while_sampling(greedy=False),
    "accumulation": _accumulation,
    "before an update": _before(optimizer, "update"),
    "between updates": _after(grpo_trainer, "train_step"),
    "half of a row": _torn_row,
    "half of a record": _half_a_file(lambda path: path.parent.parent.name == "debug_dump"),
    "tracker flush": _tracker_flush,
    "half of the tracking state": _half_a_file(lambda path: path.name.endswith("-wandb_sync_state.json")),
    "final model": _after(Outputs, "save"),
}
"""Places in a run: the function that arms a kill there."""
