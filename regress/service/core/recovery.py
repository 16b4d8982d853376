"""Start of a service where an earlier one has ended, by whatever end."""

from __future__ import annotations

from collections import defaultdict

from regress.service.api import ServiceError
from regress.service.core.lane import Known
from regress.service.core.ledger import ModelEntry, OperationEntry
from regress.service.core.records import packed_error
from regress.service.core.state import State

_STOPPED = "the service stopped"


def recover(state: State) -> None:
    """Fail every operation that was under way or whose effect is in no save, and queue what comes next.

    Models go on from their last save. Nothing is executed again.
    """
    ledger = state.ledger
    under_way = [entry for entry in ledger.operations.values() if entry.ok is None]
    for model in list(ledger.models.values()):
        if not model.closed:
            _recover_model(state, model, [entry for entry in under_way if entry.lane == model.id])
    for entry in under_way:
        if entry.ok is None:
            _fail(state, entry, f"{_named(entry)} was not executed to its end when {_STOPPED}; send it again")
    state.store.clean(ledger.folders)
    _lanes(state)
    state.compact()


def _recover_model(state: State, model: ModelEntry, under_way: list[OperationEntry]) -> None:
    lost = [state.ledger.operations[id] for id in model.unsaved if id in state.ledger.operations]
    failed = any(entry.mutates for entry in under_way)
    state.roll_back(model, _STOPPED, failed=failed)
    for entry in under_way:
        _fail(state, entry, f"{_named(entry)} was not executed to its end when {_STOPPED}; {model.stands}")
    for entry in lost:
        _fail(state, entry, f"the effect of {_named(entry)} was lost when {_STOPPED}; {model.stands}")


def _fail(state: State, entry: OperationEntry, sentence: str) -> None:
    error = ServiceError(sentence, code="restarted", category="server")
    state.ledger.apply({"is": "ended", "id": entry.id, "ok": False, "error": packed_error(error)})


def _named(entry: OperationEntry) -> str:
    number = "" if entry.seq is None else f" of seq_id {entry.seq}"
    return f"{entry.kind}{number}"


def _lanes(state: State) -> None:
    """Make the queues of all models and samplers that are open, with the numbers that were spent."""
    numbers: dict[str, list[OperationEntry]] = defaultdict(list)
    for entry in state.ledger.operations.values():
        if entry.seq is not None:
            numbers[entry.lane].append(entry)
    for model in state.ledger.models.values():
        if model.closed:
            continue
        lane = state.lane(model.id)
        for entry in numbers[model.id]:
            lane.spend(entry.seq or 0, Known(entry.id, entry.digest))
    for sampler in state.ledger.samplers:
        state.lane(sampler)
