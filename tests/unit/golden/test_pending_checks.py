"""Proposals for stored checks: file by file, whole or not at all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.dump.coordinates import Coordinates
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.errors import GoldenError
from regress.golden import GoldenStore
from regress.golden.pending_checks import (
    accept_checks,
    check_change,
    pending_checks,
    propose_check,
    reject_checks,
)

NAME = "checks/test_a/loss-1.safetensors"
OTHER = "checks/test_b/loss.safetensors"


def encoded(value: float) -> bytes:
    record = Record.of("loss", Coordinates(0), {"value": np.full(3, value)})
    return b"".join(FORMATS["safetensors"].encode(record))


@pytest.fixture
def store(tmp_path: Path) -> GoldenStore:
    (tmp_path / "golden").mkdir()
    return GoldenStore(tmp_path / "golden")


def put(store: GoldenStore, name: str, value: float) -> None:
    (store.root / name).parent.mkdir(parents=True, exist_ok=True)
    (store.root / name).write_bytes(encoded(value))


def test_new_and_changed(store: GoldenStore) -> None:
    put(store, OTHER, 1.0)
    assert propose_check(store, NAME, [encoded(1.0)]) == store.root / ".pending" / NAME
    propose_check(store, OTHER, [encoded(4.0)])
    assert pending_checks(store) == [NAME, OTHER]
    assert check_change(store, NAME).status == "new"
    change = check_change(store, OTHER)
    assert (change.status, change.max_error, change.relative) == ("changed", 3.0, 3.0)
    assert not (store.root / NAME).exists()
    assert accept_checks(store, ["*test_b*"]) == [store.root / OTHER]
    assert (store.root / OTHER).read_bytes() == encoded(4.0)
    assert pending_checks(store) == [NAME]
    assert reject_checks(store) == [NAME]
    assert list(store.root.rglob("*")) == [
        store.root / "checks",
        store.root / "checks/test_b",
        store.root / OTHER,
    ]


def test_a_later_proposal_replaces_an_earlier_one(store: GoldenStore) -> None:
    for value in (1.0, 2.0):
        propose_check(store, NAME, [encoded(value)])
    accept_checks(store)
    assert (store.root / NAME).read_bytes() == encoded(2.0)


def test_a_check_that_changed_since(store: GoldenStore, content: Any) -> None:
    put(store, NAME, 1.0)
    propose_check(store, NAME, [encoded(2.0)])
    propose_check(store, OTHER, [encoded(2.0)])
    put(store, NAME, 3.0)
    before = content(store.root)
    with pytest.raises(
        GoldenError, match=r"loss-1\.safetensors was changed since its update was proposed: reject"
    ):
        accept_checks(store)
    assert content(store.root) == before, "not even the other one"
    put(store, NAME, 2.0)
    accept_checks(store)
    assert pending_checks(store) == []


def test_a_check_that_was_stored_although_it_had_been_new(store: GoldenStore) -> None:
    propose_check(store, NAME, [encoded(2.0)])
    put(store, NAME, 3.0)
    with pytest.raises(GoldenError, match="was changed since"):
        accept_checks(store)


@pytest.mark.parametrize("damage", ["file", "note", "gone"])
def test_damage(store: GoldenStore, damage: str, content: Any) -> None:
    propose_check(store, NAME, [encoded(2.0)])
    path = store.root / ".pending" / NAME
    if damage == "file":
        path.write_bytes(encoded(3.0))
    elif damage == "note":
        path.with_name(path.name + ".json").write_text("{}")
    else:
        path.unlink()
    before = content(store.root)
    for attempt in (lambda: accept_checks(store), lambda: check_change(store, NAME)):
        with pytest.raises(GoldenError, match=re.escape(f"{path}.json is damaged")) as caught:
            attempt()
        assert str(caught.value).endswith("reject it with regress golden reject checks")
    assert content(store.root) == before
    assert reject_checks(store) == [NAME]
    assert list(store.root.iterdir()) == []


def test_a_killed_writer_leaves_no_proposal(store: GoldenStore) -> None:
    path = store.root / ".pending" / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(encoded(1.0))
    assert pending_checks(store) == []
    with pytest.raises(GoldenError, match="is no pending change: see regress golden review"):
        check_change(store, NAME)


def test_a_pattern_that_matches_nothing(store: GoldenStore) -> None:
    propose_check(store, NAME, [encoded(1.0)])
    for verb in (accept_checks, reject_checks):
        with pytest.raises(GoldenError, match=rf"no pending check matches 'x\*': pending are {NAME}"):
            verb(store, ["x*"])
    reject_checks(store)
    with pytest.raises(GoldenError, match="pending are none"):
        accept_checks(store, ["x"])


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "checks/../x.safetensors", "/x.safetensors", "checks/x.pt", "x", ""]
)
def test_names_that_no_check_can_have(store: GoldenStore, name: str) -> None:
    with pytest.raises(GoldenError, match="is no stored check"):
        propose_check(store, name, [b"x"])
    assert list(store.root.iterdir()) == []
