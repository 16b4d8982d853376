"""Sampling requests as few as a service allows: those that differ in their prompts alone become rows of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regress.service.service_api import Array, SamplingRequest, SamplingResult, SamplingRow, ServiceError


class BatchSampler(ABC):
    """Sampler that sends one request for as many prompts as the service allows.

    Args:
        limits: completions and tokens of a request with rows, as the service stated them; None: it knows no rows.
    """

    def __init__(self, limits: Mapping[str, Any] | None) -> None:
        self._limits = limits

    def sample(self, requests: Sequence[SamplingRequest]) -> list[SamplingResult]:
        """Return the completions of each request; the service works on all of them at once."""
        sent = batches(requests, self._limits)
        handles = [self._post(request) for request in sent]
        found = [self._sampled(handle, request) for handle, request in zip(handles, sent, strict=True)]
        return [one for result, request in zip(found, sent, strict=True) for one in _parts(result, request)]

    @abstractmethod
    def _post(self, request: SamplingRequest) -> Any:
        """Send a request, and return what its result is asked by."""

    @abstractmethod
    def _sampled(self, handle: Any, request: SamplingRequest) -> SamplingResult:
        """Wait for a result."""


def batches(requests: Sequence[SamplingRequest], limits: Mapping[str, Any] | None) -> list[SamplingRequest]:
    """Return requests for the same completions in the same order, as few as the limits allow."""
    found: list[SamplingRequest] = []
    completions = tokens = 0
    for request in requests:
        size = len(request.prompt) + (request.max_tokens or 0)
        completions, tokens = completions + 1, tokens + size
        full = limits is None or completions > limits["completions"] or tokens > limits["tokens"]
        if full or not found or request.seed is None or not _alike(found[-1], request):
            found.append(request)
            completions, tokens = request.count, request.count * size
        else:
            row = SamplingRow(request.prompt, request.seed, request.max_tokens)
            found[-1] = replace(found[-1], rows=(*found[-1].rows, row))
    return found


def split_scores(values: Array, prompts: Sequence[Array]) -> list[Array]:
    """Return the log-probs of several prompts, which lie one after the other, prompt by prompt.

    Raises:
        ServiceError: if they are not as many as the tokens.
    """
    if len(values) != sum(map(len, prompts)):
        raise _unfitting(f"{len(values)} log-probs of prompts", f"{sum(map(len, prompts))} tokens")
    return np.split(values, np.cumsum([len(prompt) for prompt in prompts])[:-1])


def _alike(one: SamplingRequest, other: SamplingRequest) -> bool:
    """Return True if two requests ask for one completion each and differ in nothing but its prompt, seed and length."""
    settings = [
        {name: value for name, value in vars(request).items() if name not in ("prompt", "seed", "max_tokens")}
        for request in (replace(one, rows=()), other)
    ]
    return settings[0] == settings[1] and other.count == 1 and one.seed is not None


def _parts(result: SamplingResult, request: SamplingRequest) -> list[SamplingResult]:
    """Return the result of each of the requests that were sent as one."""
    if not request.rows:
        return [result]
    if len(result.sequences) != len(request.prompts):
        raise _unfitting(f"{len(result.sequences)} completions", f"{len(request.prompts)} were asked for")
    scores: Sequence[Array | None] = [None] * len(request.prompts)
    if result.prompt_logprobs is not None:
        scores = split_scores(result.prompt_logprobs, request.prompts)
    return [
        replace(result, sequences=[sequence], prompt_logprobs=values)
        for sequence, values in zip(result.sequences, scores, strict=True)
    ]


def _unfitting(found: str, asked: str) -> ServiceError:
    return ServiceError(
        f"the service returned {found} where {asked}; its version does not fit this client",
        code="unexpected_reply",
        category="server",
    )
