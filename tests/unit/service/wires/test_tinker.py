"""Tinker's protocol, as its SDK's requests were recorded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from regress.service.wires import tinker_protobuf
from tests.unit.service.wires.http_client import Client


@pytest.fixture
def model(tinker: Client) -> str:
    """A model in full parameters."""
    assert tinker.post("client/config", {"sdk_version": "0.38.0"}).json == {}
    session = tinker.post("create_session", {"tags": [], "sdk_version": "0.38.0"}).json["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 0}}
    future = tinker.post("create_model", body).json
    created = tinker.post("retrieve_future", {"request_id": future["request_id"]}).json
    assert created == {"model_id": f"{session}:train:0"}
    info = tinker.post("get_info", {"model_id": created["model_id"]}).json
    assert info["is_lora"] is False
    return str(created["model_id"])


def retrieve(tinker: Client, answer: Any, accept: str = "application/json") -> Any:
    """The result of a future."""
    assert answer.status == 200, answer.body
    return tinker.post("retrieve_future", {"request_id": answer.json["request_id"]}, Accept=accept)


def json_pass(model: str, seq_id: int, **inputs: list[float]) -> Any:
    """Body of a pass as SDKs before 0.25 send it."""
    tensors: dict[str, Any] = {"target_tokens": {"data": [3, 4, 1], "dtype": "int64", "shape": [3]}}
    for name, values in inputs.items():
        tensors[name] = {"data": values, "dtype": "float32", "shape": [3]}
    data = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [2, 3, 4]}]},
        "loss_fn_inputs": tensors,
    }
    return {
        "model_id": model,
        "seq_id": seq_id,
        "forward_backward_input": {"data": [data], "loss_fn": "importance_sampling"},
    }


def test_a_step(tinker: Client, model: str) -> None:
    body = json_pass(model, 1, logprobs=[-1.0, -2.0, -3.0], advantages=[1.0, 0.5, -1.0])
    done = retrieve(tinker, tinker.post("forward_backward", body)).json
    assert all(name.count(":") == 1 for name in done["metrics"])
    step = tinker.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.5}})
    metrics = retrieve(tinker, step).json["metrics"]
    assert (metrics["eps"], metrics["weight_decay"], metrics["grad_clip_norm"]) == (1e-12, 0.0, 0.0)
    save = {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0, "kind": "snapshot"}
    sampler = retrieve(tinker, tinker.post("save_weights_for_sampler", save)).json["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2, "prompt": prompt}
    sent = tinker.post("asample", {**body, "sampling_params": {"max_tokens": 3, "seed": 4}})
    assert len(set(sent.json["sample_sequence_ids"])) == 2
    assert [len(sequence["tokens"]) for sequence in retrieve(tinker, sent).json["sequences"]] == [3, 3]
    binary = retrieve(tinker, sent, "application/x-protobuf")
    assert binary.headers["content-type"] == "application/x-protobuf"


def test_a_refused_pass_spends_its_number(tinker: Client, model: str) -> None:
    failed = retrieve(tinker, tinker.post("forward_backward", json_pass(model, 1, logprobs=[1.0]))).json
    assert failed["category"] == "user"
    assert "has 1 numbers, but its shape is [3]" in failed["error"]
    step = tinker.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    assert retrieve(tinker, step).json["metrics"]["step"] == 1


def test_several_targets_at_a_position_keep_their_shape(tinker: Client, model: str) -> None:
    body = json_pass(model, 1)
    part = body["forward_backward_input"]
    part["loss_fn"] = "cross_entropy"
    for name, dtype, values in (
        ("target_tokens", "int64", [3, 4, 1, 7, 2, 5]),
        ("weights", "float32", [1.0, 0.5, 1.0, 1.0, 0.25, 0.0]),
    ):
        part["data"][0]["loss_fn_inputs"][name] = {"data": values, "dtype": dtype, "shape": [3, 2]}
    answer = tinker.post("forward_backward", body)
    done = retrieve(tinker, answer).json
    assert {tensor["shape"][1] for tensor in done["loss_fn_outputs"][0].values()} == {2}
    found = tinker_protobuf.message_class("PassOutput").FromString(
        retrieve(tinker, answer, "application/x-protobuf").body
    )
    log_probs = found.records[0].fields["logprobs"]
    assert list(log_probs.trailing) == [2]
    assert np.frombuffer(log_probs.data, "<f4").tolist() == done["loss_fn_outputs"][0]["logprobs"]["data"]


@pytest.mark.parametrize("constant", ["NaN", "-Infinity"])
def test_what_is_no_json_spends_its_number_where_it_can_be_read(
    tinker: Client, weaver: Client, model: str, constant: str
) -> None:
    """Old SDKs send NaN as such, and count on: a number that was not spent would stop all later requests."""
    body = json.dumps(json_pass(model, 1, logprobs=[0.5] * 3, advantages=[1.0] * 3)).replace(
        "0.5", constant, 1
    )
    failed = retrieve(tinker, tinker.post("forward_backward", body.encode())).json
    assert failed == {
        "error": f"the body has {constant}, which is not JSON; send finite numbers",
        "category": "user",
    }
    step = json.dumps({"model_id": model, "seq_id": 2, "adam_params": {"eps": 0.5}}).replace("0.5", constant)
    assert constant in retrieve(tinker, tinker.post("optim_step", step.encode())).json["error"]
    payload = {"payload": {"seq_id": 3, "adam_params": {"eps": 0.5}}}
    refused = weaver.post(
        f"models/{model}/optimizer-steps", json.dumps(payload).replace("0.5", constant).encode()
    )
    assert (refused.status, constant in refused.json["message"]) == (400, True)
    done = tinker.post("optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}})
    assert retrieve(tinker, done).json["metrics"]["step"] == 1
