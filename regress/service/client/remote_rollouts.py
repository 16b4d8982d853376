"""Rollouts from a service's sampler, drawn as this process would draw them, and the reference of the KL term."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.mini_batch import Microbatch
from regress.engine.rollout_worker import SampledRollouts, StreamKey
from regress.engine.sampling import Completion, SamplingParams
from regress.service.client.microbatch_datums import loss_token_values, rows_of
from regress.service.client.service_backend import RemoteModel, RemoteSampler
from regress.service.service_api import Array, SamplingRequest, SamplingResult, ServiceError, as_int64
from regress.tasks.portable_draws import stream_seed


class CurrentSampler:
    """Sampler of the weights as they are: a new one after every update that is followed by a sample.

    Args:
        updates: returns the number of updates made so far.
    """

    def __init__(self, model: RemoteModel, updates: Callable[[], int]) -> None:
        self._model = model
        self._updates = updates
        self._found: tuple[int, RemoteSampler] | None = None

    def __call__(self) -> RemoteSampler:
        """Return it."""
        made = self._updates()
        if self._found is None or self._found[0] != made:
            name = f"step_{made:06d}" if made else "initial"
            self._found = made, self._model.sampler(self._model.export(name))
        return self._found[1]


class ServiceRolloutWorker(SampledRollouts):
    """Samples from a service.

    Args:
        sampler: returns the sampler of the current weights.

    The other arguments are those of `SampledRollouts`. Every completion is drawn with the seed of its stream, so that
    neither order nor number of the requests, nor what else the service does, changes it.
    """

    def __init__(self, sampler: Callable[[], RemoteSampler], **settings: Any) -> None:
        super().__init__(**settings)
        self._sampler = sampler

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        keys: Sequence[StreamKey],
        limits: Sequence[int],
    ) -> list[Completion]:
        """Return a completion of each prompt.

        Raises:
            ServiceError: if the service refuses one, or its reply holds no completion with log-probs.
        """
        requests = [
            _request(prompt, params, stream_seed(*key), limit)
            for prompt, key, limit in zip(prompts, keys, limits, strict=True)
        ]
        return [_completion(result) for result in self._sampler().sample(requests)]


def _request(prompt: Sequence[int], params: SamplingParams, seed: int, limit: int) -> SamplingRequest:
    return SamplingRequest(
        as_int64(list(prompt)),
        max_tokens=limit,
        temperature=0.0 if params.greedy else params.temperature,
        top_p=1.0 if params.greedy else params.top_p,
        top_k=-1 if params.greedy or not params.top_k else params.top_k,
        seed=seed,
    )


def _completion(result: SamplingResult) -> Completion:
    if len(result.sequences) != 1:
        raise ServiceError(
            f"""the service returned {len(result.sequences)} completions where one was asked for; its version does not
            fit this client""",
            code="unexpected_reply",
            category="server",
        )
    (found,) = result.sequences
    if len(found.logprobs) != len(found.tokens) or not len(found.tokens):
        raise ServiceError(
            f"""the service returned {len(found.tokens)} tokens with {len(found.logprobs)} log-probs; a completion has
            at least one token, and every token a log-prob""",
            code="unexpected_reply",
            category="server",
        )
    log_probs = torch.from_numpy(found.logprobs.astype("float32"))
    return Completion([int(token) for token in found.tokens], log_probs, found.stop_reason)


class Reference(Protocol):
    """Interface that a trainer needs of the reference."""

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each."""

    def after_step(self, step: int) -> None:
        """Follow the policy, if it is to."""


class LocalReference:
    """Frozen model in this process."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each, in float32."""
        return [values.float() for values in self._policy.log_probs(microbatches)]

    def after_step(self, step: int) -> None:
        """Do nothing: it is never synchronized."""


class ServiceReference:
    """Frozen model in a service, asked for the log-probs of whole sequences.

    Args:
        sampler: returns the sampler of its weights.
    """

    def __init__(self, sampler: Callable[[], RemoteSampler]) -> None:
        self._sampler = sampler

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """Return the reference log-probs of the loss tokens of each microbatch, ``[K]`` each."""
        prompts = [prompt for micro in microbatches for prompt in _sequences(micro)]
        found = iter(self._sampler().prompt_logprobs(prompts))
        return [
            loss_token_values(micro, [next(found)[1:] for _ in rows_of(micro)], torch.float32)
            for micro in microbatches
        ]

    def after_step(self, step: int) -> None:
        """Do nothing: it is never synchronized."""


def _sequences(micro: Microbatch) -> list[Array]:
    ids = micro.input_ids.cpu().numpy()
    return [as_int64(ids[place.row, place.column : place.column + place.length]) for place in rows_of(micro)]
