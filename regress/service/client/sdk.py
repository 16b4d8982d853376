"""Errors of official SDKs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from regress.errors import RegressError, reason
from regress.service.api import ServiceError
from regress.service.client.settings import Endpoint


@contextmanager
def told(endpoint: Endpoint) -> Iterator[None]:
    """Turn what an SDK raises into one sentence."""
    try:
        yield
    except RegressError:
        raise
    except Exception as error:
        raise ServiceError(
            f"the {endpoint.wire} service at {endpoint.shown} did not do what it was asked ({reason(error)}); correct "
            f"what it names, or set service.{endpoint.wire}_service.client=own to see whether the SDK is at fault",
            code="sdk",
            category="server",
        ) from error
