"""Kills of a service at random moments: what was acknowledged stays, nothing runs twice, everything is told by name."""

from __future__ import annotations

import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_requests import datums
from service_calls import GUARD, PROCESSES
from service_double import LORALESS, PARAMS, opened, request
from service_process import ADDRESS, KEY, engine, serve

from regress.errors import ConfigError
from regress.service.core.host_executor import InProcess
from regress.service.core.training_service import CoreService
from regress.service.service_api import (
    Datum,
    Host,
    Operation,
    PassRequest,
    Saved,
    SaveKind,
    ServiceError,
    Status,
)

MOST = 150
"""Events up to which a service lives."""


class Killed(Exception):  # noqa: N818  # an event, no error
    """The service is gone."""


class Served:
    """A service in a process of its own: ``served.save(...)`` is the service's."""

    def __init__(self, root: Path, host: str) -> None:
        self._root, self._host = root, host
        self._process: Any = None
        self._client: Any = None

    def start(self, last: int | None) -> None:
        """Start it; it is killed at an event."""
        (self._root / ADDRESS).unlink(missing_ok=True)
        self._process = PROCESSES.Process(target=serve, args=[self._root, self._host, last], daemon=True)
        self._process.start()
        end = time.monotonic() + GUARD
        while self._client is None and time.monotonic() < end:
            try:
                self._client = Client(str(self._root / ADDRESS), family="AF_UNIX", authkey=KEY)
            except (OSError, EOFError):
                if self._process.exitcode is not None:
                    assert self._process.exitcode == -signal.SIGKILL, "the service does not start"
                    raise Killed from None
                time.sleep(0.02)
        assert self._client is not None, "the service does not start"

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
        """Leave it, and wait until it is gone."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._process.join(GUARD)
        assert self._process.exitcode in (0, -signal.SIGKILL), "the service does not end"


@dataclass
class Trainer:
    """Client of one model: what it was told, and what it asks for next.

    Attributes:
        mirror: host whose model is what the service's has to be; it executes what was acknowledged, and no more.
        make: makes a pass of a number.
        told: saves that were acknowledged, by path.
        sent: operations that were acknowledged.
        unanswered: number and call of the request that was not answered.
    """

    model: str
    chance: random.Random
    mirror: Host
    make: Callable[..., PassRequest]
    folder: Path
    seq: int = 0
    pending: bool = False
    unsaved: bool = False
    told: set[str] = field(default_factory=set)
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
        assert self.told <= {saved.path for saved in saves}, "an acknowledged save is lost"
        stands = served.model_info(self.model).step
        if saves and saves[-1].path not in self.told:  # the last request, done but never answered
            self._keep(saves[-1])
        assert stands == (self.last.step if self.last else 0), "the model does not stand at its last save"
        self._repeat(served)
        if self.last is None:
            return
        assert self.call(served, "load", self.last.path, optimizer=True).result == self.last
        self.mirror.load("mirror", self._copy(self.last.path), optimizer=True)
        self.pending = self.unsaved = False
        self.ask(served, self.make(0, forward_only=True))

    def _repeat(self, served: Served) -> None:
        """Send the request again that was not answered: it runs only on a model that has lost nothing."""
        if self.unanswered is None:
            return
        seq, method, arguments, settings = self.unanswered
        again = getattr(served, method)(self.model, seq, *arguments, **settings)
        self.unanswered = None
        again = served.operation(again.id, timeout=GUARD)
        if again.error is None and method == "save":
            self._keep(again.result)
        elif again.error is None and method != "load":
            assert not self.unsaved, "it ran on a model that has lost steps"

    def train(self, served: Served) -> None:
        """Make requests until the service is gone."""
        while True:
            what = self.chance.choice(["pass", "pass", "step", "save", "forward"])
            if what in ("pass", "forward"):
                self.ask(served, self.make(self.chance.randrange(1, 100), forward_only=what == "forward"))
                self.pending |= what == "pass"
                self.unsaved |= what == "pass"
            elif what == "step" and self.pending:
                made = self.call(served, "optim_step", PARAMS).result
                assert made == self.mirror.optim_step("mirror", PARAMS, {}), "other gradients"
                self.pending, self.unsaved = False, True
            elif what == "save" and not self.pending:
                self._keep(self.call(served, "save", f"save{self.seq}", SaveKind.STATE).result)

    def ask(self, served: Served, request: PassRequest) -> None:
        """Make a pass, whose result has to be the mirror's bit for bit."""
        found = self.call(served, "run_pass", request).result
        expected = self.mirror.run_pass("mirror", request, {})
        assert found.metrics == expected.metrics
        for one, other in zip(found.outputs, expected.outputs, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in other)

    def call(self, served: Served, method: str, *arguments: Any, **settings: Any) -> Operation:
        self.seq += 1
        self.unanswered = (self.seq, method, arguments, settings)
        operation: Operation = getattr(served, method)(self.model, self.seq, *arguments, **settings)
        self.unanswered = None
        self.sent.append(operation.id)
        found: Operation = served.operation(operation.id, timeout=GUARD)
        assert found.error is None, str(found.error)
        return found

    def _keep(self, saved: Saved) -> None:
        """Note a save; the mirror has one, too."""
        self.mirror.save("mirror", self._copy(saved.path), SaveKind.STATE)
        self.told.add(saved.path)
        self.last, self.unsaved = saved, False

    def _copy(self, path: str) -> str:
        return str(self.folder / path.rpartition("/")[2])


