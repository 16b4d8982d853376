"""Completions of many prompts are one request and one batch of the service, where it is one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from regress.engine.sampling import SamplingParams, sample
from regress.service.client.client_settings import Endpoint
from regress.service.client.sampling_batches import BatchSampler, batches
from regress.service.client.service_connection import open_model
from regress.service.service_api import SamplingRequest, ServiceError
from tests.unit.service.client.conftest import KEY, serving

PROMPTS = [np.array(tokens) for tokens in ([3, 4, 5], [6, 7], [8, 9, 10, 11], [3], [5, 5])]
REQUESTS = [
    SamplingRequest(prompt, max_tokens=6 + number, seed=100 + number) for number, prompt in enumerate(PROMPTS)
]
LIMITS = {"completions": 1024, "tokens": 4096}


@pytest.fixture(scope="module")
def address(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(base, tmp_path_factory.mktemp("served")) as url:
        yield url


def posts(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the requests for completions and log-probs that a sampler makes from now on."""
    made: list[str] = []
    real = sampler._model.http.post

    def post(path: str, *arguments: Any, **settings: Any) -> Any:
        if path.endswith(("samples", "logprobs", "asample")):
            made.append(path)
        return real(path, *arguments, **settings)

    monkeypatch.setattr(sampler._model.http, "post", post)
    return made


@pytest.mark.parametrize("wire", ["weaver", "tinker"])
def test_a_batch_is_one_request_whose_draws_are_this_processs(
    address: str, base: Path, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(Endpoint(wire, address, KEY, "base", None, 0, "own", 60.0))
    sampler = model.sampler(model.export("first"))
    made = posts(sampler, monkeypatch)
    found = sampler.sample(REQUESTS)
    assert len(made) == 1
    eos = AutoTokenizer.from_pretrained(base).eos_token_id
    expected = sample(
        AutoModelForCausalLM.from_pretrained(base),
        [prompt.tolist() for prompt in PROMPTS],
        SamplingParams(10, eos, 0),
        generators=[Random(request.seed) for request in REQUESTS],
        limits=[request.max_tokens or 0 for request in REQUESTS],
    )
    for result, own in zip(found, expected, strict=True):
        (sequence,) = result.sequences
        assert sequence.tokens.tolist() == own.tokens
        assert torch.equal(torch.from_numpy(sequence.logprobs), own.log_probs)
        assert sequence.stop_reason == own.finish_reason
    made.clear()
    scores = sampler.prompt_logprobs(PROMPTS)
    assert len(made) == 1
    for prompt, values in zip(PROMPTS, scores, strict=True):
        (alone,) = sampler.prompt_logprobs([prompt])
        assert np.array_equal(alone, values, equal_nan=True)
    model.close()


@pytest.mark.parametrize("wire", ["weaver", "tinker"])
def test_another_service_gets_one_request_a_prompt(
    address: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(Endpoint(wire, address, KEY, "base", None, 0, "own", 60.0))
    sampler = model.sampler(None)
    together = [result.sequences[0].tokens.tolist() for result in sampler.sample(REQUESTS)]
    sampler._limits = None  # as one that tells nothing of rows
    made = posts(sampler, monkeypatch)
    assert [result.sequences[0].tokens.tolist() for result in sampler.sample(REQUESTS)] == together
    assert len(made) == len(REQUESTS)
    assert [len(values) for values in sampler.prompt_logprobs(PROMPTS)] == [len(prompt) for prompt in PROMPTS]
    model.close()


def test_requests_are_put_together_within_the_limits_and_where_they_are_alike() -> None:
    def rows(requests: list[SamplingRequest], **limits: int) -> list[int]:
        return [len(request.prompts) for request in batches(requests, {**LIMITS, **limits})]

    assert rows(REQUESTS) == [5]
    assert rows(REQUESTS, completions=2) == [2, 2, 1]
    assert rows(REQUESTS, tokens=18) == [2, 1, 1, 1]
    assert rows(REQUESTS, tokens=1) == [1, 1, 1, 1, 1]
    other = replace(REQUESTS[2], temperature=0.5)
    assert rows([*REQUESTS[:2], other, *REQUESTS[3:]]) == [2, 1, 2]
    assert rows([replace(REQUESTS[0], seed=None), *REQUESTS[1:]]) == [1, 4]
    assert rows([REQUESTS[0], replace(REQUESTS[1], seed=None), *REQUESTS[2:]]) == [1, 1, 3]
    assert rows([replace(REQUESTS[0], count=2), *REQUESTS[1:]]) == [1, 4]
    assert rows([]) == []
    assert batches(REQUESTS, None) == REQUESTS


@pytest.mark.parametrize("fault", ["too few", "no scores"])
def test_a_reply_of_another_length_is_refused(fault: str) -> None:
    class Short(BatchSampler):
        def _post(self, request: SamplingRequest) -> Any:
            return None

        def _sampled(self, handle: Any, request: SamplingRequest) -> Any:
            from regress.service.service_api import SampledSequence, SamplingResult

            one = SampledSequence(np.array([1]), np.zeros(1), "", "stop")
            count = len(request.prompts) - (fault == "too few")
            return SamplingResult([one] * count, np.zeros(1), 0, 0)

    with pytest.raises(ServiceError, match="its version does not fit this client"):
        Short(LIMITS).sample(REQUESTS)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"prompt": {"chunks": [{"tokens": [1]}]}}], r"rows\[0\].seed is missing"),
        ([{"prompt": {"chunks": [{"tokens": [10**6]}]}, "seed": 1}], "token"),
        ([{"prompt": {"chunks": []}, "seed": 1}], r"rows\[0\].prompt has no tokens"),
        ([{"prompt": {"chunks": [{"tokens": [1] * 5000}]}, "seed": 1}], "token ids"),
        (
            [{"prompt": {"chunks": [{"tokens": [1]}]}, "seed": 1}] * 1024,
            "must be a list of at most 1023 values",
        ),
        ({"prompt": 1}, "rows must be a list"),
        (
            [{"prompt": {"chunks": [{"tokens": [1]}]}, "seed": 1, "max_tokens": 2**22}],
            "2 completions with their prompts are 4194307 tokens, more than 4194304",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused_by_name(address: str, rows: Any, sentence: str) -> None:
    model: Any = open_model(Endpoint("weaver", address, KEY, "base", None, 0, "own", 60.0))
    sampler = model.sampler(None)
    body = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1, "seed": 1}}
    with pytest.raises(ServiceError, match=sentence):
        model.done(sampler._ask("samples", {**body, "rows": rows}))
    model.close()
