"""Sequence numbers: once one can be read, the request is executed or has failed, and no hole stops the later ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from regress.service.api import Operation, Service, ServiceError


def spending(
    service: Service,
    model_id: str,
    seq_id: int | None,
    submit: Callable[[], Operation],
    problem: ServiceError | None = None,
) -> tuple[Operation | None, ServiceError | None]:
    """Submit a request, or spend its sequence number on the error that refuses it.

    Args:
        service: the service.
        model_id: model that the client owns.
        seq_id: number of the request, None if it has none.
        submit: reads the content of the request, and submits it.
        problem: why the request is refused whatever it holds.

    Returns:
        The operation, and the error if the request was refused; no operation if it has no number.

    Raises:
        ServiceError: the service is too busy, or the model does not exist: the number is not spent.
        Exception: the service itself has failed: the number is spent.
    """
    try:
        if problem is not None:
            raise problem
        return submit(), None
    except ServiceError as error:
        if error.retryable:
            raise
        if seq_id is None:
            return None, error
        return service.fail(model_id, seq_id, error), error  # raises, too, if there is no such model
    except Exception:
        if seq_id is not None:
            with suppress(ServiceError):
                service.fail(model_id, seq_id, _INTERNAL)
        raise


_INTERNAL = ServiceError(
    "the service has failed while it read the request; its log says why", code="internal", category="server"
)
