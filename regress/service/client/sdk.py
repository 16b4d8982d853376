"""Official SDKs as clients; they are imported only where they are installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from regress.errors import RegressError, reason
from regress.service.api import ServiceError
from regress.service.client.backend import RemoteModel
from regress.service.client.settings import Endpoint


def open_with_sdk(endpoint: Endpoint) -> RemoteModel:
    """Create a model in a service by the official SDK of its protocol.

    Raises:
        ServiceError: for whatever the SDK raises, in one sentence.
    """
    if endpoint.wire == "weaver":
        from regress.service.client.weaver_sdk import WeaverSdkModel

        return WeaverSdkModel(endpoint)
    from regress.service.client.tinker_sdk import TinkerSdkModel

    return TinkerSdkModel(endpoint)


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
