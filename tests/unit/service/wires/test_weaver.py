"""Weaver's protocol, as its SDK's requests were recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.service.wires.http_client import Client


@pytest.fixture
def model(weaver: Client) -> str:
    """A model in full parameters."""
    session = weaver.post("sessions", {"sdk_version": "1.19.2", "tags": []}).json["id"]
    body = {"model_seq_id": 1, "base_model": "tiny", "training_mode": "full_ft"}
    found = weaver.post(f"sessions/{session}/models", body)
    assert found.status == 201
    assert found.json["id"] == f"{session}:train:1"
    return str(found.json["id"])


def datum(tokens: list[int], **inputs: list[float]) -> dict[str, Any]:
    """One sequence as the SDK sends it."""
    named = {"target_tokens": {"data": [*tokens[1:], 1], "dtype": "int64"}}
    for name, values in inputs.items():
        named[name] = {"data": values, "dtype": "float32"}
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": named,
    }


def forward_backward(seq_id: int, model: str, data: list[Any], loss: str = "importance_sampling") -> Any:
    """Body of a pass."""
    return {
        "payload": {
            "model_id": model,
            "seq_id": seq_id,
            "tensor_transport": "default",
            "forward_backward_input": {
                "loss_fn": loss,
                "data": data,
                "loss_fn_config": {"entropy_coeff": 1e-4},
            },
        }
    }


def test_a_step(weaver: Client, model: str) -> None:
    data = [datum([2, 3, 4], logprobs=[-1.0, -2.0, -3.0], advantages=[1.0, 0.5, -1.0])]
    done = weaver.post(f"models/{model}/forward-backward-passes", forward_backward(1, model, data)).json
    assert done["status"] == "done"
    result = done["response"]["result"]
    assert result["metrics"]["loss"] == result["metrics"]["loss:sum"] != 0
    assert len(result["loss_fn_outputs"][0]["logprobs"]["data"]) == 3
    adam = {"payload": {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.5}}}
    done = weaver.post(f"models/{model}/optimizer-steps", adam).json
    assert done["response"]["metrics"]["weight_decay"] == 1e-2
    path = weaver.post(f"models/{model}/export-sampler", {"seq_id": 3, "path": "step_000001"}).json
    address = path["response"]["model_path"]
    assert address == f"weaver://{model}/sampler/step_000001"
    session = model.partition(":")[0]
    body = {"sampling_session_seq_id": 1, "base_model": "tiny", "model_path": address, "model_id": model}
    sampler = weaver.post(f"sessions/{session}/sampling-sessions", body).json["id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"prompt": prompt, "num_samples": 2, "sampling_params": {"max_tokens": 3, "seed": 4}}
    found = weaver.post(f"sampling-sessions/{sampler}/samples", body).json["response"]["result"]
    assert [len(sequence["tokens"]) for sequence in found["sequences"]] == [3, 3]
    found = weaver.post(f"sampling-sessions/{sampler}/logprobs", {"prompt": prompt}).json
    assert found["response"]["result"]["prompt_logprobs"][0] is None


def test_a_failed_operation_is_told_to_a_poll(weaver: Client, model: str) -> None:
    """nex-weaver 1.4 and 1.10 return None, as if all were well, for a POST that answers with status error."""
    data = [datum([2, 3], advantages=[1.0, 1.0])]
    body = forward_backward(1, model, data, loss="nonsense")
    posted = weaver.post(f"models/{model}/forward-backward-passes", body).json
    assert posted["status"] == "pending"
    polled = weaver.get(f"operations/{posted['id']}").json
    assert (polled["status"], polled["error_code"]) == ("error", "invalid_request")
    assert "'nonsense' is not a loss" in polled["error_message"]
    assert polled["error"] == polled["error_message"]


def test_a_refused_pass_spends_its_number(weaver: Client, model: str) -> None:
    """The SDK does not use the number again, whatever the status."""
    refused = weaver.post(
        f"models/{model}/forward-backward-passes", forward_backward(1, model, [datum([2, 3], logprobs=[1.0])])
    )
    assert refused.status == 400
    assert "logprobs has 1 numbers for 2 tokens" in refused.json["message"]
    adam = {"payload": {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.5}}}
    assert weaver.post(f"models/{model}/optimizer-steps", adam).json["status"] == "done"
