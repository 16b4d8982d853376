"""Replay of a golden case through the training service: its rollouts, trained on by a client over HTTP on loopback.

The service offers the case's own model, with its optimizer state, and dumps every request; the client has the case's
objective. `inexpressible` names what the wires cannot say.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from regress.engine.adapters.adapter_settings import base_of, is_adapter, of_directory
from regress.engine.config.config_schema import Config
from regress.errors import NotInstalled, NotSupported, reason
from regress.golden.golden_case import GoldenCase
from regress.interop.foreign_payloads import read_payload
from regress.optional_packages import install
from regress.replay.case_run import torch_settings
from regress.replay.replay_configuration import case_config, compose
from regress.replay.variant import Precision, Variant
from regress.service.client.remote_run import train
from regress.service.client.service_connection import connect
from regress.service.core.executor_choice import executor_of

MODEL = "golden"
"""Name under which the service offers the model of a case."""
SERVED = ("parallel.", "model.", "batching.", "device", "threads")
"""Sections and keys that a variant sets in the service; the others are the client's."""
DUMPED = "forward_data,loss,is_loss_debug,batch_inputs,gradient,param"


@dataclass(frozen=True)
class RemoteReplay:
    """Dumps of a replay: what the client sent, and what the service computed."""

    wire: str
    client: Path
    service: Path

    @classmethod
    def of(cls, variant: Variant, folder: Path) -> RemoteReplay:
        """Return where the dumps of a variant's replay in a folder lie."""
        wire = str(variant.overrides.get("service.train_service.backend", "weaver"))
        return cls(wire, folder / "client" / "dump", folder / "service" / "dump")

    @property
    def masked(self) -> bool:
        """True if the wire carried the loss mask of every update."""
        asked = {read_payload(path)["extra_info"]["loss_fn"] for path in self.datums}
        return self.wire == "weaver" and asked <= {*MASKED}

    @property
    def datums(self) -> list[Path]:
        """Files of what the client sent, an update each, in order."""
        return sorted((self.client / "datums").glob("step_*"))


MASKED = ("importance_sampling", "ppo", "cispo", "dro")
"""Losses with which Weaver's protocol carries a loss mask."""


def inexpressible(case: GoldenCase, wire: str) -> str | None:
    """Return why a case's training cannot be asked of a service; None if it can."""
    config: Mapping[str, Any] = case.config
    temperature = (config.get("rollout_worker") or {}).get("temperature", 1.0)
    if temperature != 1.0:
        return f"the policy is trained at a temperature of {temperature}, which the wires cannot say"
    if (config.get("algorithm") or {}).get("entropy_coef") and wire == "tinker":
        return "its entropy bonus is not a function of log-probs, and Tinker's losses are"
    return None


def replay_remote(
    case: GoldenCase,
    variant: Variant,
    precision: Precision,
    folder: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> RemoteReplay:
    """Replay all steps of a case through a service that lives for this replay.

    Args:
        variant: tells the wire, the ranks of the service and settings of the client.
        precision: what the service computes in; the wire carries float32 whatever it is.
        overrides: configuration specific to this machine, such as the device of the service.

    Raises:
        NotSupported: if the wire cannot say what the case trains.
        RegressError: if either side refuses anything.
    """
    found = RemoteReplay.of(variant, folder)
    why = inexpressible(case, found.wire)
    if why is not None:
        raise NotSupported(why)
    given = {**variant.overrides, **(overrides or {})}
    served = {key: value for key, value in given.items() if key.startswith(SERVED)}
    own = {key: value for key, value in given.items() if key not in served}
    offered = _offered(case, precision, folder / "service", served)
    with torch_settings(offered.threads), _direct(), _serving(offered, folder / "service") as (url, key):
        section = f"service.{found.wire}_service"
        asked = {
            **_client_side(case, folder / "client", found),
            f"{section}.base_url": url,
            f"{section}.api_key": key,
            f"{section}.base_model": MODEL,
            **_trained(case, found.wire, section),
        }
        train(compose(case.config, asked | own, folder / "client"), Console(quiet=True), connect=connect)
    return found


def _trained(case: GoldenCase, wire: str, section: str) -> dict[str, Any]:
    """Return what the client asks to be trained: the adapter that the case's model is, or all parameters."""
    model = case.folder / "model"
    if is_adapter(model):
        mode = {f"{section}.training_mode": "lora"} if wire == "weaver" else {}
        return {**mode, f"{section}.lora_rank": of_directory(model, "model.path").r}
    return {f"{section}.training_mode": "full_ft"} if wire == "weaver" else {f"{section}.lora_rank": 0}


def _client_side(case: GoldenCase, folder: Path, dumps: RemoteReplay) -> dict[str, Any]:
    found = case_config(case, len(case.trajectories()))
    model = found.pop("model.path")
    found.pop("optimizer.state_path", None)
    reference: Mapping[str, Any] = case.config.get("reference") or {}  # type: ignore[assignment]  # plain JSON
    if reference.get("without_adapter"):  # the offered model brings its adapter, so the base is another model
        base = base_of(Path(model), None, "model.path")
        found |= {"reference.path": str(base), "reference.without_adapter": False}
    return {
        **found,
        "trainer.type": "remote",
        "tracking.trackers": [],
        "evaluation.every_n_steps": 0,
        "model.dtype": "float32",
        "output_dir": str(folder),
        "debug.enable_data_dump": True,
        "debug.dump_dir": str(dumps.client),
        **{
            f"debug.remote_api_dump_options.{name}": True
            for name in ("prepared_trajectories", "datums", "training_metrics")
        },
    }


def _offered(case: GoldenCase, precision: Precision, folder: Path, served: Mapping[str, Any]) -> Config:
    """Return the configuration of the model that the service offers, with overrides by dotted key."""
    files = case_config(case, 1)
    kept = ("model.path", "optimizer.state_path")
    own = {key: value for key, value in files.items() if key in kept}
    sections: dict[str, Any] = {
        name: case.config[name]
        for name in ("seed", "threads", "model", "task", "data")
        if name in case.config
    }
    alone = {"batching.micro_batch_size": 1}  # a microbatch is then a datum, and a verdict names it
    return compose(sections, {**own, **alone, **served, **precision.overrides}, folder)


@contextmanager
def _direct() -> Iterator[None]:
    """Keep the requests of this process to its own service away from a proxy that the environment names."""
    before = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
    os.environ |= {name: ",".join(filter(None, (value, "127.0.0.1"))) for name, value in before.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _serving(config: Config, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield address and key of a service of one model."""
    try:
        import httpx  # noqa: F401  # the client's own

        from regress.service.core.training_service import CoreService
        from regress.service.wires.app_settings import Settings
        from regress.service.wires.http_app import create_app
        from regress.service.wires.http_server import ThreadedServer
    except ImportError as error:
        raise NotInstalled(
            f"a training service needs packages that are not installed ({reason(error)}); run {install('service')}"
        ) from error

    key = f"tml-{secrets.token_hex(8)}"
    environ = {
        "WEAVER_DEBUG_DUMP_ENABLED": "1",
        "WEAVER_DEBUG_DUMP_DIR": str(folder / "dump"),
        "WEAVER_DEBUG_DUMP_OPTIONS": DUMPED,
    }
    service = CoreService(executor_of({MODEL: config}, folder / "state", environ=environ), folder / "state")
    try:
        with ThreadedServer(create_app(service, Settings({"replay": key}))) as server:
            yield server.url, key
    finally:
        service.close()
