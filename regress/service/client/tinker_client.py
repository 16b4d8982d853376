"""Own client of Tinker's protocol: JSON, with protobuf for passes and samples, and futures that are retrieved."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from regress.service.client.client_settings import Deadline, Endpoint, only_one
from regress.service.client.http_transport import Reply, Transport
from regress.service.client.sampling_batches import BatchSampler
from regress.service.client.service_backend import LossConfig, Opened
from regress.service.client.weaver_client import prompts_of
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
from regress.service.wires.tinker_protobuf import message_class

API = "/api/v1"
PROTOBUF = "application/x-protobuf"
HEARTBEAT = 10.0
RATIO_INPUTS = ("target_tokens", "logprobs", "advantages")
"""Arrays of the losses of ratios, which know no mask: an advantage of 0 leaves a token out."""


class TinkerModel:
    """Model in a service that speaks Tinker's protocol."""

    wire = "tinker"

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.http = Transport(endpoint, "X-API-Key")
        self._stopped = threading.Event()
        self._sequence = 0
        self._samplers = -1
        base = endpoint.base_model or self._only_model()
        body = {"tags": [], "user_metadata": {}, "sdk_version": "regress", "type": "create_session"}
        self.session = str(self.post("create_session", body)["session_id"])
        self.opened = self._create(base)
        threading.Thread(target=self._beat, name="regress-heartbeat", daemon=True).start()

    def forward(self, data: Sequence[Datum]) -> PassResult:
        """Return the log-probs of the targets, without a gradient."""
        weights = [datum.inputs["loss_mask"] for datum in data]
        return self._cross_entropy(data, weights, forward_only=True)

    def forward_backward(self, data: Sequence[Datum], loss: str, config: LossConfig) -> PassResult:
        """Add the gradient of a loss that the service knows to those since the last step."""
        if loss == "cross_entropy":
            return self._cross_entropy(data, [datum.inputs["advantages"] for datum in data])
        numbers = {name: float(value) for name, value in config.items() if not isinstance(value, str)}
        return self._pass(data, [{n: d.inputs[n] for n in RATIO_INPUTS} for d in data], loss, numbers)

    def backward(self, data: Sequence[Datum], gradients: Sequence[Array], config: LossConfig) -> PassResult:
        """Add the gradient of a loss whose derivative by each log-prob is given: minus the weights of cross entropy."""
        return self._cross_entropy(data, [-values for values in gradients])

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make one update, and return its metrics."""
        found = self._numbered("optim_step", adam_params=dict(vars(params)))
        return {str(name): float(value) for name, value in (found.get("metrics") or {}).items()}

    def export(self, name: str) -> str:
        """Save the weights as they are for samplers, under a name, and return the path of the save."""
        return str(self._numbered("save_weights_for_sampler", path=name)["path"])

    def sampler(self, path: str | None) -> TinkerSampler:
        """Return a sampler of exported weights; None: of the model that this one began as, without adapters."""
        self._samplers += 1
        of = {"base_model": self.opened.base_model} if path is None else {"model_path": path}
        body = {"session_id": self.session, "sampling_session_seq_id": self._samplers, **of}
        body["type"] = "create_sampling_session"
        return TinkerSampler(self, self.post("create_sampling_session", body))

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save the weights with the state of the optimizer, which this protocol always keeps with them."""
        return str(self._numbered("save_weights", path=name)["path"])

    def load(self, path: str) -> None:
        """Take the weights and the state of the optimizer of a save."""
        self._numbered("load_weights", path=path, optimizer=True)

    def close(self) -> None:
        """End the session with the service; nothing that was saved is lost."""
        self._stopped.set()
        with suppress(ServiceError):  # the service forgets it by itself
            body = {"reason": {"type": "success"}, "detail": ""}
            self.http.post(f"{API}/sessions/{self.session}/finish", body, expected=(404, 405))
        self.http.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the reply to a request that is not a future."""
        return self.http.post(f"{API}/{path}", body).json()

    def retrieve(self, future: Mapping[str, Any]) -> Reply:
        """Wait for a future, and return its reply.

        Raises:
            ServiceError: if it failed, or takes longer than the configured time.
        """
        deadline = Deadline(self._endpoint)
        body = {"request_id": future["request_id"], "allow_metadata_only": False}
        headers = {"Accept": f"{PROTOBUF}, application/json"}
        while True:
            deadline.check()
            reply = self.http.post(
                f"{API}/retrieve_future", body, headers=headers, expected=(408,), repeatable=True
            )
            if reply.status == 408:
                continue
            if reply.type.startswith(PROTOBUF):
                return reply
            found = reply.json()
            if found.get("type") == "try_again":
                continue
            if "error" in found:
                category = "user" if found.get("category") == "user" else "server"
                raise ServiceError(str(found["error"]), code="failed", category=category)  # type: ignore[arg-type]
            return reply

    def _only_model(self) -> str:
        found = self.http.get(f"{API}/get_server_capabilities").json().get("supported_models") or []
        return only_one([str(model["model_name"]) for model in found], self._endpoint)

    def _create(self, base: str) -> Opened:
        shape = {"rank": self._endpoint.lora_rank or 0, "seed": self._endpoint.seed}
        kinds = {"train_unembed": False, "train_mlp": True, "train_attn": True}
        body = {
            "session_id": self.session,
            "model_seq_id": 0,
            "base_model": base,
            "lora_config": {**shape, **kinds},
        }
        body |= {"optimizer_config": {"type": "adamw"}, "type": "create_model"}
        model_id = str(self._future("create_model", body).json()["model_id"])
        info = self.post("get_info", {"model_id": model_id, "type": "get_info"})
        return Opened(model_id, base, (info.get("model_data") or {}).get("tokenizer_id"))

    def _cross_entropy(
        self, data: Sequence[Datum], weights: Sequence[Array], *, forward_only: bool = False
    ) -> PassResult:
        inputs = [
            {"target_tokens": datum.inputs["target_tokens"], "weights": values.astype(np.float32)}
            for datum, values in zip(data, weights, strict=True)
        ]
        return self._pass(data, inputs, "cross_entropy", {}, forward_only=forward_only)

    def _pass(
        self,
        data: Sequence[Datum],
        inputs: Sequence[Mapping[str, Array]],
        loss: str,
        config: Mapping[str, float],
        *,
        forward_only: bool = False,
    ) -> PassResult:
        rows = [(datum.tokens, values) for datum, values in zip(data, inputs, strict=True)]
        body = pass_message(self.opened.model_id, self._next(), rows, loss, config, forward_only=forward_only)
        headers = {"Content-Type": PROTOBUF}
        future = self.http.post(
            f"{API}/forward_backward", content=body, headers=headers, repeatable=True
        ).json()
        return pass_result(self.retrieve(future).content, data)

    def _numbered(self, route: str, **fields: Any) -> Mapping[str, Any]:
        """Return the reply to the next training request of the model."""
        body = {"model_id": self.opened.model_id, "seq_id": self._next(), **fields}
        found: Mapping[str, Any] = self._future(route, body).json()
        return found

    def _future(self, path: str, body: Mapping[str, Any]) -> Reply:
        posted = self.http.post(f"{API}/{path}", body, repeatable="seq_id" in body).json()
        return self.retrieve(posted)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _beat(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.post("session_heartbeat", {"session_id": self.session, "type": "session_heartbeat"})
            except ServiceError:
                continue  # the next call of the trainer tells


class TinkerSampler(BatchSampler):
    """Sampler of a service that speaks Tinker's protocol.

    Args:
        session: the reply that opened it.
    """

    def __init__(self, model: TinkerModel, session: Mapping[str, Any]) -> None:
        super().__init__(session.get("batch"))
        self._model = model
        self._id = str(session["sampling_session_id"])
        self._sequence = -1

    def prompt_logprobs(self, prompts: Sequence[Array]) -> list[Array]:
        """Return the ``[P]`` log-probs of each prompt's tokens, NaN first: those that come with one sampled token."""
        request = SamplingRequest(
            np.zeros(0, np.int64), max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=True
        )
        found = self.sample([replace(request, prompt=prompt) for prompt in prompts])
        values = [result.prompt_logprobs for result in found]
        if any(value is None for value in values):
            raise ServiceError(
                """the service returned no log-probs of the prompt, which the KL term needs; set reference.path to a
                model of this machine""",
                code="unexpected_reply",
                category="server",
            )
        return [value for value in values if value is not None]

    def _sampled(self, handle: Any, request: SamplingRequest) -> SamplingResult:
        return sampling_result(self._model.retrieve(handle).content, request.seed or 0)

    def _post(self, request: SamplingRequest) -> Any:
        self._sequence += 1
        params = {
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
        body = {
            "sampling_session_id": self._id,
            "seq_id": self._sequence,
            "num_samples": request.count,
            **prompts_of(request),
            "sampling_params": {name: value for name, value in params.items() if value is not None},
            "prompt_logprobs": request.prompt_logprobs,
            "type": "sample",
        }
        headers = {"X-Idempotency-Key": uuid.uuid4().hex}
        return self._model.http.post(f"{API}/asample", body, headers=headers, repeatable=True).json()


DTYPES = {1: "<f4", 2: "<i8", 3: "<i4"}


def pass_message(
    model_id: str,
    seq_id: int,
    data: Sequence[tuple[Array, Mapping[str, Array]]],
    loss: str,
    config: Mapping[str, float],
    *,
    forward_only: bool,
) -> bytes:
    """Return the message of a pass over tokens and the arrays of their loss."""
    found = message_class("PassRequest")(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for tokens, inputs in data:
        datum = found.data.add()
        datum.model_input.add().text.tokens = tokens.astype("<i4").tobytes()
        for name, values in inputs.items():
            number = 2 if values.dtype.kind == "i" else 1
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.astype(DTYPES[number]).tobytes(), number
            tensor.shape.append(len(values))
    for name, value in config.items():
        found.numbers[name] = value
        found.values[name].number = value
    return found.SerializeToString(deterministic=True)  # type: ignore[no-any-return]  # protobuf builds its messages untyped


def pass_result(body: bytes, data: Sequence[Datum]) -> PassResult:
    """Return the result of a pass over these datums."""
    found = message_class("PassOutput").FromString(body)
    outputs: list[dict[str, Array]] = []
    for record in found.records:
        rows: list[dict[str, Array]] = [{} for _ in range(record.data)]
        for name, batched in record.fields.items():
            offsets = np.frombuffer(batched.offsets, "<i8")
            for row, start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True):
                row[name] = np.frombuffer(batched.data[start:stop], DTYPES.get(batched.dtype, "<f4")).copy()
        outputs += rows
    return PassResult(outputs, dict(found.metrics), [datum.id for datum in data])


def sampling_result(body: bytes, seed: int) -> SamplingResult:
    """Return completions."""
    found: Any = message_class("Samples").FromString(body)
    sequences = [
        SampledSequence(
            np.frombuffer(one.tokens, "<i4").astype(np.int64),
            np.frombuffer(one.logprobs, "<f4").copy(),
            "",
            "length" if one.stop_reason == 1 else "stop",
        )
        for one in found.sequences
    ]
    prompt = np.frombuffer(found.prompt_logprobs, "<f4").copy() if found.HasField("prompt_logprobs") else None
    return SamplingResult(sequences, prompt, -1, seed)
