"""Services on a host that computes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests are imported by name, by ranks too
sys.path.insert(1, str(Path(__file__).parent.with_name("host")))

from service_double import opened

from regress.service.core.host_executor import InProcess
from regress.service.core.service_limits import Limits
from regress.service.core.training_service import CoreService


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., CoreService]]:
    """``serve(hole_timeout=1.0, root=..., executor=...)``: a service, closed at the end."""
    services: list[CoreService] = []

    def start(root: Path = tmp_path / "state", executor: Any = None, **limits: Any) -> CoreService:
        found = CoreService(executor or InProcess(opened), root, Limits(**limits))
        services.append(found)
        return found

    yield start
    for service in services:
        service.close()
