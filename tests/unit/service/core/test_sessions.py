"""Sessions of a service: models that are created and closed, ends, and restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from service_calls import GUARD, failure, new_model, result
from service_double import LORALESS, opened, request

from regress.service.core.host_executor import InProcess
from regress.service.core.training_service import CoreService
from regress.service.service_api import ModelSpec, SamplingRequest, ServiceError

Serve = Callable[..., CoreService]


def test_creation_is_repeated_never_and_fails_by_name(serve: Serve) -> None:
    service = serve(models=2)
    session = service.create_session({"owner": "me"})
    first = service.create_model(session, 1, LORALESS)
    assert service.create_model(session, 1, LORALESS).id == first.id
    info = result(service, first)
    assert service.model_info(info.model_id) == info
    conflict = service.create_model(session, 1, ModelSpec("tiny", metadata={"other": 1}))
    assert "was used for another model" in str(failure(service, conflict))
    broken = service.create_model(session, 2, ModelSpec("tiny", metadata={"fails": 1}))
    assert str(failure(service, broken)) == "it fails"
    result(service, service.create_model(session, 3, LORALESS))
    with pytest.raises(ServiceError, match="2 models are open; close one"):
        service.create_model(session, 4, LORALESS)
    with pytest.raises(ServiceError, match="'huge' is not offered; choose one of tiny"):
        service.create_model(session, 5, ModelSpec("huge"))
    with pytest.raises(ServiceError, match="there is no session 'x'"):
        service.create_model("x", 1, LORALESS)
    assert service.session_metadata(session) == {"owner": "me"}


def test_sessions_that_end_close_their_models_behind_what_is_queued(serve: Serve) -> None:
    service = serve(session_ttl=GUARD)
    model = new_model(service)
    session = model.split(":")[0]
    last = service.run_pass(model, 1, request(3, seconds=0.1))
    service.finish_session(session)
    service.finish_session(session)
    with pytest.raises(ServiceError, match=r"there is no model or sampler .*, or it is closed"):
        service.run_pass(model, 2, request(3))
    assert result(service, last).metrics["loss:sum"] == 3
    with pytest.raises(ServiceError, match=f"session {session} is finished"):
        service.touch_session(session)
    assert service.drain(GUARD)
    assert service.metrics()["models"] == 0


def test_a_session_without_a_sign_of_life_is_finished(serve: Serve) -> None:
    service = serve(session_ttl=0.1)
    model = new_model(service)
    end = time.monotonic() + GUARD
    while service.metrics()["models"] and time.monotonic() < end:
        time.sleep(0.05)
    with pytest.raises(ServiceError, match="closed"):
        service.run_pass(model, 1, request(3))


def test_a_service_that_drains_executes_what_is_queued_and_accepts_nothing(serve: Serve) -> None:
    service = serve()
    model = new_model(service)
    queued = [service.run_pass(model, seq, request(seq, seconds=0.05)) for seq in range(1, 5)]
    stuck = service.run_pass(model, 9, request(9))
    assert service.drain(GUARD)
    assert service.health()["status"] == "draining"
    assert [result(service, operation).metrics["loss:sum"] for operation in queued] == [1, 3, 6, 10]
    assert "has not arrived and the service is stopping" in str(failure(service, stuck))
    with pytest.raises(ServiceError, match="the service is stopping") as caught:
        service.run_pass(model, 5, request(5))
    assert caught.value.retryable


def test_a_session_and_a_sample_are_made_once_over_a_restart(tmp_path: Path) -> None:
    """A client that did not hear the answer sends the same again, maybe to the next service."""
    first = CoreService(InProcess(opened), tmp_path)
    session = first.create_session({"owner": "me"}, key="me 1")
    assert first.create_session({"owner": "me"}, key="me 1") == session
    assert (
        len({first.create_session({}), first.create_session({}), first.create_session({}, key="me 2")}) == 3
    )
    sampler = first.create_sampler(session, 0, path=None, base_model="tiny")
    asked = SamplingRequest(np.array([1, 2]), seed=3)
    sent = first.sample(sampler, asked, 7)
    result(first, sent)
    assert first.sample(sampler, asked, 7).id == sent.id
    assert first.sample(sampler, asked, 3).id != sent.id  # it orders nothing
    assert first.sample(sampler, asked).id != first.sample(sampler, asked).id
    first.drain(GUARD)
    first.close()
    for _ in range(2):
        second = CoreService(InProcess(opened), tmp_path)
        assert second.create_session({"owner": "me"}, key="me 1") == session
        assert second.sample(sampler, asked, 7).id == sent.id
        assert "is no longer kept" in str(failure(second, second.sample(sampler, asked, 7)))
        other = second.sample(sampler, SamplingRequest(np.array([1, 2]), seed=4), 7)
        assert "seq_id 7 of" in str(failure(second, other))
        second.close()
    third = CoreService(InProcess(opened), tmp_path)
    third.finish_session(session)
    assert third.create_session({"owner": "me"}, key="me 1") != session
    third.close()
