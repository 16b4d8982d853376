"""Address and key of the service that a configuration names, and deadlines. A vendor's address is never a default."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from regress.credential_redaction import redacted_url
from regress.engine.config.config_schema import Config
from regress.errors import ConfigError
from regress.service.service_api import ServiceError

Mode = Literal["auto", "own", "sdk"]


@dataclass(frozen=True)
class Endpoint:
    """Service to train in.

    Attributes:
        wire: protocol, ``weaver`` or ``tinker``.
        lora_rank: rank of the adapters; None: all parameters are trained.
        base_model: name of the model there; None: the only one that it offers.
        seed: seed of the adapters' first weights.
        timeout: seconds for which one operation is waited for.
    """

    wire: str
    base_url: str
    api_key: str = field(repr=False)
    base_model: str | None
    lora_rank: int | None
    seed: int
    client: Mode
    timeout: float

    @property
    def shown(self) -> str:
        """Address for messages."""
        return redacted_url(self.base_url)


def endpoint_of(config: Config, environ: Mapping[str, str] | None = None) -> Endpoint:
    """Return the service that a configuration names.

    Raises:
        ConfigError: if its address or key is given nowhere.
    """
    environ = os.environ if environ is None else environ
    wire = config.service.train_service.backend
    weaver, tinker = config.service.weaver_service, config.service.tinker_service
    section = weaver if wire == "weaver" else tinker
    rank: int | None = section.lora_rank
    if wire == "weaver":
        rank = None if weaver.training_mode == "full_ft" else rank
    elif rank == 0:
        rank = None
    mode: Mode = {"own": "own", "sdk": "sdk"}.get(section.client, "auto")  # type: ignore[assignment]
    return Endpoint(
        wire=wire,
        base_url=_with_scheme(_given(section.base_url, wire, "base_url", "address", environ)),
        api_key=_given(section.api_key, wire, "api_key", "key", environ),
        base_model=section.base_model,
        lora_rank=rank,
        seed=config.seed,
        client=mode,
        timeout=section.timeout,
    )


def _given(value: str | None, wire: str, key: str, what: str, environ: Mapping[str, str]) -> str:
    variable = f"{wire}_{key}".upper()
    found = value or environ.get(variable)
    if not found:
        remedy = f"set the environment variable {variable}"
        if key == "base_url":
            remedy = f"set service.{wire}_service.base_url, such as http://127.0.0.1:8000, or {variable}"
        raise ConfigError(f"trainer.type=remote has no {what} of the {wire} service; {remedy}")
    return found


def _with_scheme(url: str) -> str:
    return (url if "://" in url else f"https://{url}").rstrip("/")


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
                f"""the service at {endpoint.shown} has not finished an operation within {endpoint.timeout:g} seconds;
                raise service.{endpoint.wire}_service.timeout, or look at its log""",
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
    raise ServiceError(f"""the service at {endpoint.shown} offers {", ".join(names) or "no models"}; set
    service.{endpoint.wire}_service.base_model to one of them""")
