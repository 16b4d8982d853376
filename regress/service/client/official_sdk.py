"""Official SDKs of both protocols: what they have in common, and their errors as one sentence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from regress.errors import RegressError, reason
from regress.service.client.client_settings import Endpoint
from regress.service.service_api import Array, SamplingRequest, SamplingResult, ServiceError


@contextmanager
def service_errors(endpoint: Endpoint) -> Iterator[None]:
    """Turn what an SDK raises into one sentence."""
    try:
        yield
    except RegressError:
        raise
    except Exception as error:
        raise ServiceError(
            f"""the {endpoint.wire} service at {endpoint.shown} did not do what it was asked ({reason(error)}); correct
            what it names, or set service.{endpoint.wire}_service.client=own to see whether the SDK is at fault""",
            code="sdk",
            category="server",
        ) from error


class SdkModel:
    """SDK of one protocol, which is imported when a model is made.

    Args:
        module: name of the SDK's module.
    """

    def __init__(self, endpoint: Endpoint, module: str) -> None:
        self._sdk: Any = import_module(module)
        self._types: Any = self._sdk.types
        self._endpoint = endpoint
        with service_errors(endpoint):
            self._service: Any = self._sdk.ServiceClient(base_url=endpoint.base_url, api_key=endpoint.api_key)


class SdkSampler(ABC):
    """Sampler that an SDK talks to.

    Args:
        client: the SDK's sampling client.
        types: the SDK's module of types.
    """

    posting: dict[str, Any] = {}
    """Further arguments of the SDK's `sample`, with which it does not wait for the result."""

    def __init__(self, client: Any, types: Any, endpoint: Endpoint) -> None:
        self._client, self._types, self._endpoint = client, types, endpoint

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Return the completions of each request; the service works on all of them at once."""
        with service_errors(self._endpoint):
            handles = [self._post(request) for request in requests]
            found = [handle.result() for handle in handles]
        return [self.sampled(result, request) for result, request in zip(found, requests, strict=True)]

    def prompt_logprobs(self, prompts: Sequence[Array]) -> list[Array]:
        """Return the ``[P]`` log-probs of each prompt's tokens, NaN first."""
        with service_errors(self._endpoint):
            found = self.scored([self._types.ModelInput.from_ints(prompt.tolist()) for prompt in prompts])
        return [np.asarray([np.nan if v is None else v for v in values], np.float32) for values in found]

    @abstractmethod
    def sampled(self, result: Any, request: SamplingRequest) -> SamplingResult:
        """Return the completions of a result of the SDK."""

    @abstractmethod
    def scored(self, prompts: Sequence[Any]) -> list[Sequence[float | None]]:
        """Return the log-probs of prompts in the SDK's form."""

    def _post(self, request: SamplingRequest) -> Any:
        params = self._types.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
        )
        return self._client.sample(
            prompt=self._types.ModelInput.from_ints(request.prompt.tolist()),
            num_samples=request.count,
            sampling_params=params,
            include_prompt_logprobs=request.prompt_logprobs,
            **self.posting,
        )
