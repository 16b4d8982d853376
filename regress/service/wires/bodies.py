"""Bodies of requests: read within bounds of size, time and memory, and expanded within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import zstandard
from starlette.requests import ClientDisconnect, Request

from regress.service.api import ServiceError
from regress.service.wires.memory import Memory, Part
from regress.service.wires.settings import Limits

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
