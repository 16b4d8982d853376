"""Connection of a run to its service: through the official SDK where it is installed, or our own client."""

from __future__ import annotations

from importlib.util import find_spec

from regress.engine.config.config_schema import Config
from regress.errors import ConfigError, reason
from regress.optional_packages import install
from regress.service.client.client_settings import Endpoint, endpoint_of
from regress.service.client.service_backend import RemoteModel

SDKS = {"weaver": ("weaver", "nex-weaver"), "tinker": ("tinker", "tinker")}
"""Protocol -> module and distribution of its official SDK."""


def connect(config: Config) -> RemoteModel:
    """Create the model of a run in its service.

    Raises:
        ConfigError: if the service's address, key or SDK is missing.
        ServiceError: if it cannot be reached or refuses.
    """
    return open_model(endpoint_of(config))


def open_model(endpoint: Endpoint) -> RemoteModel:
    """Create a model in a service, by the client that its settings ask for."""
    module, distribution = SDKS[endpoint.wire]
    installed = find_spec(module) is not None
    if endpoint.client == "sdk" and not installed:
        raise ConfigError(f"""service.{endpoint.wire}_service.client=sdk needs the package {distribution}, which is not
        installed; install it, or set service.{endpoint.wire}_service.client=own""")
    try:
        return _with_sdk(endpoint) if installed and endpoint.client != "own" else _with_own_client(endpoint)
    except ImportError as error:
        raise ConfigError(f"""trainer.type=remote needs httpx and protobuf, not both of which are installed
        ({reason(error)}); run {install("service")}""") from error


def _with_own_client(endpoint: Endpoint) -> RemoteModel:
    """Create a model by our own client, whose packages not every installation has."""
    if endpoint.wire == "weaver":
        from regress.service.client.weaver_client import WeaverModel

        return WeaverModel(endpoint)
    from regress.service.client.tinker_client import TinkerModel

    return TinkerModel(endpoint)


def _with_sdk(endpoint: Endpoint) -> RemoteModel:
    """Create a model by the official SDK of its protocol, which is imported only here."""
    if endpoint.wire == "weaver":
        from regress.service.client.weaver_sdk import WeaverSdkModel

        return WeaverSdkModel(endpoint)
    from regress.service.client.tinker_sdk import TinkerSdkModel

    return TinkerSdkModel(endpoint)
