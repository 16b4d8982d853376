"""Memory of bodies: it is taken as they arrive, and no owner of a key waits for the bodies of another one."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

_SMALL = 1 << 16
"""Bytes of a body that waits for nobody: as many as there may be connections are little."""


@dataclass(eq=False)
class Part:
    """Bytes that one body holds.

    Attributes:
        size: bytes that it says it has.
    """

    owner: str
    size: int
    taken: int = 0


class Memory:
    """Bytes that all bodies of a kind hold.

    A body waits to begin while earlier ones of its owner leave it no room in a share, as large as they say that they
    are. Then it waits for bytes while there are none, but for the first one of each owner, which always goes on.

    Args:
        most: number of bytes; the first body of each owner may have more.
        largest: bytes of the largest body.
        owners: number of owners.
    """

    def __init__(self, most: int, largest: int, owners: int) -> None:
        self._most, self._share = most, max(largest, most // max(owners, 1))
        self._announced: Counter[str] = Counter()
        self._parts: dict[Part, None] = {}  # in the order in which they began
        self._freed = asyncio.Condition()
        self._doors: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def held(self) -> int:
        """Bytes that are taken at the moment."""
        return sum(part.taken for part in self._parts)

    @asynccontextmanager
    async def part(self, owner: str, size: int) -> AsyncIterator[Part]:
        """Give the part of a body, which says that it is so large; its bytes are free when the block ends."""
        part = Part(owner, size if size > _SMALL else 0)
        if part.size:
            async with self._doors[owner], self._freed:  # in the order in which they came
                await self._freed.wait_for(lambda: self._announced[owner] + size <= self._share)
                self._announced[owner] += size
        self._parts[part] = None
        try:
            yield part
        finally:
            async with self._freed:
                self._announced[owner] -= part.size
                del self._parts[part]
                self._freed.notify_all()

    async def take(self, part: Part, size: int) -> None:
        """Take more bytes for a body, once there are any."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._may_take(part, size))
            part.taken += size

    def _may_take(self, part: Part, size: int) -> bool:
        if part.taken + size <= _SMALL or self.held + size <= self._most:
            return True
        return part is next(one for one in self._parts if one.size and one.owner == part.owner)
