"""Requests to the service as inputs: each body is a file, posted as it is to a server of this process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from regress.service.service_api import ModelSpec, SaveKind, ServiceError
from regress.service.wires.app_settings import Limits, Settings
from regress.service.wires.http_app import create_app
from regress.service.wires.http_server import ThreadedServer
from tests.unit.service.wires.http_client import Client
from tests.unit.service.wires.mutations import message, templates
from tests.unit.service.wires.unigram import Unigrams

HEADERS = {"weaver": "X-Weaver-API-Key", "tinker": "X-API-Key"}
SESSION, MODEL, SAMPLER, NUMBER = "s0", "s0:train:1", "s0:sample:1", 1
BINARY = "tinker/forward_backward.pb"


@cache
def _routes() -> dict[str, tuple[str, str]]:
    """Name of a file -> wire and path that it is posted to."""
    found = {BINARY: ("tinker", "forward_backward")}
    for index, (wire, method, path, _) in enumerate(templates(SESSION, MODEL, SAMPLER, NUMBER)):
        if method == "POST":
            found[f"{wire}/{index:02}.json"] = (wire, path)
    return found


def bodies() -> dict[str, bytes]:
    """Return a valid body of every request."""
    all = templates(SESSION, MODEL, SAMPLER, NUMBER)
    texts = {name: json.dumps(all[int(Path(name).stem)][3]).encode() for name in _routes() if name != BINARY}
    return {**texts, BINARY: message(MODEL, NUMBER).SerializeToString()}


@cache
def _clients() -> dict[str, Client]:
    service = Unigrams()
    limits = Limits(answer_seconds=0.02, poll_seconds=0.02, body_bytes=1 << 22, expanded_bytes=1 << 23)
    server = ThreadedServer(create_app(service, Settings({"ann": "tml-ann"}, limits=limits)))
    server.__enter__()  # for as long as this process
    session = service.create_session({"owner": "ann"})
    service.create_model(session, 1, ModelSpec("tiny"))
    model = f"{session}:train:1"
    service.save(model, None, "base", SaveKind.STATE)
    sampler = service.create_sampler(session, 1, path=None, base_model="tiny")
    assert (session, model, sampler) == (SESSION, MODEL, SAMPLER)
    return {wire: Client(server, {name: "tml-ann"}) for wire, name in HEADERS.items()}


def post(path: Path, whole: Path) -> None:
    """Post the bodies that are not what they were; the last refusal is raised."""
    told = ""
    for name, (wire, route) in _routes().items():
        if (
            not (path / name).is_file()
            or (path / name).is_symlink()
            or (path / name).stat().st_size > 1 << 26
        ):
            continue
        body = (path / name).read_bytes()
        if (whole / name).exists() and body == (whole / name).read_bytes():
            continue
        kind = "application/x-protobuf" if name == BINARY else "application/json"
        try:
            answer = _clients()[wire].send("POST", f"/api/v1/{route}", body, {"Content-Type": kind})
        except (
            BrokenPipeError,
            ConnectionResetError,
        ):  # too large a body: the server has answered and closed
            _clients()[wire].close()  # the next request connects again
            told = "the body is not read to its end"
            continue
        if answer.status >= 500 or b"Traceback" in answer.body:
            raise AssertionError(f"{name} is answered with {answer.status}: {answer.body[:500]!r}")
        if answer.status >= 400 and answer.status != 408:
            told = answer.json["message"]
    if told:
        raise ServiceError(told)
