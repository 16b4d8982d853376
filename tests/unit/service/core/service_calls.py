"""Calls of a service that wait for the end."""

from __future__ import annotations

import multiprocessing
from typing import Any

from service_double import LORALESS

from regress.service.core.training_service import CoreService
from regress.service.service_api import Operation, ServiceError, Status

# processes are forked from one that has imported the engine
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["regress.service.host.engine_host", "regress.service.core.training_service", "host_requests"]
)
GUARD = 60.0
"""Seconds after which something hangs."""


def ended(service: CoreService, operation: Operation) -> Operation:
    """Return the end of an operation."""
    found = service.operation(operation.id, timeout=GUARD)
    assert found.status in (Status.DONE, Status.FAILED), f"{operation.id} does not end"
    return found


def failure(service: CoreService, operation: Operation) -> ServiceError:
    """Return the error of an operation, which must fail."""
    error = ended(service, operation).error
    assert error is not None, "it has not failed"
    return error


def result(service: CoreService, operation: Operation) -> Any:
    """Return the result of an operation."""
    found = ended(service, operation)
    assert found.error is None, str(found.error)
    return found.result


def new_model(service: CoreService, number: int = 1) -> str:
    """Return the id of a new model in a new session."""
    return str(result(service, service.create_model(service.create_session({}), number, LORALESS)).model_id)
