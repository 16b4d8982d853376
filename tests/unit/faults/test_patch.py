"""Faults come and go: the engine is broken inside, and as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from regress.engine import build, optim, passes, policy, step, trainer
from regress.engine.attention import VarlenSegments
from regress.engine.batch import Microbatch, TokenBatch
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.faults.corpus import CORPUS
from regress.faults.patch import Fault
from regress.grpo import advantages, estimators, logprobs, losses
from regress.grpo.fields import ObjectiveFields

PLACES = (
    *(build, optim, passes, policy, step, trainer, advantages, estimators, logprobs, losses),
    *(VarlenSegments, Microbatch, TokenBatch, LocalPolicy, Trainer, ObjectiveFields),
)


def attributes() -> dict[tuple[str, str], Any]:
    return {(place.__name__, name): value for place in PLACES for name, value in vars(place).items()}


@pytest.mark.parametrize("fault", [fault for fault in CORPUS if fault.code], ids=lambda fault: fault.name)
def test_a_fault_changes_the_engine_while_it_lasts(fault: Fault) -> None:
    before = attributes()
    with fault.injected() as prepare:
        assert prepare is None
        changed = [key for key, value in attributes().items() if before[key] is not value]
    assert changed, "nothing that is looked at here"
    assert all(before[key] is value for key, value in attributes().items())


def test_it_is_over_after_an_error() -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError), CORPUS[0].injected():
        raise ZeroDivisionError
    assert all(before[key] is value for key, value in attributes().items())


def test_faults_of_a_run_prepare_it() -> None:
    faults = [fault for fault in CORPUS if fault.run]
    assert faults
    for fault in faults:
        with fault.injected() as prepare:
            assert prepare is fault.run


def test_the_corpus_can_be_told_apart() -> None:
    assert len({fault.name for fault in CORPUS}) == len(CORPUS) >= 40
    assert sum(fault.small for fault in CORPUS) >= 20
    assert all("_" not in fault.name for fault in CORPUS)
