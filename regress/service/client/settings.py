"""Address and key of the service that a configuration names. A vendor's address is never a default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from regress.engine.config.schema import Config
from regress.errors import ConfigError
from regress.redaction import redacted_url

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
