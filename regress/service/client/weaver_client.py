"""Own client of Weaver's protocol: JSON over HTTP, operations that are polled."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from regress.service.client.client_settings import Deadline, Endpoint, only_one
from regress.service.client.http_transport import Transport
from regress.service.client.microbatch_datums import taken, with_array
from regress.service.client.sampling_batches import BatchSampler, batches, split_scores
from regress.service.client.service_backend import LossConfig, Opened
from regress.service.service_api import (
    AdamParams,
    Array,
    Datum,
    PassResult,
    SampledSequence,
    SamplingRequest,
    SamplingResult,
    ServiceError,
)

API = "/api/v1"
POLL = 0.005
SLOWEST_POLL = 0.5
HEARTBEAT = 30.0


class WeaverModel:
    """Model in a service that speaks Weaver's protocol."""

    wire = "weaver"

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.http = Transport(endpoint, "X-Weaver-API-Key")
        self._stopped = threading.Event()
        self._sequence = 0
        self._samplers = 0
        base = endpoint.base_model or self._only_model()
        body = {"tags": [], "user_metadata": {}, "sdk_version": "regress"}
        self.session = str(self.http.post(f"{API}/sessions", body).json()["id"])
        self.opened = self._create(base)
        self._path = f"{API}/models/{self.opened.model_id}"
        threading.Thread(target=self._beat, name="regress-heartbeat", daemon=True).start()

    def forward(self, data: Sequence[Datum]) -> PassResult:
        """Return the log-probs of the targets, without a gradient."""
        return self._pass("forward", data, "forward_logprob", {})

    def forward_backward(self, data: Sequence[Datum], loss: str, config: LossConfig) -> PassResult:
        """Add the gradient of a loss that the service knows to those since the last step."""
        return self._pass("forward_backward", data, loss, config)

    def backward(self, data: Sequence[Datum], gradients: Sequence[Array], config: LossConfig) -> PassResult:
        """Add the gradient of a loss whose derivative by each log-prob is given, ``[T]`` a datum."""
        weighted = with_array(data, "surrogate_weights", gradients)
        return self._pass("forward_backward", weighted, "surrogate", config)

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make one update, and return its metrics."""
        body = {"model_id": self.opened.model_id, "seq_id": self._next(), "adam_params": vars(params)}
        found = self.done(self._post(f"{self._path}/optimizer-steps", {"payload": body}))
        return numbers(inner(found).get("metrics") or {})

    def export(self, name: str) -> str:
        """Save the weights as they are for samplers, under a name, and return the path of the save."""
        found = self.done(self._post(f"{self._path}/export-sampler", {"seq_id": self._next(), "path": name}))
        return exported(found)

    def sampler(self, path: str | None) -> WeaverSampler:
        """Return a sampler of exported weights; None: of the model that this one began as, without adapters."""
        self._samplers += 1
        of = {} if path is None else {"model_path": path, "model_id": model_of(path) or self.opened.model_id}
        body = {"sampling_session_seq_id": self._samplers, "base_model": self.opened.base_model, **of}
        found = self.http.post(f"{API}/sessions/{self.session}/sampling-sessions", body).json()
        if "sync_operation" in found:
            self.done(found["sync_operation"])
            found = found["sampling_session"]
        return WeaverSampler(self, found)

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save the weights, perhaps with the state of the optimizer, and return the path of the save."""
        kind = "weight_and_optimizer" if optimizer else "weight"
        return str(
            inner(self.done(self._post(f"{self._path}/checkpoints", {"type": kind, "name": name})))["path"]
        )

    def load(self, path: str) -> None:
        """Take the weights and the state of the optimizer of a save."""
        self.done(self._post(f"{self._path}/load", {"path": path, "include_optimizer": True}))

    def close(self) -> None:
        """End the session with the service; nothing that was saved is lost."""
        self._stopped.set()
        with suppress(ServiceError):  # the service forgets it by itself
            self.http.post(f"{self._path}/terminate", {}, expected=(404, 405))
        self.http.close()

    def _only_model(self) -> str:
        items = self.http.get(f"{API}/supported-models?limit=100&offset=0").json().get("items") or []
        return only_one([str(item["name"]) for item in items], self._endpoint)

    def _create(self, base: str) -> Opened:
        rank = self._endpoint.lora_rank
        body: dict[str, Any] = {"model_seq_id": 1, "base_model": base, "training_mode": "full_ft"}
        if rank is not None:
            shape = {"rank": rank, "train_unembed": False, "train_mlp": True, "train_attn": True}
            body |= {"training_mode": "lora", "lora_config": {**shape, "seed": self._endpoint.seed}}
        found = self.http.post(f"{API}/sessions/{self.session}/models", body).json()
        return Opened(str(found["id"]), str(found.get("base_model") or base), found.get("tokenizer_path"))

    def _pass(self, kind: str, data: Sequence[Datum], loss: str, config: LossConfig) -> PassResult:
        given: dict[str, Any] = {"loss_fn": loss, "data": [_datum(d) for d in taken(data, loss, config)]}
        if config:
            given["loss_fn_config"] = dict(config)
        body: dict[str, Any] = {
            "model_id": self.opened.model_id,
            "seq_id": self._next(),
            "tensor_transport": "default",
        }
        body[f"{kind}_input"] = given
        route = "forward-passes" if kind == "forward" else "forward-backward-passes"
        found = inner(self.done(self._post(f"{self._path}/{route}", {"payload": body})))
        outputs = outputs_of(found["loss_fn_outputs"])
        return PassResult(outputs, numbers(found.get("metrics") or {}), [datum.id for datum in data])

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _post(self, path: str, body: Any) -> Any:
        return self.http.post(
            path, body, repeatable="seq_id" in body or "seq_id" in body.get("payload", {})
        ).json()

    def done(self, operation: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait for an operation, and return its response.

        Raises:
            ServiceError: if it failed, or takes longer than the configured time.
        """
        deadline, pause = Deadline(self._endpoint), POLL
        while operation["status"] not in ("done", "error"):
            deadline.check()
            time.sleep(pause)
            pause = min(pause * 1.5, SLOWEST_POLL)
            operation = self.http.get(f"{API}/operations/{operation['id']}").json()
        if operation["status"] == "error":
            raise ServiceError(
                str(operation.get("error_message") or "the service gave no reason"),
                code=str(operation.get("error_code") or "failed"),
                retryable=bool(operation.get("retryable")),
            )
        response: Mapping[str, Any] = operation["response"]
        return response

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.http.post(f"{API}/sessions/{self.session}/heartbeat", {})
            except ServiceError:
                continue  # the next call of the trainer tells


class WeaverSampler(BatchSampler):
    """Sampler of a service that speaks Weaver's protocol.

    Args:
        session: the reply that opened it.
    """

    def __init__(self, model: WeaverModel, session: Mapping[str, Any]) -> None:
        super().__init__(session.get("batch"))
        self._model = model
        self._path = f"{API}/sampling-sessions/{session['id']}"

    def prompt_logprobs(self, prompts: Sequence[Array]) -> list[Array]:
        """Return the ``[P]`` log-probs of each prompt's tokens, NaN first."""
        sent = batches([SamplingRequest(prompt, seed=0) for prompt in prompts], self._limits)
        posted = [self._ask("logprobs", prompts_of(request)) for request in sent]
        found = [scores(inner(self._model.done(handle))) for handle in posted]
        whole = zip(found, sent, strict=True)
        return [part for values, request in whole for part in split_scores(values, request.prompts)]

    def _post(self, request: SamplingRequest) -> Any:
        return self._ask("samples", _sampling(request))

    def _sampled(self, handle: Any, request: SamplingRequest) -> SamplingResult:
        return sampled(inner(self._model.done(handle)), request)

    def _ask(self, what: str, body: Mapping[str, Any]) -> Any:
        return self._model.http.post(f"{self._path}/{what}", body).json()


def outputs_of(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Array]]:
    """Return the arrays of each datum's output; its id is none."""
    return [
        {
            name: np.asarray(value["data"], np.float32)
            for name, value in one.items()
            if isinstance(value, Mapping)
        }
        for one in found
    ]


