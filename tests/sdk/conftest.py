"""Unmodified SDKs against a service on loopback: ``tox run -e sdk``.

These tests run in a client's environment, which has one SDK and pytest, and neither regress nor what it needs; the
service runs in an environment of its own, whose Python the variable names.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SERVICE_PYTHON = "SDK_SERVICE_PYTHON"
KEY = "tml-loopback"
MODEL = "reverse_string"

collect_ignore_glob = [] if SERVICE_PYTHON in os.environ else ["*"]

os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}


def _announced(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the service has ended before it listened: {log.read_text()}"
    return str(json.loads(line)["url"])


@pytest.fixture(scope="session")
def service_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a service that offers `MODEL`, for as long as the tests run."""
    folder = tmp_path_factory.mktemp("service")
    command = [os.environ[SERVICE_PYTHON], "-m", "regress", "serve", "--config-name", MODEL, "--port", "0"]
    command += ["--state-dir", str(folder / "state"), "--hole-timeout", "5", "--drain-timeout", "5"]
    environ = {**os.environ, "GRPO_REGRESS_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            yield _announced(process, folder / "log")
        finally:
            process.terminate()
            process.wait(60)
    told = Path(folder / "log").read_text()
    assert "Traceback" not in told, told


@pytest.fixture
def driver(service_url: str) -> Iterator[Any]:
    """The SDK that is installed here, connected to the service with a model in full parameters."""
    if find_spec("weaver") is not None:
        from weaver_driver import WeaverDriver as Driver
    else:
        from tinker_driver import TinkerDriver as Driver  # type: ignore[assignment]
    connected = Driver(service_url, KEY, MODEL)
    yield connected
    connected.close()


@pytest.fixture(autouse=True)
def _loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to anywhere but this machine."""
    connect = socket.socket.connect

    def checked(this: socket.socket, address: Any) -> None:
        assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost"), address
        connect(this, address)

    monkeypatch.setattr(socket.socket, "connect", checked)
