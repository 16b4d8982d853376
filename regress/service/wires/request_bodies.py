"""Bodies of requests: read within bounds of size, time and memory, and expanded within bounds.

Memory is taken as they arrive, and no owner of a key waits for the bodies of another one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import zstandard
from starlette.requests import ClientDisconnect, Request

from regress.service.service_api import ServiceError
from regress.service.wires.app_settings import Limits

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


_STEP = 1 << 20


class Bodies:
    """Reader of bodies; those of all clients hold no more than `Limits.held_bytes`, and the first one of each.

    Half of the bytes is for what arrives, half for what is expanded, which then waits for no client.

    Args:
        limits: bounds of a request.
        owners: number of owners of keys.
    """

    def __init__(self, limits: Limits, owners: int) -> None:
        self._limits = limits
        half = limits.held_bytes // 2
        self._arriving = Memory(half, limits.body_bytes, owners)
        self._expanded = Memory(half, limits.expanded_bytes, owners)

    @property
    def held(self) -> int:
        """Bytes that are taken at the moment."""
        return self._arriving.held + self._expanded.held

    @asynccontextmanager
    async def read(self, request: Request, owner: str) -> AsyncIterator[bytes]:
        """Give the expanded body of a request of an owner, whose memory is taken until the block ends.

        Raises:
            ServiceError: it is too large, too slow, or encoded in a way that is not supported.
        """
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "", "zstd"):
            raise ServiceError(
                "the body's content encoding is not supported; send zstd or none",
                code="unsupported_media_type",
            )
        size = self._announced(request)
        async with self._arriving.part(owner, size) as part:
            body = await self._within_time(request, size, part)
            if encoding != "zstd":
                yield body
                return
            large = await asyncio.to_thread(expanded_size, body, self._limits)
            async with self._expanded.part(owner, large) as expanded:
                await self._expanded.take(expanded, large)
                yield await asyncio.to_thread(expand, body, self._limits)

    async def _within_time(self, request: Request, size: int, part: Part) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._receive(request, size, part)
        except TimeoutError:
            raise ServiceError(
                f"the body did not arrive within {self._limits.body_seconds:g} seconds", code="too_slow"
            ) from None
        except ClientDisconnect:
            raise ServiceError("the client left while it sent the body") from None

    def _announced(self, request: Request) -> int:
        """Return the size of a body as its header says, or the largest one if none does."""
        announced = request.headers.get("content-length")
        if announced is None:
            return self._limits.body_bytes if "transfer-encoding" in request.headers else 0
        if not announced.isascii() or not announced.isdigit() or len(announced) > 15:
            raise ServiceError("the header Content-Length is not a number of bytes")
        if int(announced) > self._limits.body_bytes:
            raise _too_large(self._limits.body_bytes)
        return int(announced)

    async def _receive(self, request: Request, size: int, part: Part) -> bytes:
        pieces = bytearray()
        async for piece in request.stream():
            if len(pieces) + len(piece) > min(size, self._limits.body_bytes):
                raise _too_large(self._limits.body_bytes)
            await self._arriving.take(part, len(piece))
            pieces += piece
        return bytes(pieces)


def expanded_size(body: bytes, limits: Limits) -> int:
    """Return the size of a zstd body once it is expanded, found without memory for it; raises as `expand`."""
    return sum(map(len, _pieces(body, limits)))


def expand(body: bytes, limits: Limits) -> bytes:
    """Return a zstd body expanded, whatever size its header claims.

    Raises:
        ServiceError: it is damaged, or larger than `Limits.expanded_bytes`.
    """
    return b"".join(_pieces(body, limits))


def _pieces(body: bytes, limits: Limits) -> Iterator[bytes]:
    size = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            while piece := reader.read(_STEP):
                size += len(piece)
                if size > limits.expanded_bytes:
                    raise _too_large(limits.expanded_bytes, "after expansion ")
                yield piece
    except zstandard.ZstdError:
        raise ServiceError("the body is not valid zstd; send it whole, or without content encoding") from None


def _too_large(limit: int, when: str = "") -> ServiceError:
    return ServiceError(
        f"the body has {when}more than {limit} bytes; send the request in parts", code="too_large"
    )
