"""Keys, sizes and crowds: what a client may not do, and that others do not notice."""

from __future__ import annotations

import json
import resource
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import zstandard

from regress.service.service_api import Operation, ServiceError, Status
from regress.service.wires import tinker_protobuf
from regress.service.wires.app_settings import Limits, Settings
from regress.service.wires.http_app import Counters, create_app
from regress.service.wires.http_server import ThreadedServer, listen
from regress.service.wires.json_message import Message, Text, parse_json
from regress.service.wires.request_arrays import from_bytes, from_rows
from regress.service.wires.request_bodies import expand
from tests.unit.service.wires.conftest import KEYS, LIMITS
from tests.unit.service.wires.http_client import Client
from tests.unit.service.wires.mutations import message
from tests.unit.service.wires.unigram import Unigrams


def test_no_key_no_answer(server: ThreadedServer) -> None:
    for headers in ({}, {"X-API-Key": "tml-anne"}, {"X-Weaver-API-Key": ""}, {"Authorization": "Bearer x"}):
        with Client(server, headers) as client:
            answers = [client.post("create_session"), client.post("sessions"), client.send("GET", "/metrics")]
            assert [answer.status for answer in answers] == [401, 401, 401]
            assert "tml-anne" not in answers[0].body.decode()
            assert client.send("GET", "/healthz").json == {"status": "ok"}


def test_a_service_without_keys_is_refused() -> None:
    for keys in ({}, {"ann": ""}):
        with pytest.raises(ServiceError, match="no API key"):
            create_app(Unigrams(), Settings(keys))


def test_keys_are_not_shown() -> None:
    assert "tml-ann" not in repr(Settings(KEYS))


def test_unknown_wires_are_refused() -> None:
    with pytest.raises(ServiceError, match="choose from weaver, tinker"):
        create_app(Unigrams(), Settings(KEYS, wires=["grpc"]))


def test_one_wire_alone(unigrams: Unigrams) -> None:
    app = create_app(unigrams, Settings(KEYS, wires=["weaver"]))
    with ThreadedServer(app) as server, Client(server, {"X-Weaver-API-Key": KEYS["ann"]}) as client:
        assert client.post("sessions").status == 201
        assert client.post("create_session").status == 404


def test_models_of_others_do_not_exist(server: ThreadedServer, tinker: Client, weaver: Client) -> None:
    """Another key's session, model, sampler and save are told from missing ones by nothing."""
    with Client(server, {"X-API-Key": KEYS["bob"]}) as bob:
        session = bob.post("create_session", {"sdk_version": "0.38.0"}).json["session_id"]
        bob.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"})
    model = f"{session}:train:0"
    missing = tinker.post("get_info", {"model_id": "s999:train:0"})
    theirs = tinker.post("get_info", {"model_id": model})
    assert (theirs.status, missing.status) == (404, 404)
    assert theirs.body.replace(model.encode(), b"") == missing.body.replace(b"s999:train:0", b"")
    adam = {"payload": {"seq_id": 1, "adam_params": {}}}
    assert weaver.post(f"models/{model}/optimizer-steps", adam).status == 404
    assert weaver.post(f"models/{model}/terminate").status == 404
    own = tinker.post("create_session").json["session_id"]
    body = {"session_id": own, "model_seq_id": 0, "path": f"tinker://{model}/weights/x"}
    assert tinker.post("load_weights", body).status == 404


