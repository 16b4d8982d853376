"""Replays of a command divided among processes, which share its cache: each takes the next that nobody has taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING

from regress.replay.pool import close_shared_pool

if TYPE_CHECKING:
    from regress.replay.cache import ReplayCache
    from regress.replay.matrix import Replay

_PATIENCE = 10.0
"""Seconds that a process has to end after it was asked to."""


@contextmanager
def helpers(cache: ReplayCache, chosen: Sequence[Replay], count: int) -> Iterator[None]:
    """Have further processes run replays meanwhile, and end with the block.

    They are forked, so this process must not have started threads or loaded torch yet.
    """
    context = get_context("fork")
    running = [context.Process(target=_help, args=(cache, chosen, os.getpid())) for _ in range(count)]
    for process in running:
        process.start()
    try:
        yield
    except BaseException:
        for process in running:
            process.terminate()
        raise
    finally:
        for process in running:
            process.join(_PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()


def take(cache: ReplayCache, chosen: Sequence[Replay], done: Callable[[Replay], None]) -> None:
    """Run each replay that no other process has taken; ``done`` is told of it."""
    for one in chosen:
        if cache.claim(one):
            cache.outcome(one)
            done(one)


def _help(cache: ReplayCache, chosen: Sequence[Replay], parent: int) -> None:
    def going_on(_: Replay) -> None:
        if os.getppid() != parent:  # killed: nobody waits for the others
            raise SystemExit

    try:
        take(cache, chosen, going_on)
    except KeyboardInterrupt:  # the command tells of it
        pass
    finally:
        close_shared_pool()
