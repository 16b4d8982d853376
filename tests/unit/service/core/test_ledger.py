"""Memory of a service: as much as its limit says after any number of requests, over restarts, too."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from service_calls import GUARD, ended, failure, new_model, result
from service_double import LORALESS, PARAMS, opened, request

from regress.errors import ConfigError, RegressError
from regress.service.core.host_executor import InProcess
from regress.service.core.training_service import CoreService
from regress.service.service_api import ModelSpec, SaveKind, ServiceError

Serve = Callable[..., CoreService]


def known(service: CoreService, ids: list[str]) -> list[str]:
    """Return the operations that a service remembers."""
    return [id for id in ids if code(service.operation, id) != "not_found"]


def code(call: Callable[[str], object], id: str) -> str | None:
    """Return the code of a call's error, None if there is none."""
    try:
        call(id)
    except ServiceError as error:
        return error.code
    return None


def test_operations_are_forgotten_behind_a_model_that_stays(serve: Serve) -> None:
    service = serve(remembered=20, read_ttl=0.0)
    session = service.create_session({})
    created = service.create_model(session, 1, LORALESS)
    model = result(service, created).model_id
    ids = [ended(service, service.run_pass(model, number, request(1))).id for number in range(1, 101)]
    service.close()
    service = serve(remembered=20)
    assert known(service, ids) == ids[-20:]
    assert service.create_model(session, 1, LORALESS).id == created.id, "a second model would be created"
    assert "already" not in str(failure(service, service.run_pass(model, 100, request(1))))


def test_the_file_does_not_grow_with_the_number_of_requests(serve: Serve) -> None:
    service = serve(remembered=50)
    model = new_model(service)
    sizes = []
    for number in range(1, 601):
        result(service, service.run_pass(model, number, request(1)))
        sizes.append(service.metrics()["journal_bytes"])
    assert sizes[-1] <= 1.25 * sizes[199]


@pytest.mark.parametrize("saved", [False, True])
def test_a_model_goes_on_behind_numbers_that_are_forgotten(serve: Serve, saved: bool) -> None:
    service = serve(remembered=5)
    model = new_model(service)
    for number in range(1, 30):
        result(service, service.run_pass(model, number, request(1)))
    result(service, service.optim_step(model, 30, PARAMS))
    result(service, service.save(model, 31, "a", SaveKind.STATE))
    if not saved:
        result(service, service.run_pass(model, 32, request(1)))
    service.close()
    service = serve(remembered=5, hole_timeout=GUARD)
    number = 32 if saved else 33
    if not saved:
        assert result(service, service.load(model, 33, f"{model}/state/a", optimizer=True)).step == 1
        number = 34
    assert result(service, service.run_pass(model, number, request(3))).metrics["loss:sum"] == 32.0
    for spent in (1, 20):
        assert failure(service, service.run_pass(model, spent, request(9))).code == "late"


def test_a_model_that_lost_what_is_forgotten_does_not_go_on(serve: Serve) -> None:
    service = serve(remembered=5)
    model = new_model(service)
    result(service, service.run_pass(model, 1, request(1)))
    for number in range(2, 20):
        result(service, service.run_pass(model, number, request(1, forward_only=True)))
    for _ in range(2):
        service.close()
        service = serve(remembered=5)
        error = failure(service, service.run_pass(model, None, request(1)))
        assert error.code == "interrupted"
        assert f"{model} stands at step 0, as it was created; load a save" in str(error)


def test_a_closed_model_is_not_created_again(serve: Serve) -> None:
    service = serve(remembered=3)
    session = service.create_session({})
    model = result(service, service.create_model(session, 1, LORALESS)).model_id
    service.close_model(model)
    other = result(service, service.create_model(session, 2, LORALESS)).model_id
    for number in range(1, 9):
        result(service, service.run_pass(other, number, request(1)))
    with pytest.raises(ServiceError, match=f"{model} was closed; create another model"):
        service.create_model(session, 1, LORALESS)


