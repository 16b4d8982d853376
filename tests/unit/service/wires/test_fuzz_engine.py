"""Broken requests at the real service: no traceback, no other model changed, and later requests are executed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit.service.wires import mutations
from tests.unit.service.wires.http_client import Client
from tests.unit.service.wires.mutations import shot

pytestmark = pytest.mark.extended

HEADERS = {"weaver": "X-Weaver-API-Key", "tinker": "X-API-Key"}
COUNT = 1000


@dataclass(frozen=True)
class Address:
    """Where a service listens."""

    host: str
    port: int


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Address, Path]]:
    """A service of the engine, and its log."""
    keys = tmp_path / "keys"
    keys.write_text("ann tml-ann\nbob tml-bob\n")
    command = [sys.executable, "-m", "regress", "serve", "--config-name", "demo", "--port", "0"]
    command += ["--api-key-file", str(keys), "--state-dir", str(tmp_path / "state"), "--hole-timeout", "1"]
    log = tmp_path / "log"
    with log.open("w") as err:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=err, text=True, cwd=tmp_path, env={**os.environ}
        )
        assert process.stdout is not None
        with process.stdout:
            told = json.loads(process.stdout.readline())
            yield Address(told["host"], told["port"]), log
            process.terminate()
            assert process.wait(120) == 0


class Owner:
    """A client with a session, a model and a sampler of its weights."""

    def __init__(self, address: Address, key: str) -> None:
        self.weaver = Client(address, {HEADERS["weaver"]: key})  # type: ignore[arg-type]
        self.tinker = Client(address, {HEADERS["tinker"]: key})  # type: ignore[arg-type]
        self.session = self.weaver.post("sessions").json["id"]
        self.model = self.new_model(1)
        self.sampler = self.open_sampler(1)

    def new_model(self, number: int) -> str:
        """Create a model."""
        body = {"model_seq_id": number, "base_model": "demo", "training_mode": "full_ft"}
        return str(self.weaver.post(f"sessions/{self.session}/models", body).json["id"])

    def open_sampler(self, number: int) -> str:
        """Open the base model's weights."""
        body = {"sampling_session_seq_id": number, "base_model": "demo"}
        return str(self.weaver.post(f"sessions/{self.session}/sampling-sessions", body).json["id"])

    def log_probs(self, model: str, seq_id: int) -> Any:
        """Log-probs of a forward pass, which tell whether weights have changed."""
        tensor = {"target_tokens": {"data": [4, 5, 6], "dtype": "int64"}}
        chunks = {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]}
        data = [{"model_input": chunks, "loss_fn_inputs": tensor}]
        passed = {"loss_fn": "forward_logprob", "data": data}
        body = {"payload": {"seq_id": seq_id, "forward_input": passed}}
        answer = self.weaver.post(f"models/{model}/forward-passes", body).json
        return answer["response"]["result"]["loss_fn_outputs"]

    def close(self) -> None:
        """Close the connections."""
        self.weaver.close()
        self.tinker.close()


def test_broken_requests_at_the_engine(served: tuple[Address, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, log = served
    ann, bob = Owner(address, "tml-ann"), Owner(address, "tml-bob")
    theirs = [bob.model, bob.session, f"weaver://{bob.model}/checkpoints/x"]
    monkeypatch.setattr(mutations, "NAUGHTY", [*mutations.NAUGHTY, *theirs])
    before = bob.log_probs(bob.model, 1)
    chance = random.Random(5)
    for index in range(COUNT):
        sent = shot(chance, ann.session, ann.model, ann.sampler, index + 1)
        client = ann.weaver if sent.wire == "weaver" else ann.tinker
        answer = client.send(sent.method, f"/api/v1/{sent.path}", sent.body, sent.headers)
        assert answer.status < 500, (sent, answer)
        assert b"Traceback" not in answer.body
    assert bob.log_probs(bob.model, 2) == before
    assert ann.log_probs(ann.new_model(2), 1) == before
    assert "Traceback" not in log.read_text()
    ann.close()
    bob.close()
