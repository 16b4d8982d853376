"""Bodies of requests: read within bounds of size, time and memory, and expanded within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zstandard
from starlette.requests import ClientDisconnect, Request

from regress.service.api import ServiceError
from regress.service.wires.settings import Limits

_STEP = 1 << 20


class Bodies:
    """Reader of bodies; those of all clients together hold no more than `Limits.held_bytes`.

    Args:
        limits: bounds of a request.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held = 0
        self._freed = asyncio.Condition()

    @property
    def held(self) -> int:
        """Bytes that are reserved at the moment."""
        return self._held

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Give the expanded body of a request, whose memory is reserved until the block ends.

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
        reserved = self._limits.expanded_bytes if encoding == "zstd" else size
        await self._reserve(reserved)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._receive(request, size)
            yield await asyncio.to_thread(expand, body, self._limits) if encoding == "zstd" else body
        except TimeoutError:
            raise ServiceError(
                f"the body did not arrive within {self._limits.body_seconds:g} seconds", code="too_slow"
            ) from None
        except ClientDisconnect:
            raise ServiceError("the client left while it sent the body") from None
        finally:
            await self._reserve(-reserved)

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

    async def _receive(self, request: Request, size: int) -> bytes:
        pieces = bytearray()
        async for piece in request.stream():
            pieces += piece
            if len(pieces) > min(size, self._limits.body_bytes):
                raise _too_large(self._limits.body_bytes)
        return bytes(pieces)

    async def _reserve(self, size: int) -> None:
        async with self._freed:
            if size > 0:
                most = self._limits.held_bytes
                await self._freed.wait_for(lambda: self._held == 0 or self._held + size <= most)
            self._held += size
            if size < 0:
                self._freed.notify_all()


def expand(body: bytes, limits: Limits) -> bytes:
    """Return a zstd body expanded, whatever size its header claims.

    Raises:
        ServiceError: it is damaged, or larger than `Limits.expanded_bytes`.
    """
    pieces = bytearray()
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            while piece := reader.read(_STEP):
                pieces += piece
                if len(pieces) > limits.expanded_bytes:
                    raise _too_large(limits.expanded_bytes, "after expansion ")
    except zstandard.ZstdError:
        raise ServiceError("the body is not valid zstd; send it whole, or without content encoding") from None
    return bytes(pieces)


def _too_large(limit: int, when: str = "") -> ServiceError:
    return ServiceError(
        f"the body has {when}more than {limit} bytes; send the request in parts", code="too_large"
    )
