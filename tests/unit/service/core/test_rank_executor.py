"""Ranks of a service: one that dies, hangs or disagrees fails its operation by name, and the service goes on."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import service_double
from launched_ranks import launched
from service_calls import PROCESSES, failure, new_model, result
from service_double import PARAMS, request

from regress.errors import RegressError
from regress.service.core.rank_executor import RankExecutor
from regress.service.core.service_limits import Limits
from regress.service.core.training_service import CoreService
from regress.service.service_api import SaveKind

MODULES = ("torch", "torch.distributed", "regress.parallel.launch.forked_rank", "service_double")
TIMEOUT = 3.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoreService]:
    executor = RankExecutor(partial(service_double.opened), 2, modules=MODULES)
    limits = Limits(operation_timeout=TIMEOUT)
    found = CoreService(executor, tmp_path_factory.mktemp("ranks") / "state", limits)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("does", "sentence"),
    [
        ("dies", "rank 1 of 2 was ended by SIGKILL"),
        pytest.param("hangs", "rank 1 of 2 hangs, it did not answer within", marks=pytest.mark.extended),
        pytest.param(
            *("disagrees", "rank 1 of 2 failed (only here) in run_pass, and rank 0 succeeded otherwise"),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_rank_that_fails_is_named_and_its_model_restored(
    service: CoreService, does: str, sentence: str
) -> None:
    model = new_model(service)
    result(service, service.run_pass(model, 1, request(3)))
    result(service, service.optim_step(model, 2, PARAMS))
    saved = result(service, service.save(model, 3, "before", SaveKind.STATE))
    error = failure(service, service.run_pass(model, 4, request(5, rank=1, rank_does=does)))
    assert error.code == "rank_failed"
    assert sentence in str(error)
    assert f"{model} stands at step 1, its save {saved.path}" in str(error)
    assert failure(service, service.optim_step(model, 5, PARAMS)).code == "interrupted"
    assert result(service, service.load(model, 6, saved.path, optimizer=True)) == saved
    assert result(service, service.run_pass(model, 7, request(4))).metrics["loss:sum"] == 7
    assert result(service, service.optim_step(model, 8, PARAMS)).step == 2
    assert service.health()["status"] == "ok"


@pytest.mark.extended
def test_a_model_that_lost_nothing_goes_on_after_another_ended_the_ranks(service: CoreService) -> None:
    model, other = new_model(service), new_model(service)
    result(service, service.run_pass(model, 1, request(3)))
    result(service, service.optim_step(model, 2, PARAMS))
    result(service, service.save(model, 3, "kept", SaveKind.STATE))
    failure(service, service.run_pass(other, 1, request(1, rank=1, rank_does="dies")))
    assert result(service, service.run_pass(model, 4, request(4))).metrics["loss:sum"] == 7


@pytest.mark.extended
def test_ranks_that_cannot_open_their_host_are_named(tmp_path: Path) -> None:
    executor = RankExecutor(partial(service_double.broken), 2, modules=MODULES)
    with pytest.raises(
        RegressError, match=r"the ranks of the service do not start: rank . of 2 raised .*no model"
    ):
        CoreService(executor, tmp_path / "state")
    executor.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("does", "sentence"),
    [
        ("hangs", r"run_pass failed: rank 1 of 2 hangs, it did not answer within 2 s"),
        pytest.param(
            *("dies", r"run_pass failed: rank 1 of 2 was lost \(.*\); see what the launcher printed"),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_rank_of_a_launcher_is_named(does: str, sentence: str) -> None:
    """Ranks that can still answer tell whom they wait for."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here, there = PROCESSES.Pipe()
    ranks = [
        PROCESSES.Process(target=launched, args=[rank, port, does, there], daemon=True) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    assert here.poll(60), "no rank has told anything"
    told, code = here.recv()
    for process in ranks:
        process.kill()
        process.join()
    assert re.fullmatch(sentence, told), told
    assert code == "rank_failed"
