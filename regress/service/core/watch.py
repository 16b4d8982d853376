"""Watch over the ranks of a launcher: asked in trouble, each tells if it waits for the others or not."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

_COLLECTIVE = "torch/distributed/distributed_c10d.py"
_ASKED, _WAITS, _BUSY = "asked", b"waits", b"busy"
_EVER = timedelta(days=3650)
_PATIENCE = timedelta(seconds=5)
"""Time in which a rank that can answer does."""


class Watch:
    """One rank's part of the watch; the thread that makes it is the one that is watched.

    Args:
        rank: the rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._watched = threading.get_ident()
        if rank:
            threading.Thread(target=self._answer, name="regress-watch", daemon=True).start()

    def hanging(self) -> list[int]:
        """Return the ranks that do not wait for others, or do not answer; asked on the first rank.

        Empty if nothing can be learned.
        """
        own = _WAITS if self._waits() else _BUSY
        answers = self._answers()
        return [rank for rank, answer in {0: own, **answers}.items() if answer != _WAITS] if answers else []

    def silent(self) -> list[int]:
        """Return the ranks that do not answer; asked on the first rank. Empty if nothing can be learned."""
        return [rank for rank, answer in self._answers().items() if answer is None]

    def _answers(self) -> dict[int, bytes | None]:
        with suppress(Exception):  # the store may have gone with the launcher
            store = _store()
            store.set(_ASKED, b"1")
            return {rank: _told(store, rank) for rank in range(1, self._world_size)}
        return {}

    def _answer(self) -> None:
        with suppress(Exception):  # the service ends
            store = _store()
            store.wait([_ASKED], _EVER)
            store.set(f"rank{self._rank}", _WAITS if self._waits() else _BUSY)

    def _waits(self) -> bool:
        frame = sys._current_frames().get(self._watched)
        while frame is not None:
            if frame.f_code.co_filename.endswith(_COLLECTIVE):
                return True
            frame = frame.f_back
        return False


def _told(store: Any, rank: int) -> bytes | None:
    try:
        store.wait([f"rank{rank}"], _PATIENCE)
        return bytes(store.get(f"rank{rank}"))
    except Exception:  # the rank has ended, or is stopped
        return None


def named(ranks: list[int], world_size: int) -> str:
    """Return the ranks as the beginning of a sentence."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} of {world_size}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} of {world_size}"


def _store() -> Any:
    """Return a connection of one's own to the store of the ranks: a wait keeps no other thread waiting."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    default: Any = _get_default_store()
    return PrefixStore("regress-watch", default.clone())
