"""Waiting for operations: in threads while there are some, else by looking every few milliseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from regress.service.api import Operation, Service, Status

_SLICE = 0.5
_SHORTEST = 0.002
_LONGEST = 0.05

FINAL = (Status.DONE, Status.FAILED)


class Waiter:
    """Waits for operations on behalf of many clients.

    Args:
        service: the service that runs them.
        threads: waits in a thread of their own, which end with the operation at once.
    """

    def __init__(self, service: Service, threads: int) -> None:
        self._service = service
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="regress-wait")
        self._busy = 0
        self.closing = False

    async def wait(self, operation_id: str, timeout: float, left: Callable[[], Awaitable[bool]]) -> Operation:
        """Return the state of an operation when it is final, after ``timeout`` seconds, or when the client has left."""
        end = time.monotonic() + timeout
        found = self._service.operation(operation_id)
        pause = _SHORTEST
        while found.status not in FINAL and not self.closing and not await left():
            rest = end - time.monotonic()
            if rest <= 0:
                break
            if self._busy < self._threads:
                found = await self._in_thread(operation_id, min(rest, _SLICE))
            else:
                await asyncio.sleep(min(pause, rest))
                pause = min(2 * pause, _LONGEST)
                found = self._service.operation(operation_id)
        return found

    async def _in_thread(self, operation_id: str, timeout: float) -> Operation:
        self._busy += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._pool, lambda: self._service.operation(operation_id, timeout=timeout)
            )
        finally:
            self._busy -= 1

    def close(self) -> None:
        """End the waits within half a second."""
        self.closing = True
        self._pool.shutdown(wait=False, cancel_futures=True)
