"""Saves of a service: their names, kinds and number, and a full disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from service_calls import failure, new_model, result
from service_double import PARAMS, HistoryHost, request

from regress.service.core.training_service import CoreService
from regress.service.service_api import SamplingRequest, SaveKind, ServiceError

Serve = Callable[..., CoreService]


def test_gradients_and_names_of_saves(serve: Serve) -> None:
    service = serve()
    model = new_model(service)
    result(service, service.run_pass(model, 1, request(3)))
    error = failure(service, service.save(model, 2, "early", SaveKind.STATE))
    assert error.code == "pending_gradients"
    assert "has gradients of 1 passes since its last optimizer step, which no save keeps" in str(error)
    assert result(service, service.save(model, None, "early", SaveKind.SAMPLER)).step == 0
    result(service, service.optim_step(model, 3, PARAMS))
    saved = result(service, service.save(model, 4, "kept", SaveKind.STATE))
    assert (saved.path, saved.step) == (f"{model}/state/kept", 1)
    assert failure(service, service.save(model, 5, "kept", SaveKind.STATE)).code == "exists"
    assert result(service, service.save(model, 6, "kept", SaveKind.STATE, overwrite=True)) == saved
    assert list(service.saves(model))[1:] == [saved]
    for number, name in enumerate(("_x", "_", "__init__.x", "x" * 128), 7):  # whatever the wires let through
        own = result(service, service.save(model, number, name, SaveKind.STATE))
        assert (own.name, own.path) == (name, f"{model}/state/{name}")
    for name in ("../x", "a/b", "", ".hidden", "-x", "x" * 129, "a\0"):
        with pytest.raises(ServiceError, match="is not a name of a save"):
            service.save(model, None, name, SaveKind.STATE)
    for path in ("../../etc", f"{model}/state/../state/kept", "/etc/passwd", f"{model}/state/other"):
        assert failure(service, service.load(model, None, path, optimizer=True)).code == "not_found"


def test_saves_without_a_name_are_kept_for_the_newest(serve: Serve, tmp_path: Path) -> None:
    service = serve(unnamed=2)
    model = new_model(service)
    paths = [result(service, service.save(model, seq, None, SaveKind.SAMPLER)).path for seq in (1, 2, 3)]
    named = result(service, service.save(model, 4, "stays", SaveKind.SAMPLER)).path
    assert [saved.path for saved in service.saves(model)] == [*paths[1:], named]
    assert len(list((tmp_path / "state" / "saves").iterdir())) == 3


def test_models_of_saves_and_kinds_of_saves(serve: Serve) -> None:
    service = serve()
    model = new_model(service)
    session = model.split(":")[0]
    result(service, service.run_pass(model, 1, request(3)))
    result(service, service.optim_step(model, 2, PARAMS))
    weights = result(service, service.save(model, 3, "w", SaveKind.WEIGHTS))
    sampler = result(service, service.save(model, 4, "s", SaveKind.SAMPLER))
    info = result(service, service.create_model_from(session, 2, weights.path, optimizer=False))
    assert (info.model_id, info.step) == (f"{session}:train:2", 1)
    for path, optimizer, text in [
        (weights.path, True, "has no optimizer state; load its weights alone"),
        (sampler.path, False, "is a save for samplers, which no training goes on from"),
    ]:
        assert text in str(failure(service, service.load(model, None, path, optimizer=optimizer)))
    found = service.create_sampler(session, 1, path=sampler.path, base_model=None)
    assert found == service.create_sampler(session, 1, path=sampler.path, base_model=None)
    assert result(service, service.sample(found, SamplingRequest(np.array([1])))).step == 1
    with pytest.raises(ServiceError, match="exists with other weights"):
        service.create_sampler(session, 1, path=weights.path, base_model=None)
    with pytest.raises(ServiceError, match="there is no save"):
        service.create_sampler(session, 2, path="../x", base_model=None)


def test_a_full_disk_fails_the_save_and_leaves_the_earlier_ones(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    model = new_model(service)
    saved = result(service, service.save(model, 1, "kept", SaveKind.STATE))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(HistoryHost, "save", full)
        error = failure(service, service.save(model, 2, "lost", SaveKind.STATE))
    assert error.code == "storage_full"
    assert str(error).startswith("the disk of the service is full; earlier saves are valid")
    assert [entry.name for entry in service.saves(model)] == ["kept"]
    assert len(list((tmp_path / "state" / "saves").iterdir())) == 1
    assert result(service, service.load(model, 3, saved.path, optimizer=True)) == saved
