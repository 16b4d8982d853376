"""Ranks on a mesh: a bijection with coordinates, and groups that are partitions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.layout import DIMENSIONS, Mesh

EXTENTS = st.permutations([1, 1, 1, 2, 3, 4])


def mesh_of(sizes: list[int]) -> Mesh:
    return Mesh(**dict(zip(DIMENSIONS, sizes, strict=True)))


@settings(deadline=None)
@given(EXTENTS)
def test_rank_and_coordinates_are_one(sizes: list[int]) -> None:
    mesh = mesh_of(sizes)
    assert [mesh.rank_of(**mesh.coordinates(rank)) for rank in range(mesh.world_size)] == [
        *range(mesh.world_size)
    ]


@settings(deadline=None)
@given(EXTENTS, st.sets(st.sampled_from(DIMENSIONS)))
def test_groups_are_a_partition(sizes: list[int], dimensions: set[str]) -> None:
    mesh = mesh_of(sizes)
    groups = {mesh.group(rank, *dimensions) for rank in range(mesh.world_size)}
    assert sorted(rank for group in groups for rank in group) == [*range(mesh.world_size)]
    for rank in range(mesh.world_size):
        assert rank in mesh.group(rank, *dimensions)


@settings(deadline=None)
@given(EXTENTS)
def test_ranks_of_one_share_differ_in_nothing_that_splits_samples(sizes: list[int]) -> None:
    mesh = mesh_of(sizes)
    for rank in range(mesh.world_size):
        same = {r for r in range(mesh.world_size) if mesh.data_index(r) == mesh.data_index(rank)}
        assert same == set(mesh.group(rank, "pp", "cp", "tp"))
    assert {mesh.data_index(rank) for rank in range(mesh.world_size)} == {*range(mesh.data_size)}


def test_neighbours_are_of_one_tensor_parallel_group() -> None:
    """As in Megatron and torchtitan: the ranks that talk most are next to each other."""
    assert Mesh(pp=2, dp=2, tp=2).group(0, "tp") == (0, 1)
    assert Mesh(pp=2, dp=2, tp=2).group(0, "pp") == (0, 4)


@pytest.mark.parametrize("name", DIMENSIONS)
def test_no_extent_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^parallel\.{name}=0 is not a number of ranks; give 1 or more$"):
        Mesh(**{name: 0})


def test_a_mesh_in_words() -> None:
    assert (str(Mesh(dp=2, tp=4)), str(Mesh())) == ("dp2-tp4", "one rank")


def test_a_rank_outside() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of the 2 ranks of dp2"):
        Mesh(dp=2).coordinates(2)
