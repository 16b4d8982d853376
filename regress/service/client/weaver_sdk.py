"""Weaver's official SDK, ``nex-weaver`` 1.4 and later, as a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regress.errors import ConfigError
from regress.service.client.client_settings import Endpoint, only_one
from regress.service.client.microbatch_datums import taken, with_array
from regress.service.client.official_sdk import SdkModel, SdkSampler, service_errors
from regress.service.client.service_backend import LossConfig, Opened
from regress.service.client.weaver_client import (
    exported,
    inner,
    model_of,
    numbers,
    outputs_of,
    sampled,
)
from regress.service.service_api import AdamParams, Array, Datum, PassResult, SamplingRequest, SamplingResult


class WeaverSdkModel(SdkModel):
    """Model that Weaver's SDK talks to."""

    wire = "weaver"

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint, "weaver")
        with service_errors(endpoint):
            self._service.connect()
            base = endpoint.base_model or only_one(
                [str(name) for name in self._service.list_supported_models()], endpoint
            )
            settings: dict[str, Any] = {"base_model": base, "training_mode": "full_ft"}
            if endpoint.lora_rank is not None:
                adapter = {"rank": endpoint.lora_rank, "seed": endpoint.seed}
                settings |= {"training_mode": "lora", "lora_config": adapter}
            self._training = self._service.create_model(**settings)
        tokenizer = getattr(self._training, "tokenizer_path", None)
        self.opened = Opened(str(self._training.model_id), base, tokenizer)

    def forward(self, data: Sequence[Datum]) -> PassResult:
        """Return the log-probs of the targets, without a gradient."""
        call = getattr(self._training, "forward", None)
        if call is None:
            raise ConfigError("""the installed nex-weaver has no forward pass, which log-probs before an update and
            losses computed here need; install a later one, or set service.weaver_service.client=own""")
        return self._pass(call, data, "forward_logprob", {})

    def forward_backward(self, data: Sequence[Datum], loss: str, config: LossConfig) -> PassResult:
        """Add the gradient of a loss that the service knows to those since the last step."""
        return self._pass(self._training.forward_backward, data, loss, config)

    def backward(self, data: Sequence[Datum], gradients: Sequence[Array], config: LossConfig) -> PassResult:
        """Add the gradient of a loss whose derivative by each log-prob is given, ``[T]`` a datum."""
        weighted = with_array(data, "surrogate_weights", gradients)
        return self._pass(self._training.forward_backward, weighted, "surrogate", config)

    def optim_step(self, params: AdamParams) -> Mapping[str, float]:
        """Make one update, and return its metrics."""
        with service_errors(self._endpoint):
            found = self._training.optim_step(self._types.AdamParams(**vars(params)), wait=True)
        return numbers(inner(found).get("metrics") or {})

    def export(self, name: str) -> str:
        """Save the weights as they are for samplers, under a name, and return the path of the save."""
        with service_errors(self._endpoint):
            path = self._training.save_weights_for_sampler(name=name)
        return path if isinstance(path, str) else exported(path)

    def sampler(self, path: str | None) -> WeaverSdkSampler:
        """Return a sampler of exported weights; None: of the model that this one began as, without adapters."""
        of = {} if path is None else {"model_path": path, "model_id": model_of(path) or self.opened.model_id}
        with service_errors(self._endpoint):
            client = self._service.create_sampling_client(base_model=self.opened.base_model, **of)
        return WeaverSdkSampler(client, self._types, self._endpoint)

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save the weights with the state of the optimizer, and return the path of the save."""
        with service_errors(self._endpoint):
            found = self._training.save_state(name=name)
        return str(getattr(found, "path", None) or inner(found)["path"])

    def load(self, path: str) -> None:
        """Take the weights and the state of the optimizer of a save."""
        with service_errors(self._endpoint):
            self._training.load_state_with_optimizer(path, wait=True)

    def close(self) -> None:
        """End the session with the service; nothing that was saved is lost."""
        self._service.close()

    def _pass(
        self, call: Callable[..., Any], data: Sequence[Datum], loss: str, config: LossConfig
    ) -> PassResult:
        types = self._types
        sent = [
            types.Datum(
                model_input=types.ModelInput.from_ints(datum.tokens.tolist()),
                loss_fn_inputs=dict(datum.inputs),
            )
            for datum in taken(data, loss, config)
        ]
        with service_errors(self._endpoint):
            found = inner(call(sent, loss, loss_fn_config=dict(config) or None, wait=True))
        outputs = outputs_of(found["loss_fn_outputs"])
        return PassResult(outputs, numbers(found.get("metrics") or {}), [d.id for d in data])


class WeaverSdkSampler(SdkSampler):
    """Sampler that Weaver's SDK talks to."""

    posting = {"wait": False}

    def sampled(self, result: Any, request: SamplingRequest) -> SamplingResult:
        """Return the completions of a result of the SDK."""
        return sampled(inner(result), request)

    def scored(self, prompts: Sequence[Any]) -> list[Sequence[float | None]]:
        """Return the log-probs of prompts in the SDK's form."""
        return [self._client.compute_logprobs(prompt=prompt) for prompt in prompts]
