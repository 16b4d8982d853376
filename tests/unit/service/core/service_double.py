"""Host that computes nothing: its models are histories of what was asked of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from regress.service.service_api import (
    AdamParams,
    Datum,
    ModelInfo,
    ModelSpec,
    OfferedModel,
    OptimResult,
    PassRequest,
    PassResult,
    SampledSequence,
    SamplingResult,
    SaveKind,
    ServiceError,
)

PARAMS = AdamParams(0.1, 0.9, 0.95, 1e-8, 0.0, 0.0)
LORALESS = ModelSpec("tiny")


def request(value: int, *, forward_only: bool = False, **config: Any) -> PassRequest:
    """Return a pass that adds a value to the gradient; the settings make it fail or wait."""
    datum = Datum(np.array([value]), {"target_tokens": np.array([value])})
    return PassRequest([datum], "cross_entropy", config, forward_only)


class HistoryHost:
    """A model is the list of its steps, each the list of the values of its passes, in the order of execution."""

    def __init__(self, rank: int = 0) -> None:
        self.models: dict[str, dict[str, Any]] = {}
        self.samplers: dict[str, Any] = {}
        self.rank = rank

    def offered(self) -> list[OfferedModel]:
        return [OfferedModel("tiny", "nowhere", 64)]

    def create(self, model_id: str, spec: ModelSpec) -> ModelInfo:
        if spec.metadata.get("fails"):
            raise ServiceError("it fails")
        self.models[model_id] = {"steps": [], "pending": [], "moments": 0}
        return self._info(model_id)

    def create_from(self, model_id: str, saved: str, *, optimizer: bool) -> ModelInfo:
        self.models[model_id] = {}
        self.load(model_id, saved, optimizer=optimizer)
        return self._info(model_id)

    def close(self, model_id: str) -> None:
        del self.models[model_id]

    def run_pass(self, model_id: str, request: PassRequest, where: Any) -> PassResult:
        value = int(request.data[0].tokens[0])
        self._misbehave(request)
        model = self.models[model_id]
        if not request.forward_only:
            model["pending"].append(value)
        if request.config.get("raises") == "late":
            raise ZeroDivisionError("half way")
        total = sum(map(sum, model["steps"])) + sum(model["pending"])
        return PassResult([{"logprobs": np.array([float(value)])}], {"loss:sum": float(total)})

    def optim_step(self, model_id: str, params: AdamParams, where: Any) -> OptimResult:
        model = self.models[model_id]
        model["steps"].append(model["pending"])
        model["moments"] += 1
        norm = float(sum(model["pending"]))
        model["pending"] = []
        return OptimResult(len(model["steps"]), norm, norm, params)

    def save(self, model_id: str, folder: str, kind: SaveKind) -> int:
        model = self.models[model_id]
        kept = {"steps": model["steps"], "moments": model["moments"] if kind is SaveKind.STATE else None}
        if self.rank == 0:
            Path(folder).mkdir(parents=True)
            Path(folder, "model.json").write_text(json.dumps(kept))
        return len(model["steps"])

    def load(self, model_id: str, folder: str, *, optimizer: bool) -> int:
        kept = json.loads(Path(folder, "model.json").read_text())
        moments = kept["moments"] if optimizer else 0
        self.models[model_id] = {"steps": kept["steps"], "pending": [], "moments": moments}
        return len(kept["steps"])

    def pending_gradients(self, model_id: str) -> int:
        return len(self.models[model_id]["pending"])

    def open_sampler(self, sampler_id: str, folder: str | None, base_model: str | None) -> None:
        self.samplers[sampler_id] = (
            [] if folder is None else json.loads(Path(folder, "model.json").read_text())["steps"]
        )

    def close_sampler(self, sampler_id: str) -> None:
        del self.samplers[sampler_id]

    def sample(self, sampler_id: str, request: Any) -> SamplingResult:
        steps = self.samplers[sampler_id]
        token = np.array([sum(map(sum, steps))])
        return SamplingResult(
            [SampledSequence(token, np.zeros(1), "", "stop")] * request.count, None, len(steps), 0
        )

    def prompt_logprobs(self, sampler_id: str, prompt: Any) -> Any:
        return np.zeros(len(prompt)) + len(self.samplers[sampler_id])

    def fingerprint(self) -> dict[str, Any]:
        return {}

    def _info(self, model_id: str) -> ModelInfo:
        return ModelInfo(model_id, "tiny", "nowhere", "None", None, len(self.models[model_id]["steps"]))

    def _misbehave(self, request: PassRequest) -> None:
        config = request.config
        if "seconds" in config:
            time.sleep(float(config["seconds"]))
        if config.get("raises") == "refused":
            raise ServiceError("it is refused")
        if config.get("raises") == "disk":
            raise OSError(28, "No space left on device")
        if config.get("rank", 0) != self.rank:
            return
        if config.get("rank_does") == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.get("rank_does") == "hangs":
            time.sleep(3600)
        if config.get("rank_does") == "disagrees":
            raise ServiceError("only here")


@contextlib.contextmanager
def opened() -> Iterator[HistoryHost]:
    """Open the host of this process, a rank if the environment says so."""
    yield HistoryHost(int(os.environ.get("RANK", "0")))


@contextlib.contextmanager
def broken() -> Iterator[HistoryHost]:
    """Fail to open a host."""
    raise RuntimeError("no model here")
    yield
