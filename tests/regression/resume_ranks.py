"""Functions that ranks run in tests of killed and resumed training; a module of its own, because ranks import it."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import distributed

from regress.dump import files as dump_files
from regress.dump import metrics_file
from regress.engine import loop, optim, policy, rollout, trainer
from regress.engine.checkpoint import saver, write
from regress.engine.config import load_config
from regress.engine.outputs import Outputs
from regress.parallel.policy import ParallelPolicy
from regress.parallel.run import train


def trained(
    overrides: Sequence[str],
    window: tuple[str, int] | None = None,
    after: float | None = None,
    victim: int | None = None,
    allow_change: Sequence[str] = (),
) -> dict[str, Any]:
    """A whole run of ``regress train``, or one that ends by SIGKILL.

    Args:
        window: name of a place in ``WINDOWS``, and the number of times that it is passed unharmed.
        after: seconds after which it is killed, wherever it is.
        victim: the only rank that is killed; None: all of them.
    """
    if victim is None or distributed.get_rank() == victim:
        if window is not None:
            WINDOWS[window[0]](_Fuse(window[1]))
        if after is not None:
            timer = threading.Timer(after, _die)
            timer.daemon = True
            timer.start()
    said = io.StringIO()
    result = train(
        load_config(overrides=list(overrides), environ={}).config,
        Console(file=said, width=200),
        allow_change=allow_change,
    )
    return {"metrics": result.metrics, "pass_rates": result.pass_rates, "said": said.getvalue()}


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


def _before(target: Any, name: str) -> Callable[[_Fuse], None]:
    def arm(fuse: _Fuse) -> None:
        known = getattr(target, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            fuse()
            return known(*args, **kwargs)

        setattr(target, name, wrapped)

    return arm


def _after(target: Any, name: str) -> Callable[[_Fuse], None]:
    def arm(fuse: _Fuse) -> None:
        known = getattr(target, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = known(*args, **kwargs)
            fuse()
            return found

        setattr(target, name, wrapped)

    return arm


def _half_weights(fuse: _Fuse) -> None:
    known = write.save_weights

    def wrapped(model: Any, weights: Any, folder: Path) -> None:
        known(model, weights, folder)
        path = next(folder.glob("*.safetensors"))
        os.truncate(path, path.stat().st_size // 2)
        fuse()
        known(model, weights, folder)

    write.save_weights = wrapped


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


def _half_a_record(fuse: _Fuse) -> None:
    known = dump_files._write

    def wrapped(path: Path, chunks: Any) -> Any:
        stamp = known(path, chunks)
        if path.parent.parent.name == "debug_dump":
            fuse()
        return stamp

    dump_files._write = wrapped


def _in_the_rollout(fuse: _Fuse) -> None:
    known = rollout.sample

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not args[2].greedy:
            fuse()
        return known(*args, **kwargs)

    rollout.sample = wrapped


def _accumulation(fuse: _Fuse) -> None:
    for kind in (policy.LocalPolicy, ParallelPolicy):
        _after(kind, "_backward")(fuse)


WINDOWS: dict[str, Callable[[_Fuse], None]] = {
    "snapshot": _after(saver, "take"),
    "half of the weights": _half_weights,
    "before the manifest": _before(write, "write_commit"),
    "before the rename": _before(write, "publish"),
    "after the rename": _after(write, "publish"),
    "pruning": _while_pruning,
    "evaluation": _after(loop, "pass_rate"),
    "rollout": _in_the_rollout,
    "accumulation": _accumulation,
    "before an update": _before(optim, "update"),
    "between updates": _after(trainer, "train_step"),
    "half of a row": _torn_row,
    "half of a record": _half_a_record,
    "final model": _after(Outputs, "save"),
}
"""Places in a run: the function that arms a kill there."""
