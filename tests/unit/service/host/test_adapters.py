"""Models with an adapter: only it is trained, saved and sampled with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_requests import ADAM, held, offer, ratio_pass, same

from regress.engine.engine_ranks import SingleProcess
from regress.engine.run_models import build_policy
from regress.service.host.engine_host import EngineHost
from regress.service.service_api import LoraSpec, ModelSpec, SamplingRequest, SaveKind, ServiceError

MakeHost = Callable[..., EngineHost]
SPEC = ModelSpec("tiny", LoraSpec(rank=2, seed=3, train_unembed=True))


def trained(host: EngineHost, model_id: str) -> None:
    host.run_pass(model_id, ratio_pass([9, 5], seed=1), {"seq_id": 1})
    host.optim_step(model_id, ADAM, {"seq_id": 2})


def test_an_adapter_is_trained_saved_and_restored(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host("warm_start.steps=1", models=0)
    assert host.create("m0", SPEC).lora == SPEC.lora
    model = host._models["m0"].policy.model
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    trained(host, "m0")
    assert all("lora_" in name for name in held(host))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in held(host)} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    }
    assert all((dict(model.named_parameters())[name] == value).all() for name, value in frozen.items())
    start = host._bases["tiny"].start()
    for name, value in frozen.items():
        assert (start[name.replace(".base_layer", "")] == value).all(), name
    host.save("m0", str(tmp_path / "state"), SaveKind.STATE)
    assert host.create_from("m1", str(tmp_path / "state"), optimizer=True).lora == SPEC.lora
    for model_id in ("m0", "m1"):
        trained(host, model_id)
    assert same(held(host, "m0"), held(host, "m1"))
    host.create("full", ModelSpec("tiny"))
    with pytest.raises(ServiceError, match=r"LoRA of rank 2.*full parameters"):
        host.load("full", str(tmp_path / "state"), optimizer=True)


@pytest.mark.extended
def test_an_adapter_of_other_weights_is_refused(make_host: MakeHost, tmp_path: Path) -> None:
    make = make_host("seed=1", models=0)
    make.create("m0", SPEC)
    make.save("m0", str(tmp_path / "state"), SaveKind.STATE)
    other = make_host("seed=2", models=0)
    with pytest.raises(ServiceError, match="other weights than tiny has now"):
        other.create_from("m0", str(tmp_path / "state"), optimizer=True)
    with pytest.raises(ServiceError, match="other weights than tiny has now"):
        other.open_sampler("s", str(tmp_path / "state"), None)
    assert not other._models


def test_a_sampler_has_the_adapter(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host(models=0)
    host.create("m0", SPEC)
    host.save("m0", str(tmp_path / "w0"), SaveKind.SAMPLER)
    trained(host, "m0")
    host.save("m0", str(tmp_path / "w1"), SaveKind.SAMPLER)
    host.open_sampler("base", None, "tiny")
    for number in range(2):
        host.open_sampler(f"w{number}", str(tmp_path / f"w{number}"), None)
    prompt = np.array([3, 7, 9, 4])
    before, after, base = (host.prompt_logprobs(name, prompt)[1:] for name in ("w0", "w1", "base"))
    np.testing.assert_allclose(before, base, atol=1e-6)  # a new adapter changes nothing
    assert np.abs(after - before).max() > 1e-3
    request = ratio_pass([4])
    data = [type(request.data[0])(prompt[:-1], {"target_tokens": prompt[1:]})]
    scores = host.run_pass("m0", replace(request, data=data, loss="forward_logprob", forward_only=True), {})
    np.testing.assert_allclose(after, scores.outputs[0]["logprobs"], atol=1e-6)
    assert host.sample("w1", SamplingRequest(prompt, max_tokens=3, seed=1)).step == 1


def test_the_adapter_is_that_of_a_self_hosted_run(make_host: MakeHost) -> None:
    settings = "model.lora.r=2", "model.lora.alpha=6", "model.lora.target_modules=[q_proj, v_proj]"
    host = make_host(*settings, models=0)
    host.create("m0", ModelSpec("tiny", LoraSpec(2)))
    own = build_policy(offer(*settings), host._bases["tiny"].tokenizer, SingleProcess())
    expected = {name: p.detach() for name, p in own.named_parameters()}
    assert same(held(host), expected)
    assert (
        dict(own.model.named_parameters())["lm_head.weight"] == host._models["m0"].policy.model.lm_head.weight
    ).all()


@pytest.mark.parametrize(
    ("lora", "named"),
    [
        (LoraSpec(0), "rank=0"),
        (LoraSpec(2, train_mlp=False, train_attn=False), "trains nothing"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(make_host: MakeHost, lora: LoraSpec, named: str) -> None:
    with pytest.raises(ServiceError, match=named):
        make_host(models=0).create("m0", ModelSpec("tiny", lora))


@pytest.mark.extended
@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.extended) for name in ("gpt2", "llama"))]
)
def test_layers_of_other_families_are_found(make_host: MakeHost, family: str) -> None:
    sizes = "model.config={}" if family == "gpt2" else "model.config.num_hidden_layers=2"
    host = make_host(f"model.family={family}", "~model.config", sizes, models=0)
    lora = LoraSpec(2, train_mlp=family != "qwen3_moe")
    host.create("m0", ModelSpec("tiny", lora))
    trained(host, "m0")
    parents = {name.split(".lora_")[0].split(".")[-2] for name in held(host)}
    assert len(parents) == 1 + lora.train_mlp
    if family == "qwen3_moe":
        with pytest.raises(ServiceError, match="train_mlp"):
            host.create("m1", ModelSpec("tiny", LoraSpec(2)))