def test_a_retry_is_the_same_request(tinker: Client, unigrams: Unigrams) -> None:
    first = tinker.post("create_session", X_Idempotency_Key="a-b").json["session_id"]
    assert tinker.post("create_session", X_Idempotency_Key="a-b").json["session_id"] == first
    assert tinker.post("create_session").json["session_id"] != first
    sampler = {"session_id": first, "sampling_session_seq_id": 0, "base_model": "tiny"}
    name = tinker.post("create_sampling_session", sampler).json["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
    body = {"sampling_session_id": name, "seq_id": 0, "num_samples": 1, "prompt": prompt}
    before = len(unigrams.operations)
    requests = {tinker.post("asample", body).json["request_id"] for _ in range(3)}
    assert len(requests) == 1
    assert len(unigrams.operations) == before + 1


def test_http_binary_is_told_apart(weaver: Client) -> None:
    session = weaver.post("sessions").json["id"]
    weaver.post(f"sessions/{session}/models", {"model_seq_id": 1, "base_model": "tiny"})
    path = f"models/{session}:train:1/forward-backward-passes"
    answer = weaver.post(path, b"--x--", Content_Type="multipart/form-data; boundary=x")
    assert answer.status == 415
    assert "WEAVER_TENSOR_TRANSPORT" in answer.json["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"a": NaN}', "NaN, which is not JSON"),
        (b'{"a": -Infinity}', "-Infinity, which is not JSON"),
        (b"[" * 100_000, "nested more than"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nested more than"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "is a list"),
        (b'{"a": 1', "not valid JSON"),
    ],
)
def test_what_is_no_json(body: bytes, sentence: str) -> None:
    with pytest.raises(ServiceError, match=sentence):
        parse_json(body, Limits())


def test_brackets_in_texts_are_no_nesting() -> None:
    text = "[" * 99 + '\\"[' * 9
    assert parse_json(json.dumps({"a": text}).encode(), Limits()).values == {"a": text}


class Named(Message):
    """A message with a name."""

    a: Text
    inner: dict[str, int] = {"b": 1}


def test_null_means_what_is_meant_without_it() -> None:
    sent = parse_json(b'{"a": "x", "inner": null}', Limits())
    assert Named.of(sent.values, Limits()).inner == {"b": 1}
    with pytest.raises(ServiceError, match=r"^a is missing$"):
        Named.of(parse_json(b'{"a": null}', Limits()).values, Limits())


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ({"a": 1}, "payload.a must be text, not 1"),
        ({"a": "x", "inner": []}, "payload.inner must be an object, not a list of length 0"),
        ({"a": "x", "inner": {"b": "c"}}, "payload.inner.b must be an integer, not text of length 1"),
    ],
)
def test_a_refusal_names_the_field_and_its_rule(sent: Any, sentence: str) -> None:
    with pytest.raises(ServiceError, match=sentence):
        Named.of(sent, Limits(), "payload")


@pytest.mark.parametrize("text", ["\ud800", "a\nb", "x" * 300])
def test_texts_that_no_name_is(text: str) -> None:
    with pytest.raises(ServiceError, match="must be text"):
        Named.of({"a": text}, Limits())


