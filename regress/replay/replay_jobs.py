"""Replays of a command divided among processes, which share its cache: each takes the next that nobody has taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING

from regress.progress_bar import progress
from regress.replay.replay_pool import close_shared_pool

if TYPE_CHECKING:
    from regress.compare.verdicts.tolerance_overrides import Overrides
    from regress.replay.command_replays import Results, Session
    from regress.replay.replay_cache import ReplayCache
    from regress.replay.test_matrix import Replay
    from regress.replay.variant import Variant

_PATIENCE = 10.0
"""Seconds that a process has to end after it was asked to."""


def run_all(
    chosen: Sequence[Replay],
    table: dict[str, Variant],
    overrides: Overrides,
    session: Session,
    named: Sequence[str],
    jobs: int,
) -> Results:
    """Run and judge replays in so many processes, this one among them, with a line of progress.

    Args:
        table: variants in which bitwise references are looked up.
        named: cases that were asked for by name, of each of which something has to be judged.
    """
    from regress.replay.command_replays import Results
    from regress.replay.token_value_tables import chosen_tables

    results = Results()
    with (
        session.cache(table, overrides) as cache,
        _helpers(cache, chosen, jobs - 1),
        progress(total=len(chosen)) as bar,
    ):
        counted: set[str] = set()

        def count(one: Replay) -> None:
            if one.name not in counted:
                bar.advance()
            counted.add(one.name)

        if jobs > 1:
            _take(cache, chosen, count)
        for one in chosen:
            bar.name(one.name)
            results.add(one, cache.outcome(one))
            count(one)
        results.require(named)
        results.tokens = chosen_tables(cache.root, results.all_calls)
    return results


@contextmanager
def _helpers(cache: ReplayCache, chosen: Sequence[Replay], count: int) -> Iterator[None]:
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


def _take(cache: ReplayCache, chosen: Sequence[Replay], done: Callable[[Replay], None]) -> None:
    """Run each replay that no other process has taken; ``done`` is called with it."""
    for one in chosen:
        if cache.claim(one):
            cache.outcome(one)
            done(one)


def _help(cache: ReplayCache, chosen: Sequence[Replay], parent: int) -> None:
    def going_on(_: Replay) -> None:
        if os.getppid() != parent:  # killed: nobody waits for the others
            raise SystemExit

    try:
        _take(cache, chosen, going_on)
    except KeyboardInterrupt:  # the command tells of it
        pass
    finally:
        close_shared_pool()
