"""Address, key and failures of the connection: one sentence each, and the key in none of them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from regress.engine.config import load_config, to_plain
from regress.errors import ConfigError
from regress.service.client.client_settings import Endpoint, endpoint_of
from regress.service.client.http_transport import Transport
from regress.service.client.service_connection import open_model
from regress.service.client.weaver_sdk import WeaverSdkModel
from regress.service.service_api import ServiceError

KEY = "tml-very-secret"


def config(*overrides: str, **environ: str) -> object:
    return load_config(overrides=["trainer.type=remote", *overrides], environ=environ).config


class Server(ThreadingHTTPServer):
    """Answers every request with what it was given."""

    status, body, seen = 200, b"{}", 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_POST  # noqa: N815  # the name that http.server calls

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    found = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def endpoint(port: int, wire: str = "weaver") -> Endpoint:
    return Endpoint(wire, f"http://127.0.0.1:{port}", KEY, "tiny", None, 0, "own", 1.0)


def test_no_address_is_a_vendors() -> None:
    for wire in ("weaver", "tinker"):
        chosen = config(f"service.train_service.backend={wire}")
        with pytest.raises(ConfigError, match=f"{wire}_service.base_url.*{wire.upper()}_BASE_URL"):
            endpoint_of(chosen, {f"{wire.upper()}_API_KEY": KEY})  # type: ignore[arg-type]


def test_a_key_is_required_and_comes_from_the_environment() -> None:
    chosen = config("service.weaver_service.base_url=http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="WEAVER_API_KEY"):
        endpoint_of(chosen, {})  # type: ignore[arg-type]
    found = endpoint_of(chosen, {"WEAVER_API_KEY": KEY})  # type: ignore[arg-type]
    assert found.api_key == KEY
    assert KEY not in repr(found)


def test_a_key_of_the_configuration_is_not_shown() -> None:
    chosen = config(
        "service.weaver_service.api_key=${oc.env:WEAVER_API_KEY}",
        "service.weaver_service.base_url=example.com",
        WEAVER_API_KEY=KEY,
    )
    assert endpoint_of(chosen, {}).base_url == "https://example.com"  # type: ignore[arg-type]
    assert KEY not in json.dumps(to_plain(chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["weaver", "tinker"])
def test_nobody_listens(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ServiceError, match=rf"cannot be reached.*{wire}_service.base_url") as caught:
        open_model(endpoint(1, wire))
    assert KEY not in str(caught.value)


def test_a_refused_key(server: Server) -> None:
    server.status = 401
    with pytest.raises(ServiceError, match="does not accept the key; set WEAVER_API_KEY"):
        open_model(endpoint(server.server_port))
    assert server.seen == 1


def test_another_server_at_the_address(server: Server) -> None:
    server.body = b"<html>"
    with pytest.raises(ServiceError, match="answered with no JSON"):
        open_model(endpoint(server.server_port))


def test_what_might_have_been_executed_is_not_sent_again(server: Server) -> None:
    server.status, server.body = 500, b'{"message": "out of order"}'
    transport = Transport(endpoint(server.server_port), "X-Weaver-API-Key")
    with pytest.raises(ServiceError, match="status 500: out of order"):
        transport.post("/api/v1/sessions", {})
    assert server.seen == 1
    with pytest.raises(ServiceError, match="status 500: out of order"):
        transport.post("/api/v1/models/m/optimizer-steps", {}, repeatable=True)
    assert server.seen == 4


def test_an_operation_that_never_ends(server: Server) -> None:
    server.body = json.dumps(
        {"id": "x", "status": "running", "request_id": "x", "type": "try_again"}
    ).encode()
    with pytest.raises(ServiceError, match="has not finished an operation within 1 seconds"):
        open_model(endpoint(server.server_port)).forward([])


def test_an_sdk_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regress.service.client.service_connection.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"client=sdk needs the package nex-weaver"):
        open_model(Endpoint("weaver", "http://127.0.0.1:1", KEY, None, None, 0, "sdk", 1.0))


def test_an_old_sdk_without_forward_passes_is_named() -> None:
    """nex-weaver 1.4.0 has none; 1.10.0 has."""
    model = object.__new__(WeaverSdkModel)
    model._training = object()
    with pytest.raises(ConfigError, match="the installed nex-weaver has no forward pass"):
        model.forward([])


@pytest.mark.parametrize(("wire", "missing"), [("weaver", "httpx"), ("tinker", "google.protobuf")])
def test_a_missing_package_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, wire: str, missing: str
) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("regress.service.client.", "regress.service.wires"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    from regress.service.client.service_connection import open_model

    with pytest.raises(ConfigError, match=rf"{missing}.*pip install 'fastapi>=.* 'httpx>=.* 'protobuf>="):
        open_model(Endpoint(wire, "http://127.0.0.1:9", KEY, "base", None, 0, "own", 1.0))
