"""Broken requests: each gets a sentence, changes no model, and stops no later one."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from regress.service.service_api import ModelSpec, SaveKind, Status
from regress.service.wires.app_settings import Limits, Settings
from regress.service.wires.http_app import create_app
from regress.service.wires.http_server import ThreadedServer
from tests.unit.service.wires.http_client import Answer, Client
from tests.unit.service.wires.mutations import Shot, shot
from tests.unit.service.wires.unigram import Unigrams

KEYS = {"ann": "tml-ann", "bob": "tml-bob"}
HEADERS = {"weaver": "X-Weaver-API-Key", "tinker": "X-API-Key"}


class Errors(logging.Handler):
    """Errors that the application has logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


class Range:
    """A server, a model of ann's to shoot at, and one of bob's."""

    def __init__(self, service: Unigrams, server: ThreadedServer) -> None:
        self.service = service
        self.session = service.create_session({"owner": "ann"})
        other = service.create_session({"owner": "bob"})
        for session in (self.session, other):
            service.create_model(session, 1, ModelSpec("tiny"))
        self.model = f"{self.session}:train:1"
        service.save(self.model, None, "base", SaveKind.STATE)
        self.sampler = service.create_sampler(self.session, 1, path=None, base_model="tiny")
        self.bystander = service.checksum([f"{other}:train:1"])
        self.clients = {wire: Client(server, {name: KEYS["ann"]}) for wire, name in HEADERS.items()}

    def fire(self, sent: Shot) -> None:
        """Send a broken request, and check what it left."""
        before = self.service.checksum([self.model])
        executed = len(self.service.executed)
        answer = self.clients[sent.wire].send(sent.method, f"/api/v1/{sent.path}", sent.body, sent.headers)
        told = f"{sent} -> {answer}"
        assert answer.status < 500, told
        assert b"Traceback" not in answer.body, told
        if answer.status >= 400 and answer.status != 408:
            found = answer.json
            assert found["message"] == found["message"].strip() != "", told
            assert len(found["message"]) < 600, told
            assert not found["message"].endswith("."), told
        done = any(
            self.service.operations[name].status is Status.DONE for name in self.service.executed[executed:]
        )
        if not done:
            assert self.service.checksum([self.model]) == before, told

    def goes_on(self) -> None:
        """A valid request of each wire is executed at once."""
        for wire in ("weaver", "tinker"):
            number = self.service.models[self.model].next
            adam = {"learning_rate": 0.01}
            if wire == "weaver":
                body = {"payload": {"model_id": self.model, "seq_id": number, "adam_params": adam}}
                answer = self.clients[wire].post(f"models/{self.model}/optimizer-steps", body)
                assert answer.json["status"] == "done", answer
            else:
                body = {"model_id": self.model, "seq_id": number, "adam_params": adam}
                future = self.clients[wire].post("optim_step", body).json
                answer = self.clients[wire].post("retrieve_future", {"request_id": future["request_id"]})
                assert "metrics" in answer.json, answer


@pytest.fixture
def shooting() -> Iterator[Range]:
    service, errors = Unigrams(), Errors()
    limits = Limits(answer_seconds=0.02, poll_seconds=0.02, body_bytes=1 << 18, expanded_bytes=1 << 19)
    logger = logging.getLogger("regress.service.http")
    logger.addHandler(errors)
    with ThreadedServer(create_app(service, Settings(KEYS, limits=limits))) as server:
        found = Range(service, server)
        yield found
        for client in found.clients.values():
            client.close()
    logger.removeHandler(errors)
    assert errors.found == []


def fire(shooting: Range, seed: int, count: int) -> None:
    chance = random.Random(seed)
    for index in range(count):
        number = shooting.service.models[shooting.model].next
        shooting.fire(shot(chance, shooting.session, shooting.model, shooting.sampler, number))
        if index % 50 == 49:
            shooting.goes_on()
    assert shooting.service.checksum(["s1:train:1"]) == shooting.bystander


def test_broken_requests(shooting: Range) -> None:
    fire(shooting, seed=0, count=100)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_broken_requests(shooting: Range, seed: int) -> None:
    fire(shooting, seed, count=1000)


def test_answers_name_the_status(shooting: Range) -> None:
    """Paths and methods that nobody has are answered in the same form."""
    client = shooting.clients["weaver"]
    answers: list[Answer] = [client.get("nothing"), client.send("DELETE", "/api/v1/operations/x")]
    assert [answer.status for answer in answers] == [404, 405]
    assert all(answer.json["message"] for answer in answers)
