"""The same training on this side of the wire and on the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.training_run import train as train_here
from regress.service.client.remote_run import train
from regress.service.core.executor_choice import executor_of
from regress.service.core.training_service import CoreService
from regress.service.wires.app_settings import Settings
from regress.service.wires.http_app import create_app
from regress.service.wires.http_server import ThreadedServer
from tests.unit.service.client.direct_service import DirectService
from tests.unit.service.client.in_process_client import LocalModel

TINY = (
    "max_steps=2",
    "task.train_size=12",
    "task.eval_size=4",
    "data.prompts_per_step=2",
    "data.group_size=4",
    "task.rewards={exact_match: 1.0, character_match: 1.0}",
)
CONSOLE = Console(quiet=True)
KEY = "tml-of-a-test"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model that has learned a little, with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    warm = ("warm_start.steps=6", "warm_start.batch_size=8", "max_steps=0")
    train_here(load_config(overrides=[*TINY, *warm, f"output_dir={folder}"], environ={}).config, CONSOLE)
    return folder / "final"


@dataclass
class Sides:
    """Makes runs of one configuration in this process and through a service."""

    base: Path
    root: Path

    def config(self, name: str, *overrides: str) -> Config:
        paths = (f"tokenizer.path={self.base}", f"output_dir={self.root / name}")
        return load_config(overrides=[*TINY, *paths, *overrides], environ={}).config

    def here(self, *overrides: str) -> Path:
        """Train in this process; returns the folder of its files."""
        train_here(self.config("here", f"model.path={self.base}", *overrides), CONSOLE)
        return self.root / "here"

    def service(self) -> DirectService:
        model = AutoModelForCausalLM.from_pretrained(self.base)
        eos = AutoTokenizer.from_pretrained(self.base).eos_token_id
        return DirectService(model, str(self.base), eos)

    def there(self, *overrides: str, service: DirectService | None = None) -> DirectService:
        """Train through a service; returns it."""
        service = service or self.service()
        config = self.config("there", "trainer.type=remote", *overrides)
        train(config, CONSOLE, connect=lambda config: LocalModel(service, "base"))  # type: ignore[arg-type]
        return service


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@contextmanager
def serving(base: Path, folder: Path) -> Iterator[str]:
    """Yield the address of a service of one model."""
    overrides = [*TINY, f"model.path={base}", f"tokenizer.path={base}", f"output_dir={folder}"]
    config = load_config(overrides=overrides, environ={}).config
    service = CoreService(executor_of({"base": config}, folder, environ={}), folder)
    try:
        with ThreadedServer(create_app(service, Settings({"test": KEY}))) as server:
            yield server.url
    finally:
        service.close()


def over_http(
    sides: Sides,
    name: str,
    wire: str,
    url: str,
    *chosen: str,
    stop_after: int | None = None,
    allow: Sequence[str] = (),
) -> Path:
    """Train through the service at an address by our own client; returns the folder of the run's files."""
    section = f"service.{wire}_service"
    full = f"{section}.training_mode=full_ft" if wire == "weaver" else f"{section}.lora_rank=0"
    lora = any(key.startswith(f"{section}.lora_rank") for key in chosen)
    config = sides.config(
        name,
        "trainer.type=remote",
        f"service.train_service.backend={wire}",
        f"{section}.base_url={url}",
        f"{section}.api_key={KEY}",
        f"{section}.client=own",
        *(() if lora else (full,)),
        *chosen,
    )
    train(config, CONSOLE, stop_after=stop_after, allow_change=allow)
    return sides.root / name


@pytest.fixture
def sides(base: Path, tmp_path: Path) -> Sides:
    return Sides(base, tmp_path)


def weights_differ(here: Path, service: DirectService) -> float:
    """Return the largest difference of a weight."""
    ours, theirs = load_file(here / "final" / "model.safetensors"), dict(service.model.named_parameters())
    return max(float((ours[name] - theirs[name].detach()).abs().max()) for name in ours if name in theirs)


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


__all__ = ["Callable", "Sides", "over_http", "partial", "rows", "serving", "torch", "weights_differ"]
