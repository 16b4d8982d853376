"""Shapes of the journal's records, by what each is: another process reads what this one has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, NotRequired, TypedDict

from regress.schema import conform
from regress.service.api import ModelInfo, ModelSpec, OptimResult, Saved
from regress.service.core.journal import Record
from regress.service.core.records import unpacked_result, unpacked_spec


class _Id(TypedDict):
    id: str


class _Path(TypedDict):
    path: str


class _Session(_Id):
    metadata: dict[str, Any]
    key: NotRequired[str | None]


class _Accepted(_Id):
    lane: str
    kind: str
    seq: int | None
    digest: str
    mutates: bool
    number: NotRequired[int | None]


class _Error(TypedDict):
    message: str
    code: str
    category: Literal["user", "server"]
    retryable: bool


class _Ended(_Id):
    ok: bool
    error: NotRequired[_Error | None]
    result: NotRequired[dict[str, Any] | None]


class _Created(_Id):
    session: str
    origin: dict[str, Any]
    info: dict[str, Any]


class _OfSave(TypedDict):
    folder: str
    optimizer: bool


class _Saved(_Path):
    saved: dict[str, Any]
    folder: str
    named: bool


class _Point(_Id, _OfSave):
    step: int
    name: str


class _Restored(_Id):
    step: int
    interrupted: str | None


class _Sampler(_Id):
    session: str
    path: str | None
    base_model: str | None
    folder: str | None


_SHAPES: Mapping[str, Any] = {
    "session": _Session,
    "session_finished": _Id,
    "accepted": _Accepted,
    "ended": _Ended,
    "created": _Created,
    "model_closed": _Id,
    "saved": _Saved,
    "save_removed": _Path,
    "point": _Point,
    "restored": _Restored,
    "sampler": _Sampler,
    "sampler_closed": _Id,
}


def conform_record(record: Record) -> Record:
    """Return a record that is what it says it is; raises `ValueError` with a clause for another."""
    kind = record.get("is")
    if not isinstance(kind, str) or kind not in _SHAPES:
        raise ValueError(f"a record is {str(kind)[:40]!r}, which no journal has")
    conform(record, _SHAPES[kind], "the record")
    if kind == "created":
        _result(record["info"], ModelInfo)
        if "folder" in record["origin"]:
            conform(record["origin"], _OfSave, "its origin")
        else:
            _spec(record["origin"].get("spec"))
    elif kind == "saved":
        _result(record["saved"], Saved)
    elif kind == "ended" and record.get("result") is not None:
        _result(record["result"], ModelInfo, OptimResult, Saved)
    return record


def _result(packed: Mapping[str, Any], *kinds: type) -> None:
    """Refuse what is no packed result of a kind; fields that an earlier release had not are filled in first."""
    try:
        found = unpacked_result(packed)
        values: Mapping[str, Any] = asdict(found) | (
            {"kind": found.kind.value} if isinstance(found, Saved) else {}
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its result has other fields ({error})") from error
    if type(found) not in kinds:
        raise ValueError(f"its result is one of {packed['type']}")
    conform(values, type(found), "its result")


def _spec(packed: Any) -> None:
    try:
        found = unpacked_spec(packed)
        values = asdict(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its origin has other fields ({error})") from error
    conform(values, ModelSpec, "its origin")