def test_finished_sessions_are_forgotten_unless_they_have_saves(serve: Serve) -> None:
    service = serve(remembered=3)
    sessions = [service.create_session({"number": number}, key=str(number)) for number in range(9)]
    model = result(service, service.create_model(sessions[1], 1, LORALESS)).model_id
    result(service, service.save(model, 1, "kept", SaveKind.WEIGHTS))
    result(service, service.create_model(sessions[2], 1, LORALESS))
    for session in sessions[:8]:
        service.finish_session(session)
    assert service.drain(GUARD)
    service.close()
    service = serve(remembered=3)
    for session in [service.create_session({}) for _ in range(2)]:
        service.finish_session(session)
    found = [code(service.session_metadata, session) for session in sessions]
    assert found == ["not_found", None, *["not_found"] * 4, None, None, None]
    assert service.session_metadata(sessions[1]) == {"number": 1}
    assert [saved.name for saved in service.saves(model)] == ["kept"]


def test_numbers_that_are_not_finite_and_any_text_are_remembered(serve: Serve) -> None:
    service = serve()
    session = service.create_session({"a": "\u00e9", "deep": [{"x": None, "y": [1.5, True]}]})
    spec = ModelSpec("tiny", metadata={"name": "\U0001f600"})
    model = result(service, service.create_model(session, 1, spec)).model_id
    passed = result(service, service.run_pass(model, 1, request(2)))
    assert passed.metrics["loss:sum"] == 2
    stepped = service.optim_step(model, 2, PARAMS)
    found = result(service, stepped)
    saved = service.save(model, 3, "a", SaveKind.STATE)
    path = result(service, saved)
    service.close()
    service = serve()
    assert service.session_metadata(session) == {"a": "\u00e9", "deep": [{"x": None, "y": [1.5, True]}]}
    assert result(service, stepped) == found
    assert result(service, saved) == path
    for id in ("op-\ud800", "\0", "", "' OR 1=1 --"):
        with pytest.raises(ServiceError, match="there is no operation"):
            service.operation(id)


def test_a_ledger_with_an_older_name_of_a_column_goes_on(serve: Serve, tmp_path: Path) -> None:
    service = serve(remembered=5)
    model = new_model(service)
    for number in range(1, 9):
        result(service, service.run_pass(model, number, request(1, forward_only=True)))
    service.close()
    (path,) = tmp_path.rglob("ledger.sqlite")
    rows = sqlite3.connect(path, isolation_level=None)
    rows.execute("ALTER TABLE operation RENAME COLUMN queue TO lane")
    rows.close()
    service = serve(remembered=5)
    assert failure(service, service.run_pass(model, 1, request(1))).code == "late"
    assert result(service, service.run_pass(model, 9, request(1))).metrics


def test_the_state_of_an_earlier_release_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("{}\n")
    (tmp_path / "saves" / "state-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"the state of an earlier release.*; choose an empty --state-dir"):
        CoreService(InProcess(opened), tmp_path)
    assert (tmp_path / "saves" / "state-1").is_dir()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entry SET value='{}'",
        "UPDATE entry SET value='x'",
        "UPDATE operation SET mutates='text', ended=NULL",
        "UPDATE operation SET error='[', ended=NULL",
        "DROP TABLE operation; CREATE TABLE operation(id)",
        "DROP TABLE entry; CREATE TABLE entry(id)",
    ],
)
def test_a_ledger_with_other_contents_is_damaged(tmp_path: Path, statement: str) -> None:
    service = CoreService(InProcess(opened), tmp_path)
    model = new_model(service)
    result(service, service.run_pass(model, 1, request(1)))
    service.close()
    rows = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    rows.executescript(statement)
    rows.close()
    with pytest.raises(RegressError, match=r"ledger.sqlite is damaged .*; restore the file"):
        CoreService(InProcess(opened), tmp_path)


def test_a_ledger_whose_pages_are_overwritten_is_a_sentence(tmp_path: Path) -> None:
    service = CoreService(InProcess(opened), tmp_path)
    model = new_model(service)
    ids = [ended(service, service.run_pass(model, number, request(1))).id for number in range(1, 60)]
    service.close()
    file = tmp_path / "ledger.sqlite"
    whole = file.read_bytes()
    services: list[CoreService] = []
    for start in range(0, len(whole), 4096):
        file.write_bytes(whole[:start] + b"\xa5" * 4096 + whole[start + 4096 :])
        (tmp_path / "ledger.sqlite-wal").unlink(missing_ok=True)
        told = code(lambda _: services.append(CoreService(InProcess(opened), tmp_path)), "")
        for service in services:
            assert {code(service.operation, id) for id in ids} <= {None, "damaged_state"}
            service.close()
        assert services or told == "damaged_state"
        services.clear()