def scored(value: int, *, forward_only: bool = False) -> PassRequest:
    """Return a pass of the engine over two datums that a number chooses."""
    data = [Datum(datum.tokens, datum.inputs) for datum in datums([4 + value % 5, 3], seed=value)]
    return PassRequest(data, "importance_sampling", {}, forward_only)


def killed_often(root: Path, host: str, times: int, seed: int) -> None:
    """Kill a service again and again, at events that the seed chooses."""
    print(f"seed {seed} of {host}")  # shown if it fails
    chance = random.Random(seed)
    served = Served(root, host)
    served.start(None)
    session = served.create_session({"owner": "me"})
    created = served.operation(served.create_model(session, 1, LORALESS).id, timeout=GUARD)
    with (engine(root / "mirror") if host == "engine" else opened)() as mirror:
        mirror.create("mirror", LORALESS)
        make = scored if host == "engine" else request
        trainer = Trainer(created.result.model_id, chance, mirror, make, root)
        trainer.ask(served, make(1))
        trainer.call(served, "optim_step", PARAMS)
        mirror.optim_step("mirror", PARAMS, {})
        trainer._keep(trainer.call(served, "save", "first", SaveKind.STATE).result)
        served.end()
        for _ in range(times):
            with suppress(Killed):
                served.start(chance.randrange(1, MOST))
                trainer.resume(served)
                trainer.train(served)
            served.end()
        served.start(None)
        trainer.resume(served)
        served.end()
    executed = Counter((root / "executed").read_text().splitlines())
    assert max(executed.values()) == 1, "an operation was executed twice"
    assert len(trainer.sent) > times, "the kills came too early to mean anything"


def test_three_kills(tmp_path: Path) -> None:
    killed_often(tmp_path, "double", 3, seed=1)


@pytest.mark.extended
def test_two_kills_of_the_engine(tmp_path: Path) -> None:
    killed_often(tmp_path, "engine", 2, seed=4)


@pytest.mark.extended
@pytest.mark.parametrize("host", ["double", "engine"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_ten_kills(tmp_path: Path, host: str, seed: int) -> None:
    killed_often(tmp_path, host, 10, seed)


def test_one_state_directory_has_one_service(tmp_path: Path) -> None:
    service = CoreService(InProcess(opened), tmp_path / "state")
    with pytest.raises(
        ConfigError, match=r"another service uses the state directory .*; end it, or choose another"
    ):
        CoreService(InProcess(opened), tmp_path / "state")
    service.close()


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    service = CoreService(InProcess(opened), tmp_path)
    session = service.create_session({})
    service.close()
    service = CoreService(InProcess(opened), tmp_path)
    assert service.session_metadata(session) == {}
    service.close()
    file = tmp_path / "ledger.sqlite"
    whole = file.read_bytes()
    file.write_bytes(b"\xff" * 4096 + whole[4096:])
    with pytest.raises(ServiceError, match=r"ledger.sqlite is damaged .*; restore the file"):
        CoreService(InProcess(opened), tmp_path)
    file.write_bytes(whole)
    rows = sqlite3.connect(file, isolation_level=None)
    rows.execute("UPDATE entry SET value='{}'")
    rows.close()
    with pytest.raises(ServiceError, match=r"ledger.sqlite is damaged .*; restore the file"):
        CoreService(InProcess(opened), tmp_path)