def test_zstd_bombs_are_cut_where_they_exceed_the_limit() -> None:
    """A megabyte that claims little and expands to a gigabyte."""
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ServiceError, match="after expansion"):
        expand(bomb, Limits(expanded_bytes=1 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    with pytest.raises(ServiceError, match="not valid zstd"):
        expand(bomb[:-3] + b"abc", Limits(expanded_bytes=1 << 30, body_bytes=1 << 30))


def test_shapes_and_sparse_rows_are_limited_after_expansion() -> None:
    limits = Limits(tensor_elements=1000)
    one = np.array([1.0], np.float32)
    for shape in ([2**40, 2**40], [1001, 1], [10, 101], [-1, 4]):
        with pytest.raises(ServiceError, match=r"elements|sizes"):
            from_rows(one, np.array([0, 1]), np.array([0]), shape, "x", limits)
        with pytest.raises(ServiceError, match=r"elements|sizes"):
            from_bytes(b"", np.dtype(np.float32), shape, "x", limits)
    for starts, columns in (
        ([0, 2], [0]),
        ([1, 1], [0]),
        ([0, 1], [3]),
        ([0, 1], [-1]),
        ([0], [0]),
        ([0, 1, 1], [0]),
    ):
        with pytest.raises(ServiceError, match="sparse"):
            from_rows(one, np.array(starts), np.array(columns), [1, 3], "x", limits)
    assert from_rows(one, np.array([0, 0, 1]), np.array([2]), [2, 3], "x", limits).tolist() == [
        [0, 0, 0],
        [0, 0, 1],
    ]


def test_bodies_are_limited_as_sent_and_after_expansion(tinker: Client) -> None:
    large = b'{"a": "' + b"x" * (LIMITS.expanded_bytes + 1) + b'"}'
    assert tinker.post("telemetry", large).status == 413
    packed = zstandard.ZstdCompressor().compress(large)
    assert tinker.post("telemetry", packed, Content_Encoding="zstd").status == 413
    assert tinker.post("telemetry", packed[:20], Content_Encoding="gzip").status == 415
    small = zstandard.ZstdCompressor().compress(b"{}")
    assert tinker.post("telemetry", small, Content_Encoding="zstd").status == 200


def test_protobuf_that_is_no_message() -> None:
    for body in (b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f"):
        with pytest.raises(ServiceError, match="not valid protobuf"):
            tinker_protobuf.parse_pass(body)
    data = message("m", 1, logprobs=struct.pack("<3f", 0, float("nan"), 0))
    with pytest.raises(ServiceError, match="has nan at position 1"):
        tinker_protobuf.pass_request(data, Limits())


def test_a_full_queue_is_waited_for(tinker: Client, weaver: Client, unigrams: Unigrams) -> None:
    """For a while; then the client is told to come again, and the number is not spent."""
    session = tinker.post("create_session").json["session_id"]
    tinker.post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"})
    body = {"model_id": f"{session}:train:0", "seq_id": 1, "adam_params": {}}
    unigrams.busy = 99
    refused = tinker.post("optim_step", body)
    assert (refused.status, refused.json["retryable"], refused.headers["retry-after"]) == (429, True, "1")
    path = f"models/{session}:train:0/optimizer-steps"
    assert weaver.post(path, {"payload": {"seq_id": 1, "adam_params": {}}}).status == 503
    unigrams.busy = 2
    assert tinker.post("optim_step", body).status == 200
    assert unigrams.busy == 0


def test_the_log_has_the_cause_and_the_client_has_its_number(
    unigrams: Unigrams, tinker: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("secret of the service")

    monkeypatch.setattr(unigrams, "models_offered", broken)
    answer = tinker.get("get_server_capabilities")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert "under error" in answer.json["message"]


def test_prometheus_reads_the_numbers(tinker: Client) -> None:
    tinker.post("telemetry")
    lines = tinker.send("GET", "/metrics").body.decode().splitlines()
    assert 'regress_service_queue{model="a"} 0.0' in lines
    assert any(line.startswith('regress_service_http_requests_total{wire="tinker"') for line in lines)
    assert all(line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0 for line in lines)
    assert "x_y NaN" in Counters().text({"x y": float("nan")})


class Slow(Unigrams):
    """Operations that end when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def operation(self, operation_id: str, *, timeout: float = 0.0) -> Operation:
        if not self.end.wait(timeout):
            return Operation(operation_id, Status.RUNNING)
        return super().operation(operation_id)


def test_200_clients_wait_at_once_and_hear_of_the_end() -> None:
    """More than there are threads; the health is told meanwhile."""
    service = Slow()
    limits = Limits(poll_seconds=20, waiting=4)
    service.create_session({"owner": "ann"})
    service.create_sampler("s0", 0, path=None, base_model="tiny")
    name = service.prompt_logprobs("s0:sample:0", np.array([1, 2])).id
    app = create_app(service, Settings(KEYS, limits=limits))
    with ThreadedServer(app) as server, ThreadPoolExecutor(200) as pool:

        def wait(_: int) -> int:
            with Client(server, {"X-Weaver-API-Key": KEYS["ann"]}) as client:
                return len(client.get(f"operations/{name}").json["response"]["result"]["prompt_logprobs"])

        waiting = [pool.submit(wait, index) for index in range(200)]
        with Client(server) as client:
            assert client.send("GET", "/healthz").status == 200
        service.end.set()
        assert {future.result(30) for future in waiting} == {2}


def test_200_clients_with_large_bodies_share_the_memory() -> None:
    """All are answered, and the bodies that are held at once stay below the limit."""
    limits = Limits(body_bytes=1 << 20, expanded_bytes=1 << 20, held_bytes=3 << 20)
    app = create_app(Unigrams(), Settings(KEYS, limits=limits))
    body = b'{"events": "' + b"x" * 900_000 + b'"}'
    held = []
    with ThreadedServer(app) as server, ThreadPoolExecutor(200) as pool:

        def send(_: int) -> int:
            with Client(server, {"X-API-Key": KEYS["ann"]}) as client:
                status = client.post("telemetry", body).status
                held.append(app.state.api.bodies.held)
                return status

        assert set(pool.map(send, range(200))) == {200}
        assert max(held) <= 3 << 20
        assert app.state.api.bodies.held == 0


LARGE = Limits(body_bytes=1 << 20, expanded_bytes=1 << 20, held_bytes=1 << 21)


@pytest.mark.parametrize("encoding", ["", "Content-Encoding: zstd\r\n"])
@pytest.mark.parametrize("sent", [1, 600_000])
def test_bodies_that_do_not_go_on_stall_nobody_else(encoding: str, sent: int) -> None:
    """Make only large bodies of the same owner wait, whatever the number of connections."""
    app = create_app(Unigrams(), Settings(KEYS, limits=LARGE))
    head = f"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS['bob']}\r\n{encoding}"
    body = b'{"a": "' + b"x" * 900_000 + b'"}'
    with ThreadedServer(app) as server, ExitStack() as resources:
        for _ in range(8):
            held = resources.enter_context(socket.create_connection((server.host, server.port)))
            held.sendall(f"{head}Content-Length: 1000000\r\n\r\n".encode() + b"{" * sent)
        with (
            Client(server, {"X-API-Key": KEYS["ann"]}) as ann,
            Client(server, {"X-API-Key": KEYS["bob"]}) as bob,
        ):
            assert ann.post("telemetry", body).status == 200
            assert ann.post("telemetry", zstandard.compress(body), content_encoding="zstd").status == 200
            assert bob.post("telemetry", b"{}").status == 200
            assert app.state.api.bodies.held <= LARGE.held_bytes


def test_large_bodies_of_many_owners_all_arrive() -> None:
    """Together they need more than there is: the first one goes on, and the others after it."""
    keys = {f"owner{number}": f"tml-{number}" for number in range(12)}
    app = create_app(Unigrams(), Settings(keys, limits=LARGE))
    body = b'{"a": "' + b"x" * 1_000_000 + b'"}'

    def send(key: str) -> int:
        with Client(server, {"X-API-Key": key}) as client:
            return client.post("telemetry", body).status

    with ThreadedServer(app) as server, ThreadPoolExecutor(36) as pool:
        assert set(pool.map(send, [*keys.values()] * 3)) == {200}
        assert app.state.api.bodies.held == 0


def test_replies_are_sent_at_once() -> None:
    """Without the option the second part of every reply of a connection waits for the first one's acknowledgement."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("address", ["tinker://s1:train:0/weights/x", "tinker://s1:train:0/nothing/x"])
def test_an_address_of_a_save_stays_readable_in_errors(tinker: Client, address: str) -> None:
    session = tinker.post("create_session").json["session_id"]
    refused = tinker.post("load_weights", {"session_id": session, "model_seq_id": 0, "path": address})
    assert refused.status in (400, 404)
    assert "***" not in refused.body.decode()


def test_slow_and_dead_clients_hold_nobody_up() -> None:
    """One sends half a body and dies, one sends nothing more, one does not read its answer."""
    limits = Limits(body_seconds=0.3, body_bytes=1 << 20, expanded_bytes=1 << 20, held_bytes=1 << 20)
    app = create_app(Unigrams(), Settings(KEYS, limits=limits))
    head = f"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS['ann']}\r\nContent-Length: 1000000\r\n\r\n"
    ask = f"GET /metrics HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEYS['ann']}\r\n\r\n"
    with ThreadedServer(app) as server:
        dead = socket.create_connection((server.host, server.port))
        dead.sendall(head.encode() + b"{")
        dead.close()
        silent = socket.create_connection((server.host, server.port), timeout=20)
        silent.sendall(head.encode() + b"{")
        deaf = socket.create_connection((server.host, server.port))
        deaf.sendall(ask.encode() * 500)
        with Client(server, {"X-API-Key": KEYS["ann"]}) as client:
            assert client.post("telemetry", b'{"a": "' + b"x" * 900_000 + b'"}').status == 200
        assert b" 408 " in silent.recv(100)
        silent.close()
        deaf.close()
        end = time.monotonic() + 20
        while app.state.api.bodies.held and time.monotonic() < end:
            time.sleep(0.01)
        assert app.state.api.bodies.held == 0
