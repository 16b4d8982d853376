"""Operations of a service over any host: order, repetition, cancellation, limits and failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from service_calls import GUARD, ended, failure, new_model, result
from service_double import PARAMS, request

from regress.service.core.training_service import CoreService
from regress.service.service_api import SamplingRequest, SaveKind, ServiceError, Status

Serve = Callable[..., CoreService]
KINDS = st.sampled_from(["pass", "forward", "refused", "optim", "unreadable", "cancelled"])


def submit(service: CoreService, model: str, seq: int, kind: str) -> Any:
    if kind == "optim":
        return service.optim_step(model, seq, PARAMS)
    if kind == "unreadable":
        return service.fail(model, seq, ServiceError("unreadable"))
    config = {"raises": "refused"} if kind == "refused" else {}
    return service.run_pass(model, seq, request(seq, forward_only=kind == "forward", **config))


def expected(kinds: list[str]) -> list[Any]:
    """Return the result of each operation run one after another, None for one that fails."""
    done, pending, found = 0, 0, []
    steps = 0
    for seq, kind in enumerate(kinds, 1):
        value: Any = None
        if kind in ("pass", "forward"):
            pending += seq if kind == "pass" else 0
            value = float(done + pending)
        elif kind == "optim":
            steps += 1
            value = (steps, float(pending))
            done, pending = done + pending, 0
        found.append(value)
    return found


def returned(service: CoreService, operation: Any) -> Any:
    found = ended(service, operation)
    if found.error is not None:
        return None
    value = found.result
    return value.metrics["loss:sum"] if hasattr(value, "outputs") else (value.step, value.grad_norm)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(KINDS, min_size=1, max_size=9), st.data())
def test_any_order_of_arrival_with_repetitions_and_cancellations_equals_the_sequence(
    serve: Serve, kinds: list[str], data: st.DataObject
) -> None:
    service = _shared(serve)
    model = new_model(service)
    kinds = ["pass", *kinds]  # the first arrives last, so that everything else waits
    order = [*data.draw(st.permutations(range(2, len(kinds) + 1))), 1]
    found: dict[int, Any] = {}
    for seq in order:
        found[seq] = submit(service, model, seq, kinds[seq - 1])
        again = data.draw(st.sampled_from(sorted(found)))
        assert submit(service, model, again, kinds[again - 1]).id == found[again].id
        if kinds[seq - 1] == "cancelled":
            assert "was cancelled before it was executed" in str(service.cancel(found[seq].id).error)
    assert [returned(service, found[seq]) for seq in sorted(found)] == expected(kinds)
    for seq in sorted(found):
        assert submit(service, model, seq, kinds[seq - 1]).id == found[seq].id, "executed, and again accepted"
    service.close_model(model)


def _shared(serve: Serve) -> CoreService:
    """Return the one service of all examples of a property."""
    if not hasattr(serve, "service"):
        serve.service = serve(models=10_000)  # type: ignore[attr-defined]
    return serve.service  # type: ignore[attr-defined,no-any-return]


def test_models_and_samplers_take_turns(serve: Serve, tmp_path: Path) -> None:
    service = serve()
    busy, other = new_model(service), new_model(service)
    slow = [service.run_pass(busy, seq, request(1, seconds=0.05)) for seq in range(1, 21)]
    quick = service.run_pass(other, 1, request(2))
    sampler = service.create_sampler(other.split(":")[0], 1, path=None, base_model="tiny")
    sample = service.sample(sampler, SamplingRequest(np.array([1])))
    result(service, quick)
    result(service, sample)
    assert service.operation(slow[-1].id).status is not Status.DONE, "others waited for a whole queue"


def test_a_number_with_other_content_fails_and_leaves_the_first(serve: Serve) -> None:
    service = serve()
    model = new_model(service)
    first = service.run_pass(model, 1, request(3))
    other = service.run_pass(model, 1, request(4))
    assert other.id != first.id
    error = failure(service, other)
    assert error.code == "conflict"
    assert str(error).startswith(f"seq_id 1 of {model} was used for a request with other content")
    assert result(service, first).metrics["loss:sum"] == 3
    assert result(service, service.run_pass(model, 2, request(1))).metrics["loss:sum"] == 4


def test_operations_behind_a_hole_fail_by_name_and_later_ones_run(serve: Serve) -> None:
    service = serve(hole_timeout=0.3)
    model = new_model(service)
    waiting = [service.run_pass(model, 3, request(3)), service.save(model, None, "x", SaveKind.STATE)]
    for operation in waiting:
        error = failure(service, operation)
        assert error.code == "missing_seq_id"
        assert f"seq_id 1 of {model} has not arrived within" in str(error)
        assert "for which seq_id 3 waited" in str(error)
    assert result(service, service.run_pass(model, 4, request(4))).metrics["loss:sum"] == 4
    assert failure(service, service.run_pass(model, 2, request(2))).code == "late"


def test_full_queues_refuse_but_never_what_others_wait_for(serve: Serve) -> None:
    service = serve(queue_length=3)
    model = new_model(service)
    for seq in (2, 3, 4):
        service.run_pass(model, seq, request(seq))
    with pytest.raises(
        ServiceError, match=r"3 operations of .* wait already; send the request again later"
    ) as caught:
        service.run_pass(model, None, request(9))
    assert caught.value.retryable
    assert caught.value.code == "busy"
    assert result(service, service.run_pass(model, 1, request(1))).metrics["loss:sum"] == 1
    assert result(service, service.run_pass(model, 5, request(5))).metrics["loss:sum"] == 15


def test_unread_results_refuse_requests_until_they_are_read(serve: Serve) -> None:
    service = serve(results_bytes=1000)
    model = new_model(service)
    first = [
        service.run_pass(model, seq, request(1)) for seq in (3, 2, 1)
    ]  # nothing runs before the last came
    end = time.monotonic() + GUARD
    while service.metrics()["operations_done_total"] < 4 and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(ServiceError, match="have not been read; send the request again later"):
        service.run_pass(model, 4, request(1))
    for operation in first:
        result(service, operation)
    assert result(service, service.run_pass(model, 4, request(1))).metrics["loss:sum"] == 4


def test_results_are_kept_for_some_time_after_they_were_read(serve: Serve) -> None:
    service = serve(read_ttl=0.0)
    model = new_model(service)
    passed, stepped = service.run_pass(model, 1, request(1)), service.optim_step(model, 2, PARAMS)
    result(service, passed)
    assert result(service, stepped).step == 1
    end = time.monotonic() + GUARD
    while service.metrics()["results_bytes"] and time.monotonic() < end:
        time.sleep(0.05)
    assert failure(service, passed).code == "result_expired"
    assert result(service, stepped).step == 1, "small results are in the journal"
    assert service.run_pass(model, 1, request(1)).id == passed.id, "it would be executed twice"


def test_a_full_disk_refuses_before_a_number_is_spent(serve: Serve) -> None:
    service = serve()
    model = new_model(service)
    file = service._state.ledger._file
    pages = file.execute("PRAGMA page_count").fetchone()[0]
    file.execute(f"PRAGMA max_page_count={pages}")
    number = 0

    def fill() -> None:
        nonlocal number
        while number < 200:
            number += 1
            result(service, service.run_pass(model, number, request(3)))

    with pytest.raises(ServiceError, match="cannot write its ledger") as caught:
        fill()
    assert caught.value.retryable
    file.execute("PRAGMA max_page_count=1000000")
    assert result(service, service.run_pass(model, number, request(3))).metrics["loss:sum"] == 3 * number


def test_an_unexpected_error_restores_the_model_and_hides_the_traceback(serve: Serve) -> None:
    service = serve()
    model = new_model(service)
    result(service, service.run_pass(model, 1, request(3)))
    result(service, service.optim_step(model, 2, PARAMS))
    saved = result(service, service.save(model, 3, "s", SaveKind.STATE))
    error = failure(service, service.run_pass(model, 4, request(5, raises="late")))
    assert "ZeroDivisionError" in str(error)
    assert "Traceback" not in str(error)
    assert f"{model} stands at step 1, its save {saved.path}" in str(error)
    assert result(service, service.run_pass(model, 5, request(4))).metrics["loss:sum"] == 7
    error = failure(service, service.run_pass(model, 6, request(5, raises="late")))
    refused = failure(service, service.optim_step(model, 7, PARAMS))
    assert refused.code == "interrupted"
    assert "did since its last save was lost when forward_backward of seq_id 6 failed" in str(refused)


def test_an_operation_that_takes_too_long_fails_and_its_model_is_restored(serve: Serve) -> None:
    service = serve(operation_timeout=0.5)
    model = new_model(service)
    saved = result(service, service.save(model, 1, "s", SaveKind.STATE))
    error = failure(service, service.run_pass(model, 2, request(5, seconds=1.5)))
    assert error.code == "timeout"
    assert "run_pass did not come to an end within 0.5 s" in str(error)
    result(service, service.load(model, 3, saved.path, optimizer=True))
    assert result(service, service.run_pass(model, 4, request(4))).metrics["loss:sum"] == 4


def test_many_clients_at_once_are_each_served_in_their_order(serve: Serve) -> None:
    service = serve(models=16)
    sums: dict[int, list[float]] = {}

    def client(number: int) -> None:
        model = new_model(service)
        passes = [service.run_pass(model, seq, request(number)) for seq in range(30, 0, -1)]
        sums[number] = [result(service, one).metrics["loss:sum"] for one in reversed(passes)]

    threads = [threading.Thread(target=client, args=[number]) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
    assert sums == {number: [float(number * seq) for seq in range(1, 31)] for number in range(1, 9)}
