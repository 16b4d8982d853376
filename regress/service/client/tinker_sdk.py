"""Tinker's official SDK, ``tinker`` 0.18 and later, as a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regress.service.client.client_settings import Endpoint, only_one
from regress.service.client.official_sdk import SdkModel, SdkSampler, service_errors
from regress.service.client.service_backend import LossConfig, Opened
from regress.service.client.tinker_client import RATIO_INPUTS
from regress.service.service_api import (
    AdamParams,
    Array,
    Datum,
    PassResult,
    SampledSequence,
    SamplingRequest,
    SamplingResult,
)


class TinkerSdkModel(SdkModel):
    """Model that Tinker's SDK talks to."""

    wire = "tinker"

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, "tinker")
        with service_errors(endpoint):
            base = endpoint.base_model
            if base is None:
                offered = self._service.get_server_capabilities().supported_models
                base = only_one([str(model.model_name) for model in offered], endpoint)
            made = self._service.create_lora_training_client(
                base_model=base,
                rank=endpoint.lora_rank or 0,
                seed=endpoint.seed,
                train_unembed=False,
                train_mlp=True,
                train_attn=True,
            )
            self._training = made.result() if hasattr(made, "result") else made  # newer SDKs: a future
            info = self._training.get_info()
        self.opened = Opened(str(info.model_id), base, info.model_data.tokenizer_id)

    def forward(self, data: Sequence[Datum]) -> PassResult:
        """Return the log-probs of the targets, without a gradient."""
        sent = self._weighted(data, [datum.inputs["loss_mask"] for datum in data])
        return self._result(lambda: self._training.forward(sent, "cross_entropy"), data)

    def forward_backward(self, data: Sequence[Datum], loss: str, config: LossConfig) -> PassResult:
        """Add the gradient of a loss that the service knows to those since the last step."""
        if loss == "cross_entropy":
            return self._cross_entropy(data, [datum.inputs["advantages"] for datum in data])
        sent = [self._datum(d.tokens, {n: d.inputs[n] for n in RATIO_INPUTS}) for d in data]
        settings = {name: float(value) for name, value in config.items() if not isinstance(value, str)}
        return self._result(
            lambda: self._training.forward_backward(sent, loss, loss_fn_config=settings or None), data
        )

    def backward(self, data: Sequence[Datum], gradients: Sequence[Array], config: LossConfig) -> PassResult:
        """Add the gradient of a loss whose derivative by each log-prob is given: minus the weights of cross entropy."""
        return self._cross_entropy(data, [-values for values in gradients])

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make one update, and return its metrics."""
        with service_errors(self._endpoint):
            found = self._training.optim_step(self._sdk.AdamParams(**vars(params))).result()
        return {str(name): float(value) for name, value in (found.metrics or {}).items()}

    def export(self, name: str) -> str:
        """Save the weights as they are for samplers, under a name, and return the path of the save."""
        with service_errors(self._endpoint):
            return str(self._training.save_weights_for_sampler(name=name).result().path)

    def sampler(self, path: str | None) -> TinkerSdkSampler:
        """Return a sampler of exported weights; None: of the model that this one began as, without adapters."""
        of = {"base_model": self.opened.base_model} if path is None else {"model_path": path}
        with service_errors(self._endpoint):
            return TinkerSdkSampler(self._service.create_sampling_client(**of), self._types, self._endpoint)

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save the weights with the state of the optimizer, which this protocol always keeps with them."""
        with service_errors(self._endpoint):
            return str(self._training.save_state(name).result().path)

    def load(self, path: str) -> None:
        """Take the weights and the state of the optimizer of a save."""
        with service_errors(self._endpoint):
            self._training.load_state_with_optimizer(path).result()

    def close(self) -> None:
        """End the session with the service; nothing that was saved is lost."""
        leave = getattr(self._service, "__exit__", None)  # older SDKs close nothing
        if leave is not None:
            leave(None, None, None)

    def _cross_entropy(self, data: Sequence[Datum], weights: Sequence[Array]) -> PassResult:
        sent = self._weighted(data, weights)
        return self._result(lambda: self._training.forward_backward(sent, "cross_entropy"), data)

    def _weighted(self, data: Sequence[Datum], weights: Sequence[Array]) -> list[Any]:
        return [
            self._datum(d.tokens, {"target_tokens": d.inputs["target_tokens"], "weights": values})
            for d, values in zip(data, weights, strict=True)
        ]

    def _datum(self, tokens: Array, inputs: Mapping[str, Array]) -> Any:
        types = self._types
        tensors = {
            name: types.TensorData(
                data=values.tolist(),
                dtype="int64" if values.dtype.kind == "i" else "float32",
                shape=list(values.shape),
            )
            for name, values in inputs.items()
        }
        return types.Datum(model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=tensors)

    def _result(self, call: Any, data: Sequence[Datum]) -> PassResult:
        with service_errors(self._endpoint):
            found = call().result()
        outputs = [
            {name: np.asarray(tensor.data, np.float32) for name, tensor in output.items()}
            for output in found.loss_fn_outputs
        ]
        return PassResult(outputs, {k: float(v) for k, v in found.metrics.items()}, [d.id for d in data])


class TinkerSdkSampler(SdkSampler):
    """Sampler that Tinker's SDK talks to."""

    def sampled(self, result: Any, request: SamplingRequest) -> SamplingResult:
        """Return the completions of a result of the SDK."""
        sequences = [
            SampledSequence(
                np.asarray(one.tokens, np.int64),
                np.asarray(one.logprobs or [], np.float32),
                "",
                "length" if one.stop_reason == "length" else "stop",
            )
            for one in result.sequences
        ]
        return SamplingResult(sequences, None, -1, request.seed or 0)

    def scored(self, prompts: Sequence[Any]) -> list[Sequence[float | None]]:
        """Return the log-probs of prompts in the SDK's form."""
        return [future.result() for future in [self._client.compute_logprobs(prompt) for prompt in prompts]]
