"""Valid requests of both wires, and seeded ways to break them."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from regress.service.wires import tinker_protobuf

NAUGHTY: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 10**40, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "a\x00b",
    "../../etc/passwd", "weaver://../../x/checkpoints/y", "tinker://s0:train:0/weights/../../x", "s1:train:1",
    "s0:train:99", "op-0", "%2e%2e%2f", "A" * 5000, [], {}, [[[[1]]]], {"a": {"b": {}}}, [1, "2", None], [[1], [2, 3]],
]  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """A request: which wire's key it has, path, body and headers."""

    wire: str
    method: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    training: bool = False


def _datum(flat: bool) -> dict[str, Any]:
    tensors: dict[str, Any] = {"target_tokens": {"data": [3, 4, 1], "dtype": "int64"}}
    for name, values in (("logprobs", [-1.0, -2.0, -3.0]), ("advantages", [1.0, 0.5, -1.0])):
        tensors[name] = {"data": values, "dtype": "float32"}
    if flat:
        for tensor in tensors.values():
            tensor["shape"] = [3]
    chunks = {"chunks": [{"type": "encoded_text", "tokens": [2, 3, 4]}]}
    return {"model_input": chunks, "loss_fn_inputs": tensors}


def templates(session: str, model: str, sampler: str, seq_id: int) -> list[tuple[str, str, str, Any]]:
    """Wire, method, path and body of valid requests."""
    passed = {
        "loss_fn": "importance_sampling",
        "data": [_datum(flat=False)],
        "loss_fn_config": {"entropy_coeff": 0.0},
    }
    payload = {"model_id": model, "seq_id": seq_id, "tensor_transport": "default"}
    adam = {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip_norm": 1.0,
    }
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    params = {"max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 1, "stop": ["a"]}
    flat = {"loss_fn": "importance_sampling", "data": [_datum(flat=True)]}
    numbered = {"model_id": model, "seq_id": seq_id}
    return [
        ("weaver", "POST", f"models/{model}/forward-backward-passes",
         {"payload": {**payload, "forward_backward_input": passed}}),
        ("weaver", "POST", f"models/{model}/forward-passes", {"payload": {**payload, "forward_input": passed}}),
        ("weaver", "POST", f"models/{model}/optimizer-steps", {"payload": {**payload, "adam_params": adam}}),
        ("weaver", "POST", f"models/{model}/export-sampler", {"seq_id": seq_id, "path": f"n{seq_id}"}),
        ("weaver", "POST", f"models/{model}/load",
         {"path": f"weaver://{model}/checkpoints/base", "include_optimizer": True}),
        ("weaver", "GET", f"models/{model}/checkpoints", None),
        ("weaver", "POST", f"sessions/{session}/models",
         {"model_seq_id": 7, "base_model": "tiny", "training_mode": "lora", "lora_config": {"rank": 4}}),
        ("weaver", "POST", f"sessions/{session}/sampling-sessions",
         {"sampling_session_seq_id": 3, "base_model": "tiny"}),
        ("weaver", "POST", f"sampling-sessions/{sampler}/samples",
         {"prompt": prompt, "num_samples": 2, "sampling_params": params,
          "rows": [{"prompt": prompt, "seed": 3, "max_tokens": 2}]}),
        ("weaver", "POST", f"sampling-sessions/{sampler}/logprobs", {"prompt": prompt}),
        ("weaver", "POST", "sessions", {"tags": ["a"], "user_metadata": {"k": "v"}, "sdk_version": "1.19.2"}),
        ("weaver", "GET", "operations/op-0", None),
        ("tinker", "POST", "forward_backward", {**numbered, "forward_backward_input": flat}),
        ("tinker", "POST", "forward", {**numbered, "forward_input": flat}),
        ("tinker", "POST", "optim_step", {**numbered, "adam_params": adam}),
        ("tinker", "POST", "save_weights", {**numbered, "path": f"n{seq_id}", "overwrite": False}),
        ("tinker", "POST", "save_weights_for_sampler", {**numbered, "sampling_session_seq_id": 5, "kind": "snapshot"}),
        ("tinker", "POST", "load_weights", {**numbered, "path": f"tinker://{model}/weights/base", "optimizer": True}),
        ("tinker", "POST", "create_model",
         {"session_id": session, "model_seq_id": 8, "base_model": "tiny", "lora_config": {"rank": 0}}),
        ("tinker", "POST", "asample",
         {"sampling_session_id": sampler, "seq_id": seq_id, "num_samples": 2, "prompt": prompt,
          "sampling_params": params}),
        ("tinker", "POST", "retrieve_future", {"request_id": "op-0", "allow_metadata_only": True}),
        ("tinker", "POST", "get_info", {"model_id": model}),
        ("tinker", "POST", "create_sampling_session",
         {"session_id": session, "sampling_session_seq_id": 4, "base_model": "tiny"}),
        ("tinker", "POST", "create_session", {"tags": [], "sdk_version": "0.38.0"}),
        ("tinker", "POST", "telemetry", {"events": [{"a": 1}]}),
    ]  # fmt: skip


def message(model: str, seq_id: int, **arrays: bytes) -> Any:
    """A valid protobuf pass; arrays replace the bytes of tensors."""
    found = tinker_protobuf.message_class("PassRequest")(
        model_id=model, seq_id=seq_id, loss_fn="importance_sampling"
    )
    datum = found.data.add()
    datum.model_input.add().text.tokens = struct.pack("<3i", 2, 3, 4)
    dense = {
        "target_tokens": (struct.pack("<3q", 3, 4, 1), 2),
        "logprobs": (struct.pack("<3f", -1.0, -2.0, -3.0), 1),
        "advantages": (struct.pack("<3f", 1.0, 0.5, -1.0), 1),
    }
    for name, (data, dtype) in dense.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = arrays.get(name, data), dtype
        tensor.shape.append(3)
    return found


def shot(chance: random.Random, session: str, model: str, sampler: str, seq_id: int) -> Shot:
    """Return a valid request, broken once or more often."""
    if chance.random() < 0.25:
        return _binary(chance, model, seq_id)
    wire, method, path, body = copy.deepcopy(chance.choice(templates(session, model, sampler, seq_id)))
    headers: dict[str, str] = {}
    for _ in range(chance.randint(1, 3)):
        kind = chance.random()
        if kind < 0.7 and body is not None:
            body = _broken(chance, body)
        elif kind < 0.8:
            path = _other_path(chance, path)
        elif kind < 0.9:
            headers |= chance.choice(
                [{"Content-Encoding": "zstd"}, {"Content-Encoding": "gzip"}, {"Content-Type": "multipart/form-data"},
                 {"Content-Type": tinker_protobuf.MEDIA_TYPE}, {"Accept": tinker_protobuf.MEDIA_TYPE},
                 {"X-Idempotency-Key": "k"}]
            )  # fmt: skip
    data = b"" if body is None else json.dumps(body).encode()
    if chance.random() < 0.2:
        data = _torn(chance, data)
    return Shot(wire, method, path, data, headers)


def _binary(chance: random.Random, model: str, seq_id: int) -> Shot:
    found = message(model, seq_id)
    tensor = found.data[0].loss_fn_inputs[chance.choice(["target_tokens", "logprobs", "advantages"])]
    kind = chance.randrange(9)
    if kind == 0:
        tensor.dtype = chance.choice([0, 4, 77, -1])
    elif kind == 1:
        tensor.shape.append(chance.choice([-1, 0, 2, 2**40, 2**62]))
    elif kind == 2:
        rows = tensor.rows
        rows.values, rows.starts = tensor.dense, struct.pack("<2q", 0, chance.choice([3, -1, 2**60]))
        rows.columns = struct.pack("<q", chance.choice([0, 2**61, -5]))
        del tensor.shape[:]
        tensor.shape.extend([chance.choice([1, 3, 2**40]), chance.choice([1, 3, 2**40])])
    elif kind == 3:
        tensor.dense = struct.pack("<3f", float("nan"), float("inf"), 1.0)
    elif kind == 4:
        found.data[0].model_input.add().image = b"png"
    elif kind == 5:
        found.model_id = chance.choice(["s1:train:1", "", "s0:train:99", "../x"])
    elif kind == 6:
        found.seq_id = chance.choice([0, -1, 2**31 - 1])
    elif kind == 7:
        found.numbers["x"] = float("nan")
    data = found.SerializeToString()
    if kind == 8 or chance.random() < 0.2:
        data = _torn(chance, data)
    return Shot("tinker", "POST", "forward_backward", data, {"Content-Type": tinker_protobuf.MEDIA_TYPE})


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in [*value.items()] if isinstance(value, dict) else [*enumerate(value)]:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def _broken(chance: random.Random, body: Any) -> Any:
    if not isinstance(body, (dict, list)) or not body or chance.random() < 0.05:
        return copy.deepcopy(chance.choice(NAUGHTY))
    holder, key = chance.choice([*_places(body)])
    kind = chance.random()
    if kind < 0.2:
        del holder[key]
    elif kind < 0.8:
        holder[key] = copy.deepcopy(chance.choice(NAUGHTY))
    elif isinstance(holder, dict):
        holder[chance.choice(["", "\ud800", "x" * 300, "weights", "shape"])] = chance.choice(NAUGHTY)
    else:
        holder *= 2
    return body


def _other_path(chance: random.Random, path: str) -> str:
    parts = path.split("/")
    parts[chance.randrange(len(parts))] = chance.choice(
        ["s1:train:1", "s1", "%2e%2e", "..", "%00", "x" * 200, "nothing", "%ff"]
    )
    return "/".join(parts)


def _torn(chance: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\xff\x00"
    kind = chance.randrange(5)
    place = chance.randrange(len(data))
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + bytes(chance.randrange(256) for _ in range(8)) + data[place:]
    if kind == 3:
        return b"[" * chance.choice([10, 2000]) + data
    return data.replace(b"1", b"9" * 5000, 1)
