"""The application over a service in memory, on a port of loopback, and clients with keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from regress.service.wires.app_settings import Limits, Settings
from regress.service.wires.http_app import create_app
from regress.service.wires.http_server import ThreadedServer
from tests.unit.service.wires.http_client import Client
from tests.unit.service.wires.unigram import Unigrams

KEYS = {"ann": "tml-ann", "bob": "tml-bob"}
LIMITS = Limits(answer_seconds=0.5, poll_seconds=0.5, body_bytes=1 << 20, expanded_bytes=1 << 21)


@pytest.fixture(scope="module")
def unigrams() -> Unigrams:
    """The service behind the server of this module."""
    return Unigrams()


@pytest.fixture(scope="module")
def server(unigrams: Unigrams) -> Iterator[ThreadedServer]:
    """A server of both wires."""
    with ThreadedServer(create_app(unigrams, Settings(KEYS, limits=LIMITS))) as running:
        yield running


@pytest.fixture
def weaver(server: ThreadedServer) -> Iterator[Client]:
    """Ann, by Weaver's header."""
    with Client(server, {"X-Weaver-API-Key": KEYS["ann"]}) as client:
        yield client


@pytest.fixture
def tinker(server: ThreadedServer) -> Iterator[Client]:
    """Ann, by Tinker's header."""
    with Client(server, {"X-API-Key": KEYS["ann"]}) as client:
        yield client
