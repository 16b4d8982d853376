"""``regress serve``: its options, its keys, and whole processes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from service_calls import GUARD

from regress.cli import main
from regress.errors import ConfigError
from regress.service import commands
from regress.service.api_keys import api_keys

KEY = "tml-secret-of-a-test"
LIMITS = {*commands._LIMITS, *commands._REQUEST_LIMITS}
SMALL = ("data.max_seq_length=32",)
LAUNCHED = (*("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"),)
LAUNCHED += (*("--rdzv-endpoint", "127.0.0.1:0", "-m", "regress", "serve"),)
ALONE = ("-m", "regress", "serve")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the service needs an API key, one word that clients send"),
        (["--api-key", "a b"], "the service needs an API key, one word"),
        (["--api-key", "k", "--api-key-file", "f"], "--api-key and --api-key-file exclude one another"),
        (
            ["--api-key", KEY, "--model", "x=missing"],
            "--model x=missing is not a name of its own with a path that exists",
        ),
        (["--api-key", KEY, "modle.dtype=float64"], "modle"),
        (["--api-key", KEY, "--wire", "soap", "--port", "0"], "wire 'soap' is unknown"),
    ],
)
def test_mistakes_are_told_in_a_sentence_without_the_key(
    tmp_path: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["serve", *arguments])
    assert found.exit_code == 2, found.output
    assert sentence in found.output
    assert KEY not in found.output
    assert "Traceback" not in found.output
    assert not (tmp_path / "outputs").exists(), "a mistake left a state directory"


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# owners\n\nalice tml-a\nbob b\n")
    assert api_keys(None, str(file), {}) == {"alice": "tml-a", "bob": "b"}
    assert api_keys(None, None, {"GRPO_REGRESS_API_KEY": "k"}) == {"default": "k"}
    for text, sentence in [
        ("", "has no key"),
        ("a tml-k\na tml-l\n", "line 2 of"),
        ("a tml-k\nb tml-k\n", "line 2 of"),
        ("a b c", "line 1"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=sentence) as caught:
            api_keys(None, str(file), {})
        assert "tml-" not in str(caught.value)


def test_the_help_teaches() -> None:
    text = CliRunner().invoke(main, ["serve", "--help"]).output
    words = ("WEAVER_BASE_URL=", "TINKER_BASE_URL=", "torchrun", "--port 0", "SIGTERM", "seq_id")
    for word in (*words, "--request-bytes", "--request-datums", "--request-tokens", "--queue-length"):
        assert word in text


def test_limits_of_the_options_are_those_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option sets its own limit, and nothing else."""
    found: list[Any] = []
    monkeypatch.setattr("regress.service.serve_run.serve", lambda serving: found.append(serving) or 0)
    monkeypatch.chdir(tmp_path)
    options = [option for option in commands.serve.params if option.name in LIMITS]
    assert len(options) == len(LIMITS)
    values = {option.name: 30.0 - index / 8 for index, option in enumerate(options)}
    arguments = []
    for option in options:
        value = values[option.name] = (
            int(values[option.name] * 8) if isinstance(option.default, int) else values[option.name]
        )
        arguments += [option.opts[0], str(value)]
    run = CliRunner().invoke(main, ["serve", "--api-key", KEY, *arguments])
    assert run.exit_code == 0, run.output
    for name, value in values.items():
        assert {getattr(limits, name, value) for limits in (found[0].limits, found[0].requests)} == {value}
    refused = CliRunner().invoke(main, ["serve", "--api-key", KEY, "--poll-seconds", "60"])
    assert refused.exit_code == 2
    assert "60.0 is not in the range" in refused.output


