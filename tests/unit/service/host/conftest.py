"""Hosts of tiny models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from regress.engine.engine_ranks import SingleProcess
from regress.service.host.engine_host import EngineHost
from regress.service.service_api import ModelSpec

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests are imported by name, by ranks too

from host_requests import offer  # it is found only now


@pytest.fixture
def make_host(tmp_path: Path) -> Callable[..., EngineHost]:
    """``make_host("key=value", ..., models=1)``: a host that offers ``tiny``, with the models ``m0``, ``m1``, ..."""

    def make(*overrides: str, models: int = 1) -> EngineHost:
        host = EngineHost({"tiny": offer(*overrides)}, SingleProcess(), tmp_path / "service")
        for number in range(models):
            host.create(f"m{number}", ModelSpec("tiny"))
        return host

    return make
