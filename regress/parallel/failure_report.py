"""Failures of one rank, reported to the others, which would only see a lost connection."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
)  # torch.distributed does not export them to type checkers

from regress.errors import RegressError, lost_connection, reason

_ERROR, _COUNT = "error", "errors"
_PATIENCE = timedelta(seconds=2)
"""Time in which a lost rank may still report its failure."""


@contextmanager
def reporting_failures() -> Iterator[None]:
    """Report the errors of a rank's work through the store of the default process group.

    Ranks that fail together agree on one error before they leave. This covers all other failures: the other
    ranks notice them when their connections close, and still learn the reason if the store outlives the
    failed rank, as that of a launcher does.

    Raises:
        RegressError: the error of the first rank that failed, or that a rank was lost without a report.
    """
    store = PrefixStore("regress", dist.distributed_c10d._get_default_store())
    try:
        yield
    except RegressError as error:
        first = _first_reported_error(store, error)
        if str(first) == str(error):
            raise
        raise first from error
    except Exception as error:
        if lost_connection(error):
            raise _heard(store) or _lost(error) from error
        _first_reported_error(
            store, RegressError(f"rank {dist.get_rank()} ended by an error of the program ({reason(error)})")
        )
        raise


def _first_reported_error(store: Store, error: RegressError) -> RegressError:
    """Return the first error that any rank reported."""
    try:
        if store.add(_COUNT, 1) > 1:
            return _heard(store) or error
        store.set(_ERROR, pickle.dumps(error).hex())
    except RuntimeError:  # the store is gone, and with it the other ranks
        return error
    return error


def _heard(store: Store) -> RegressError | None:
    try:
        store.wait([_ERROR], _PATIENCE)
        found = pickle.loads(bytes.fromhex(store.get(_ERROR).decode()))  # written by a rank
    except RuntimeError:
        return None
    return found if isinstance(found, RegressError) else None


def _lost(error: Exception) -> RegressError:
    return RegressError(f"""rank {dist.get_rank()} lost another rank, which ended without a word or did not answer for
    parallel.timeout seconds ({reason(error)}); look at what the others printed first, and at dmesg for lack of
    memory""")