def inner(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an operation returned, which lies under ``result`` or not."""
    found: Mapping[str, Any] = response.get("result") or response
    return found


def exported(response: Mapping[str, Any]) -> str:
    """Return the path of weights that were exported for samplers."""
    reply = inner(response)
    return str(reply.get("model_path") or reply["path"])


def model_of(path: str) -> str:
    """Return the id of the model whose save a path ``weaver://<model>/checkpoints/<name>`` is."""
    return path.partition("://")[2].partition("/")[0]


def chunks_of(tokens: Array) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": tokens.tolist()}]}


def prompts_of(request: SamplingRequest) -> dict[str, Any]:
    """Return the prompts of a request; rows are sent to services that know them alone."""
    rows = [
        {"prompt": chunks_of(row.prompt), "seed": row.seed, "max_tokens": row.max_tokens}
        for row in request.rows
    ]
    return {"prompt": chunks_of(request.prompt), **({"rows": rows} if rows else {})}


def _datum(datum: Datum) -> dict[str, Any]:
    inputs = {}
    for name, values in datum.inputs.items():
        dtype = "int64" if name == "target_tokens" else "float32"
        inputs[name] = {"data": values.astype(dtype).tolist(), "dtype": dtype}
    found: dict[str, Any] = {"model_input": chunks_of(datum.tokens), "loss_fn_inputs": inputs}
    return found if datum.id is None else {**found, "datum_id": datum.id}


def _sampling(request: SamplingRequest) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
    }
    kept = {name: value for name, value in params.items() if value is not None}
    return {
        **prompts_of(request),
        "sampling_params": kept,
        "num_samples": request.count,
        "prompt_logprobs": request.prompt_logprobs,
        "topk_prompt_logprobs": 0,
    }


def sampled(result: Mapping[str, Any], request: SamplingRequest) -> SamplingResult:
    """Return the completions of a reply."""
    sequences = [
        SampledSequence(
            np.asarray(one["tokens"], np.int64),
            np.asarray(one.get("logprobs") or [], np.float32),
            str(one.get("text") or ""),
            "length" if one.get("stop_reason") == "length" else "stop",
        )
        for one in result["sequences"]
    ]
    return SamplingResult(
        sequences,
        None if result.get("prompt_logprobs") is None else scores(result),
        int(result.get("step", -1)),
        request.seed or 0,
    )


def scores(result: Mapping[str, Any]) -> Array:
    """Return log-probs of prompts, of which those of first tokens are none."""
    return np.asarray([np.nan if v is None else v for v in result["prompt_logprobs"]], np.float32)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return those metrics that are numbers."""
    return {
        str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)
    }