class Process:
    """``regress serve`` in a process of its own, and a client of its Weaver wire."""

    def __init__(self, root: Path, arguments: Sequence[str], launcher: Sequence[str] = ALONE) -> None:
        self._log = (root / "log").open("a+")
        options = ["--port", "0", "--state-dir", str(root / "state"), "--log-format", "json"]
        environment = {**os.environ, "GRPO_REGRESS_API_KEY": KEY, "NO_PROXY": "127.0.0.1"}
        self._process = subprocess.Popen(
            [sys.executable, *launcher, *options, *SMALL, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline() or "{}")
        assert told.get("event") == "listening", (root / "log").read_text()
        self.url, self.pid = told["url"], told["pid"]

    def call(self, path: str, body: Any = None) -> Any:
        headers = {"X-Weaver-API-Key": KEY, "content-type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        sent = urllib.request.Request(f"{self.url}/api/v1/{path}", data, headers)
        with urllib.request.urlopen(sent, timeout=GUARD) as reply:
            return json.load(reply)

    def ended(self, found: Any) -> Any:
        while found["status"] in ("pending", "running"):
            time.sleep(0.02)
            found = self.call(f"operations/{found['id']}")
        return found

    def step(self, model: str, seq: int) -> tuple[float, float]:
        """Return loss and gradient norm of a step whose requests have two numbers."""
        tokens = [[3, 4, 5, 6, 7], [5, 6, 3], [4, 7, 3, 5]]
        data = [
            {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": row[:-1]}]},
                "loss_fn_inputs": {
                    "target_tokens": {"data": row[1:], "dtype": "int64"},
                    "weights": {"data": [1.0] * (len(row) - 1), "dtype": "float32"},
                },
            }
            for row in tokens
        ]
        body = {"model_id": model, "seq_id": seq, "tensor_transport": "default"}
        inner = {"loss_fn": "cross_entropy", "data": data}
        path = f"models/{model}/forward-backward-passes"
        passed = self.ended(self.call(path, {"payload": {**body, "forward_backward_input": inner}}))
        adam = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
        body = {"model_id": model, "seq_id": seq + 1, "adam_params": {**adam, "grad_clip_norm": 1.0}}
        stepped = self.ended(self.call(f"models/{model}/optimizer-steps", {"payload": body}))
        assert (passed["status"], stepped["status"]) == ("done", "done"), (passed, stepped)
        loss = passed["response"]["result"]["metrics"]["loss:sum"]
        return loss, stepped["response"]["metrics"]["grad_norm"]

    def model(self) -> str:
        session = self.call("sessions", {})["id"]
        name = self.call("supported-models")["items"][0]["name"]
        body = {"model_seq_id": 1, "base_model": name, "training_mode": "full_ft"}
        return str(self.call(f"sessions/{session}/models", body)["id"])

    def end(self, number: int) -> int:
        os.kill(self.pid, number)
        return self._process.wait(GUARD)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(root, arguments, launcher)``: a process that is gone at the end."""
    started: list[Process] = []

    def run(*arguments: Any) -> Process:
        found = Process.__new__(Process)
        started.append(found)
        found.__init__(*arguments)  # type: ignore[misc]  # so that one that does not come up is ended, too
        return found

    yield run
    for process in started:
        process.close()


@pytest.mark.extended
def test_a_service_is_killed_goes_on_and_ends_by_request(tmp_path: Path, start: Start) -> None:
    """The steps after a save, a kill and a load are bit by bit those without them."""
    whole = start(tmp_path, ["model.dtype=float64"])
    model = whole.model()
    steps = [whole.step(model, seq) for seq in (1, 3)]
    saved = whole.ended(
        whole.call(f"models/{model}/checkpoints", {"type": "weight_and_optimizer", "name": "a"})
    )
    steps += [whole.step(model, seq) for seq in (5, 7)]
    whole.end(signal.SIGKILL)
    again = start(tmp_path, ["model.dtype=float64"])
    again.ended(
        again.call(f"models/{model}/load", {"path": saved["response"]["path"], "include_optimizer": True})
    )
    assert [again.step(model, seq) for seq in (9, 11)] == steps[2:]
    assert again.end(signal.SIGTERM) == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert KEY not in log
    assert {json.loads(line)["kind"] for line in log.splitlines()} == {
        *("create_model", "forward_backward", "optim_step", "save", "load")
    }


@pytest.mark.extended
def test_ranks_of_the_service_and_of_a_launcher_take_the_same_steps(tmp_path: Path, start: Start) -> None:
    found = []
    for name, ranks, launcher in [
        ("1", (), ALONE),
        ("own", ("parallel.dp=2",), ALONE),
        ("run", ("parallel.dp=2",), LAUNCHED),
    ]:
        (tmp_path / name).mkdir()
        process = start(tmp_path / name, ["model.dtype=float64", *ranks], launcher)
        model = process.model()
        found.append([process.step(model, seq) for seq in (1, 3)])
        assert process.end(signal.SIGTERM) == 0, (tmp_path / name / "log").read_text()
    one, own, launched = found
    assert own == launched
    for step, other in zip(one, own, strict=True):
        assert step == pytest.approx(other, rel=1e-12)
