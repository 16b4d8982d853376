"""Kills of a service at random moments: what was acknowledged stays, nothing runs twice, everything is told by name."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest
from service_calls import GUARD
from service_double import LORALESS, PARAMS, opened, request
from service_process import KEY

from regress.errors import ConfigError
from regress.service.api import Operation, Saved, SaveKind, ServiceError, Status
from regress.service.core.executor import InProcess
from regress.service.core.service import CoreService


class Killed(Exception):  # noqa: N818  # an event, no error
    """The service is gone."""


class Served:
    """A service in a process of its own: ``served.save(...)`` is the service's; killed after some time."""

    def __init__(self, root: Path, life: float | None) -> None:
        address = root / "socket"
        address.unlink(missing_ok=True)
        program = [
            sys.executable,
            str(Path(__file__).with_name("service_process.py")),
            str(address),
            str(root),
        ]
        path = os.pathsep.join([str(Path(__file__).parents[4]), str(Path(__file__).parent)])
        self._process = subprocess.Popen(program, env={**os.environ, "PYTHONPATH": path})
        self._client = self._connected(address)
        if life is not None:
            threading.Timer(life, self._process.send_signal, [signal.SIGKILL]).start()

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            try:
                self._client.send((method, arguments, settings))
                ok, value = self._client.recv()
            except (EOFError, OSError):
                raise Killed from None
            if not ok:
                raise value
            return value

        return call

    def end(self) -> None:
        self._client.close()
        self._process.wait(GUARD)

    def _connected(self, address: Path) -> Connection[Any, Any]:
        end = time.monotonic() + GUARD
        while time.monotonic() < end:
            try:
                return Client(str(address), family="AF_UNIX", authkey=KEY)
            except (FileNotFoundError, ConnectionRefusedError):
                assert self._process.poll() is None, "the service does not start"
                time.sleep(0.02)
        raise AssertionError("the service does not start")


@dataclass
class Trainer:
    """Client of one model: what it was told, and what it asks for next.

    Attributes:
        total: sum of all values of the steps of the model, and of the passes since.
        told: totals by path of the saves that were acknowledged.
        sent: operations that were acknowledged.
        open: number and call of the request that was not answered.
    """

    model: str
    chance: random.Random
    seq: int = 0
    total: int = 0
    pending: bool = False
    unsaved: bool = False
    told: dict[str, int] = field(default_factory=dict)
    last: Saved | None = None
    sent: list[str] = field(default_factory=list)
    unanswered: tuple[int, str, tuple[Any, ...], dict[str, Any]] | None = None

    def resume(self, served: Served) -> None:
        """Check what the service remembers, and go on from the last save."""
        for id in self.sent:
            found: Operation = served.operation(id)
            assert found.status in (Status.DONE, Status.FAILED), "an operation of before is under way"
            if found.error is not None and found.error.code == "restarted":
                assert f"{self.model} stands at step" in str(found.error)
        saves: list[Saved] = served.saves(self.model)
        assert set(self.told) <= {saved.path for saved in saves}, "an acknowledged save is lost"
        stands = served.model_info(self.model).step
        if saves and saves[-1].path not in self.told:  # the last request, done but never answered
            self.last, self.told[saves[-1].path], self.unsaved = saves[-1], self.total, False
        assert stands == (self.last.step if self.last else 0), "the model does not stand at its last save"
        self._repeat(served)
        if self.last is None:
            return
        assert self.call(served, "load", self.last.path, optimizer=True).result == self.last
        self.total, self.pending, self.unsaved = self.told[self.last.path], False, False
        loss = self.call(served, "run_pass", request(0, forward_only=True)).result.metrics["loss:sum"]
        assert loss == self.total, "the save holds something else"

    def _repeat(self, served: Served) -> None:
        """Send the request again that was not answered: it runs only on a model that has lost nothing."""
        if self.unanswered is None:
            return
        seq, method, arguments, settings = self.unanswered
        again = getattr(served, method)(self.model, seq, *arguments, **settings)
        self.unanswered = None
        again = served.operation(again.id, timeout=GUARD)
        if again.error is None and method == "save":
            self.last, self.told[again.result.path] = again.result, self.total
        elif again.error is None and method != "load":
            assert not self.unsaved, "it ran on a model that has lost steps"

    def train(self, served: Served) -> None:
        """Make requests until the service is gone."""
        while True:
            what = self.chance.choice(["pass", "pass", "step", "save", "forward"])
            if what in ("pass", "forward"):
                value = self.chance.randrange(1, 100)
                sent = request(value, forward_only=what == "forward", seconds=self.chance.choice([0.0, 0.01]))
                loss = self.call(served, "run_pass", sent).result.metrics["loss:sum"]
                self.total += value if what == "pass" else 0
                self.pending |= what == "pass"
                self.unsaved |= what == "pass"
                assert loss == self.total
            elif what == "step":
                self.call(served, "optim_step", PARAMS)
                self.pending, self.unsaved = False, True
            elif not self.pending:
                saved = self.call(served, "save", f"save{self.seq}", SaveKind.STATE).result
                self.last, self.told[saved.path], self.unsaved = saved, self.total, False

    def call(self, served: Served, method: str, *arguments: Any, **settings: Any) -> Operation:
        self.seq += 1
        self.unanswered = (self.seq, method, arguments, settings)
        operation: Operation = getattr(served, method)(self.model, self.seq, *arguments, **settings)
        self.unanswered = None
        self.sent.append(operation.id)
        found: Operation = served.operation(operation.id, timeout=GUARD)
        assert found.error is None, str(found.error)
        return found


def killed_often(root: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    served = Served(root, None)
    session = served.create_session({"owner": "me"})
    created = served.operation(served.create_model(session, 1, LORALESS).id, timeout=GUARD)
    trainer = Trainer(created.result.model_id, chance)
    trainer.call(served, "optim_step", PARAMS)
    trainer.last = trainer.call(served, "save", "first", SaveKind.STATE).result
    trainer.told[trainer.last.path] = 0
    served.end()
    for _ in range(times):
        served = Served(root, chance.uniform(0.0, 0.25))
        try:
            trainer.resume(served)
            trainer.train(served)
        except Killed:
            served.end()
    served = Served(root, None)
    trainer.resume(served)
    served.end()
    executed = Counter((root / "executed").read_text().splitlines())
    assert max(executed.values()) == 1, "an operation was executed twice"
    assert len(trainer.sent) > times, "the kills came too early to mean anything"


def test_three_kills(tmp_path: Path) -> None:
    killed_often(tmp_path, 3, seed=1)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(2, 7))
def test_ten_kills(tmp_path: Path, seed: int) -> None:
    killed_often(tmp_path, 10, seed)


def test_one_state_directory_has_one_service(tmp_path: Path) -> None:
    service = CoreService(InProcess(opened), tmp_path / "state")
    with pytest.raises(
        ConfigError, match=r"another service uses the state directory .*; end it, or choose another"
    ):
        CoreService(InProcess(opened), tmp_path / "state")
    service.close()


def test_a_damaged_journal_is_refused_by_line(tmp_path: Path) -> None:
    service = CoreService(InProcess(opened), tmp_path)
    session = service.create_session({})
    service.close()
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"is":"sess')  # a line that a power failure has cut
    service = CoreService(InProcess(opened), tmp_path)
    assert service.session_metadata(session) == {}
    service.close()
    journal.write_bytes(b"\xff\n" + whole)
    with pytest.raises(ServiceError, match=r"line 1 of .*journal.jsonl is damaged; restore the file"):
        CoreService(InProcess(opened), tmp_path)
