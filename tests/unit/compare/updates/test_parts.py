"""Ranks that split a model: parts of their own hold, copies of the whole model are told, and doubt is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regress.compare.updates.invariant_counts import Checked
from regress.compare.updates.model_parts import SPLIT, check_parts
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.layout import Mesh

CONFIG = {"debug": {"target_param_pattern": ".*"}}
NAMES = ("embed", "expert", "norm")


def records(mesh: Mesh, made: frozenset[str]) -> list[Record]:
    """Gradients of every rank, split along the dimensions that are made; ``norm`` is whole on all."""
    found = []
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        record_type = place["pp"] if "pp" in made else 0
        names = [f"{name}.{record_type}" for name in NAMES]
        split = {name: place[name] for name in sorted(made - {"pp", "ep"})}
        shards: dict[str, Any] = {names[0]: split} if split else {}
        if "ep" in made:
            shards[names[1]] = {"ep": place["ep"]}
        tensors = {name: np.zeros(1) for name in names}
        found.append(Record.of("gradient", Coordinates(0, rank=rank), tensors, {"shards": shards}))
    return found


def checked(found: list[Record], mesh: Mesh, config: dict[str, Any] = CONFIG) -> Checked:
    known = Checked()
    check_parts(known, found, mesh, config)
    return known


meshes = st.builds(Mesh, **{name: st.integers(1, 3) for name in (*SPLIT, "dp", "cp")})


@given(mesh=meshes, made=st.frozensets(st.sampled_from(SPLIT)))
def test_each_dimension_is_told_that_was_not_split(mesh: Mesh, made: frozenset[str]) -> None:
    known = checked(records(mesh, made), mesh)
    asked = [name for name in SPLIT if mesh.sizes[name] > 1]
    assert known.count == len(asked)
    missing = [name for name in asked if name not in made]
    assert [one.where.rpartition(".")[2] for one in known.broken] == missing
    assert [(one.expected, one.actual) for one in known.broken] == [(mesh.sizes[name], 1) for name in missing]


def test_one_copy_among_parts_is_told() -> None:
    mesh = Mesh(tp=3)
    found = records(mesh, frozenset({"tp"}))
    found[2].meta["shards"] = found[1].meta["shards"]
    (broken,) = checked(found, mesh).broken
    assert (broken.expected, broken.actual) == (3, 2)
    assert broken.where == "the number of ranks with a part of their own along parallel.tp"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"debug": {"target_param_pattern": "norm"}},
    ],
)
def test_nothing_is_told_unless_all_parameters_were_recorded(config: dict[str, Any]) -> None:
    assert not checked(records(Mesh(ep=2), frozenset()), Mesh(ep=2), config).count


def test_nothing_is_told_of_adapters_beside_frozen_parameters() -> None:
    mesh = Mesh(pp=2)
    found = records(mesh, frozenset())
    for one in found:
        one.tensors["layers.0.q_proj.lora_A.weight"] = np.zeros(1)
    assert not checked(found, mesh).count


def test_a_stage_whose_parameters_are_frozen_is_no_copy() -> None:
    mesh = Mesh(pp=3)
    found = records(mesh, frozenset({"pp"}))
    found[1].tensors.clear()
    assert not checked(found, mesh).broken


def test_nothing_is_told_of_ranks_that_recorded_nothing() -> None:
    mesh = Mesh(fsdp=2)
    assert not checked(records(mesh, frozenset())[:1], mesh).count
    assert not checked([], mesh).count
