"""Unmodified SDKs against a service on loopback: ``tox run -e sdk``.

These tests run in a client's environment, which has one SDK and pytest, and neither regress nor what it needs; the
service runs in an environment of its own, whose Python the variable names.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SERVICE_PYTHON = "SDK_SERVICE_PYTHON"
KEY = "tml-loopback"
SEEDS = (0, 1, 2)
SELF_HOSTED = "SDK_SELF_HOSTED"
"""Folder of the self-hosted trainings; without it they are made when they are needed."""
HERE = Path(__file__).parent

collect_ignore_glob = [] if SERVICE_PYTHON in os.environ else ["*"]

os.environ |= {"NO_PROXY": "127.0.0.1,localhost", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}


def _announced(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the service has ended before it listened: {log.read_text()}"
    return str(json.loads(line)["url"])


@pytest.fixture(scope="session")
def configurations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the training's configurations, one for each seed."""
    folder = tmp_path_factory.mktemp("configurations")
    for seed in SEEDS:
        (folder / f"seed-{seed}.yaml").write_text(f"{(HERE / 'grpo.yaml').read_text()}\nseed: {seed}\n")
    return folder


@pytest.fixture(scope="session")
def self_hosted(
    configurations: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """The self-hosted training of a seed, which the service's environment makes."""
    folder = Path(os.environ.get(SELF_HOSTED) or tmp_path_factory.mktemp("self-hosted"))

    def trained(seed: int) -> dict[str, Any]:
        found = folder / f"seed-{seed}.json"
        if not found.exists():
            made = found.with_suffix(".part")
            command = [
                os.environ[SERVICE_PYTHON],
                HERE / "self_hosted.py",
                configurations / f"seed-{seed}.yaml",
            ]
            subprocess.run([*command, made], cwd=folder, check=True)
            made.replace(found)
        content: dict[str, Any] = json.loads(found.read_text())
        return content

    return trained


@pytest.fixture(scope="session")
def service_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the service; its saves are in ``state/saves``."""
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="session")
def service_url(configurations: Path, service_folder: Path) -> Iterator[str]:
    """URL of a service that offers a model for each seed, for as long as the tests run."""
    folder = service_folder
    command = [os.environ[SERVICE_PYTHON], "-m", "regress", "serve", "--port", "0"]
    command += [f"--model=seed-{seed}={configurations / f'seed-{seed}.yaml'}" for seed in SEEDS]
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
def make_driver(service_url: str) -> Iterator[Callable[[str], Any]]:
    """Function that connects the SDK that is installed here to the service, with a model in full parameters."""
    if find_spec("weaver") is not None:
        from weaver_driver import WeaverDriver as Driver
    else:
        from tinker_driver import TinkerDriver as Driver  # type: ignore[assignment]
    made = []

    def connect(model: str) -> Any:
        made.append(Driver(service_url, KEY, model))
        return made[-1]

    yield connect
    for driver in made:
        driver.close()


@pytest.fixture
def driver(make_driver: Callable[[str], Any]) -> Any:
    """The SDK, connected with the model of the first seed."""
    return make_driver(f"seed-{SEEDS[0]}")


@pytest.fixture(autouse=True)
def _loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to anywhere but this machine."""
    connect = socket.socket.connect

    def checked(this: socket.socket, address: Any) -> None:
        assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1", "localhost"), address
        connect(this, address)

    monkeypatch.setattr(socket.socket, "connect", checked)
