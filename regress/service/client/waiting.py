"""Deadlines of operations that a service works on."""

from __future__ import annotations

import time

from regress.service.api import ServiceError
from regress.service.client.settings import Endpoint


class Deadline:
    """Moment at which an operation is no longer waited for."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._end = time.monotonic() + endpoint.timeout

    def check(self) -> None:
        """Raise `ServiceError` once the moment has passed."""
        if time.monotonic() > self._end:
            endpoint = self._endpoint
            raise ServiceError(
                f"the service at {endpoint.shown} has not finished an operation within {endpoint.timeout:g} seconds; "
                f"raise service.{endpoint.wire}_service.timeout, or look at its log",
                code="timeout",
                category="server",
            )


def only_one(names: list[str], endpoint: Endpoint) -> str:
    """Return the only model that a service offers.

    Raises:
        ServiceError: if it offers none or several.
    """
    if len(names) == 1:
        return names[0]
    raise ServiceError(
        f"the service at {endpoint.shown} offers {', '.join(names) or 'no models'}; set "
        f"service.{endpoint.wire}_service.base_model to one of them"
    )
