"""Samplers draw what a self-hosted rollout draws, from the weights of one moment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_requests import ADAM, VOCABULARY, offer, ratio_pass

from regress.engine.engine_ranks import SingleProcess
from regress.engine.rollout_worker import TRAIN, HFRolloutWorker, Prompt
from regress.engine.sampling import SamplingParams
from regress.service.host.engine_host import EngineHost
from regress.service.host.weight_samplers import KEPT
from regress.service.service_api import Datum, PassRequest, SamplingRequest, SaveKind, ServiceError
from regress.tasks.portable_draws import stream_seed
from regress.tasks.problem import Problem
from regress.tasks.reward_functions import Reward

PROMPT = np.array([3, 7, 9, 4])
MakeHost = Callable[..., EngineHost]


def drawn(host: EngineHost, **request: Any) -> list[list[int]]:
    settings = {"count": 4, "max_tokens": 12, "seed": 5, **request}
    return [one.tokens.tolist() for one in host.sample("s", SamplingRequest(PROMPT, **settings)).sequences]


@pytest.fixture
def host(make_host: MakeHost) -> EngineHost:
    found = make_host()
    found.open_sampler("s", None, "tiny")
    return found


@pytest.mark.parametrize(
    "sampling",
    [pytest.param({}, marks=pytest.mark.extended), {"temperature": 0.7, "top_p": 0.8, "top_k": 5}],
)
def test_draws_are_those_of_a_self_hosted_rollout(host: EngineHost, sampling: dict[str, Any]) -> None:
    base = host._bases["tiny"]
    tokenizer = base.tokenizer
    params = SamplingParams(12, tokenizer.eos_token_id, tokenizer.pad_token_id, **sampling)
    worker = HFRolloutWorker(
        host._models["m0"].policy.model,
        tokenizer=tokenizer,
        params=params,
        score=lambda *_: Reward(0.0, {}),
        batch_size=4,
        seed=11,
    )
    prompt = Prompt("g1", Problem("g1", "abc", "cba"), tuple(PROMPT.tolist()), 4)
    expected = [t.tokens[len(PROMPT) :] for t in worker.rollout(3, [prompt], TRAIN)]
    seeds = [stream_seed("sample", 11, 3, TRAIN, "g1", run, 0) for run in range(4)]
    assert [drawn(host, count=1, seed=seed, **sampling)[0] for seed in seeds] == expected
    assert len({tuple(row) for row in expected}) > 1


def test_a_seed_and_the_number_decide_a_completion(host: EngineHost) -> None:
    four = drawn(host)
    assert drawn(host) == four
    assert drawn(host, count=2) == four[:2]
    assert drawn(host, seed=6) != four
    free = host.sample("s", SamplingRequest(PROMPT, count=2, max_tokens=12))
    again = drawn(host, count=2, seed=free.seed)
    assert again == [one.tokens.tolist() for one in free.sequences]


def test_log_probs_of_samples_are_those_of_training(host: EngineHost) -> None:
    """Drawn without a warp, the tokens score what a forward pass says of them."""
    found = host.sample("s", SamplingRequest(PROMPT, count=1, max_tokens=12, seed=5, prompt_logprobs=True))
    (one,) = found.sequences
    whole = np.concatenate([PROMPT, one.tokens])
    datum = Datum(whole[:-1], {"target_tokens": whole[1:]})
    request = PassRequest([datum], "forward_logprob", forward_only=True)
    scores = host.run_pass("m0", request, {"seq_id": 1}).outputs[0]["logprobs"]
    np.testing.assert_allclose(one.logprobs, scores[len(PROMPT) - 1 :], atol=1e-5)
    assert found.prompt_logprobs is not None
    assert np.isnan(found.prompt_logprobs[0])
    np.testing.assert_allclose(found.prompt_logprobs[1:], scores[: len(PROMPT) - 1], atol=1e-5)
    np.testing.assert_array_equal(host.prompt_logprobs("s", PROMPT), found.prompt_logprobs)


def test_a_completion_ends_where_it_is_told_to(host: EngineHost) -> None:
    plain = drawn(host, count=1, max_tokens=30)[0]
    tokenizer = host._bases["tiny"].tokenizer
    assert len(plain) > 4
    for place in range(len(plain) - 1):
        token = plain[place]
        first = plain.index(token) + 1
        assert drawn(host, count=1, max_tokens=30, stop_token_ids=[token])[0] == plain[:first]
        text = tokenizer.decode(plain[place : place + 2])
        cut = drawn(host, count=1, max_tokens=30, stop=[text])[0]
        assert cut == plain[: len(cut)]
        assert text in tokenizer.decode(cut)
        assert text not in tokenizer.decode(cut[:-1])
    assert drawn(host, count=1, max_tokens=2)[0] == plain[:2]


def test_a_stop_ends_one_row_of_several(host: EngineHost) -> None:
    plain = drawn(host)
    stop = plain[0][0]
    for before, after in zip(plain, drawn(host, stop_token_ids=[stop]), strict=True):
        assert after == (before[: before.index(stop) + 1] if stop in before else before)


def test_a_sampler_keeps_the_weights_of_its_moment(host: EngineHost, tmp_path: Path) -> None:
    before = drawn(host)
    host.save("m0", str(tmp_path / "w0"), SaveKind.SAMPLER)
    for _ in range(3):
        host.run_pass("m0", ratio_pass([9, 5]), {"seq_id": 1})
        host.optim_step("m0", ADAM, {"seq_id": 2})
    host.save("m0", str(tmp_path / "w3"), SaveKind.SAMPLER)
    host.open_sampler("early", str(tmp_path / "w0"), None)
    host.open_sampler("late", str(tmp_path / "w3"), None)
    request = SamplingRequest(PROMPT, count=4, max_tokens=12, seed=5)
    late, early = host.sample("late", request), host.sample("early", request)
    assert (early.step, late.step) == (0, 3)
    assert [one.tokens.tolist() for one in early.sequences] == before == drawn(host)
    assert any(
        (a.logprobs[:1] != b.logprobs[:1]).any() for a, b in zip(early.sequences, late.sequences, strict=True)
    )
    host.close_sampler("early")
    with pytest.raises(ServiceError, match="no sampler early"):
        host.sample("early", request)


def test_many_samplers_share_one_model_and_keep_apart(host: EngineHost, tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(KEPT + 2)]
    for name in names:
        host.save("m0", str(tmp_path / name), SaveKind.SAMPLER)
        host.open_sampler(name, str(tmp_path / name), None)
        host.run_pass("m0", ratio_pass([9, 5]), {"seq_id": 1})
        host.optim_step("m0", ADAM, {"seq_id": 2})
    first = [host.prompt_logprobs(name, PROMPT)[1:] for name in names]
    again = [host.prompt_logprobs(name, PROMPT)[1:] for name in reversed(names)][::-1]
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    assert all((one != other).any() for one, other in pairwise(first))
    shutil.rmtree(tmp_path / "s0")
    host.save("m0", str(tmp_path / "s0"), SaveKind.SAMPLER)
    for name in names[1:]:
        host.prompt_logprobs(name, PROMPT)
    with pytest.raises(ServiceError, match="s0 was replaced"):
        host.prompt_logprobs("s0", PROMPT)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> EngineHost:
    """A host that no test changes."""
    found = EngineHost({"tiny": offer()}, SingleProcess(), tmp_path_factory.mktemp("host"))
    found.open_sampler("s", None, "tiny")
    return found


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"count": 0}, "num_samples"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop": [""]}, "stop"),
        ({"prompt": np.array([], dtype=np.int64)}, "prompt"),
        ({"prompt": np.array([VOCABULARY])}, f"token {VOCABULARY}"),
        ({"prompt": np.array([0.5])}, "prompt"),
        ({"prompt": np.zeros(48, dtype=np.int64)}, "max_tokens"),
    ],
)
def test_what_cannot_be_sampled_is_named(shared: EngineHost, wrong: dict[str, Any], named: str) -> None:
    request = replace(SamplingRequest(PROMPT), **wrong)
    with pytest.raises(ServiceError, match=named):
        shared.sample("s", request)
