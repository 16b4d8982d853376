"""Service of one model with losses of its own, written out with autograd: what a client's updates are judged by."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regress.service.service_api import (
    AdamParams,
    Array,
    Datum,
    ModelInfo,
    ModelSpec,
    Operation,
    OptimResult,
    PassRequest,
    PassResult,
    SampledSequence,
    SamplingRequest,
    SamplingResult,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)


class DirectService:
    """Model, its gradients and its AdamW; every call is executed at once."""

    def __init__(self, model: PreTrainedModel, tokenizer: str, eos: int) -> None:
        self.model, self._tokenizer, self._eos = model, tokenizer, eos
        self.saved: dict[str, PreTrainedModel] = {"base": copy.deepcopy(model)}
        self._samplers: dict[str, str] = {}
        self._optimizer = torch.optim.AdamW(model.parameters())
        self.calls: list[tuple[str, Any]] = []

    def create_session(self, metadata: Mapping[str, Any]) -> str:
        return "session"

    def finish_session(self, session_id: str) -> None: ...

    def create_model(self, session_id: str, number: int, spec: ModelSpec) -> Operation:
        return done(ModelInfo("session:train:0", spec.base_model, self._tokenizer, "test", None, 0))

    def run_pass(self, model_id: str, seq_id: int | None, request: PassRequest) -> Operation:
        self.calls.append(("forward" if request.forward_only else request.loss, request))
        outputs, total = [], torch.zeros(())
        for datum in request.data:
            log_probs = self._log_probs(self.model, datum)
            if not request.forward_only:
                total = total + loss_of(datum, log_probs, request)
            outputs.append({"logprobs": log_probs.detach().numpy()})
        if not request.forward_only:
            total.backward()
        return done(PassResult(outputs, {"loss:sum": total.item()}))

    def optim_step(self, model_id: str, seq_id: int | None, params: AdamParams) -> Operation:
        self.calls.append(("optim_step", params))
        clip = params.grad_clip_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip))
        for group in self._optimizer.param_groups:
            group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
            group |= {"eps": params.eps, "weight_decay": params.weight_decay}
        self._optimizer.step()
        self._optimizer.zero_grad()
        return done(OptimResult(1, norm, min(norm, clip), params))

    def save(
        self, model_id: str, seq_id: int | None, name: str | None, kind: SaveKind, *, overwrite: bool = False
    ) -> Operation:
        self.calls.append((f"save {kind.value}", name))
        self.saved[str(name)] = copy.deepcopy(self.model)
        return done(Saved(model_id, kind, str(name), str(name), 0))

    def create_sampler(
        self, session_id: str, number: int, *, path: str | None, base_model: str | None
    ) -> str:
        self._samplers[str(number)] = path or "base"
        return str(number)

    def sample(self, sampler_id: str, request: SamplingRequest) -> Operation:
        from random import Random

        from regress.engine.sampling import SamplingParams, sample

        self.calls.append(("sample", request))
        params = SamplingParams(
            request.max_tokens or 1,
            self._eos,
            0,
            temperature=request.temperature or 1.0,
            greedy=not request.temperature,
        )
        (found,) = sample(
            self.saved[self._samplers[sampler_id]],
            [request.prompt.tolist()],
            params,
            generators=[Random(request.seed)],
        )
        stop: Any = found.finish_reason
        one = SampledSequence(np.array(found.tokens), found.log_probs.numpy(), "", stop)
        return done(SamplingResult([one], None, 0, request.seed or 0))

    def prompt_logprobs(self, sampler_id: str, prompt: Array) -> Operation:
        datum = Datum(prompt[:-1], {"target_tokens": prompt[1:]})
        with torch.no_grad():
            values = self._log_probs(self.saved[self._samplers[sampler_id]], datum)
        return done(np.concatenate([[np.nan], values.numpy()]).astype(np.float32))

    def _log_probs(self, model: PreTrainedModel, datum: Datum) -> Tensor:
        logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def loss_of(datum: Datum, log_probs: Tensor, request: PassRequest) -> Tensor:
    """Return the sum of a datum's loss, by the formulas of the wires."""
    given = {
        name: torch.from_numpy(np.asarray(v)) for name, v in datum.inputs.items() if name != "target_tokens"
    }
    if request.loss == "surrogate":
        return (log_probs * given["surrogate_weights"]).sum()
    if request.loss == "cross_entropy":
        return -(log_probs * given["weights"]).sum()
    ratio = (log_probs - given["logprobs"]).exp()
    advantages, config = given["advantages"], request.config
    low, high = float(config.get("clip_low_threshold", 0.8)), float(config.get("clip_high_threshold", 1.2))
    token = {
        "importance_sampling": lambda: -ratio * advantages,
        "ppo": lambda: -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages),
        "cispo": lambda: -ratio.clamp(low, high).detach() * log_probs * advantages,
    }[request.loss]()
    return (token * given["loss_mask"]).sum()


def done(result: Any) -> Operation:
    return Operation("1", Status.DONE, result=result)


def failing(message: str) -> Operation:
    return Operation("1", Status.FAILED, error=ServiceError(message))


__all__ = ["DirectService", "SimpleNamespace", "done", "failing", "loss_of"]
