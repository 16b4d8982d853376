"""Part of a tensor on each rank; DTensors are covered by the split models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regress.layout import ShardLayout
from regress.parallel import parameter_shards
from regress.parallel.split_outputs import OutputPart

sizes = st.integers(0, 9)
counts = st.integers(1, 5)


def cut(whole: Tensor, count: int, index: int) -> Tensor:
    """Return a chunk as `torch.chunk` cuts it, with empty parts where that gives fewer."""
    parts = whole.chunk(count, dim=-1)
    return parts[index] if index < len(parts) else whole[..., :0]


@settings(deadline=None)
@given(sizes, counts, st.data())
def test_parts_are_those_of_chunk(size: int, count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, count - 1))
    whole = torch.arange(3 * size).reshape(3, size)
    layout = parameter_shards.part(ShardLayout.whole(whole.shape), 1, index=index, count=count)
    assert torch.equal(parameter_shards.project(layout, whole), cut(whole, count, index))


@settings(deadline=None)
@given(sizes, counts, counts, st.data())
def test_parts_of_parts(size: int, outer: int, inner: int, data: st.DataObject) -> None:
    """FSDP over tensor parallelism on one dimension."""
    first, second = data.draw(st.integers(0, outer - 1)), data.draw(st.integers(0, inner - 1))
    whole = torch.arange(2 * size).reshape(2, size)
    layout = parameter_shards.part(ShardLayout.whole(whole.shape), 1, index=first, count=outer)
    layout = parameter_shards.part(layout, 1, index=second, count=inner)
    assert torch.equal(parameter_shards.project(layout, whole), cut(cut(whole, outer, first), inner, second))


@settings(deadline=None)
@given(sizes, counts, st.data())
def test_fused_weights_are_cut_one_by_one(size: int, count: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, count - 1))
    pieces = [torch.arange(2 * size).reshape(2, size) + 100 * piece for piece in range(3)]
    layout = parameter_shards.part(ShardLayout.whole((2, 3 * size)), 1, index=index, count=count, fused=3)
    expected = torch.cat([cut(piece, count, index) for piece in pieces], dim=1)
    assert torch.equal(parameter_shards.project(layout, torch.cat(pieces, dim=1)), expected)
    assert np.array_equal(layout.project(torch.cat(pieces, dim=1).numpy()), expected.numpy())


def test_a_plain_tensor_is_whole() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).requires_grad_()
    assert parameter_shards.of(tensor).is_whole
    copy = parameter_shards.like(tensor, torch.ones(2, 3, dtype=torch.float64))
    assert (copy.dtype, copy.shape) == (torch.float32, (2, 3))
    assert parameter_shards.like(tensor, torch.ones(3, 2).t()).is_contiguous()
    parameter_shards.local(tensor).zero_()
    assert not tensor.any()


def test_outputs_of_equal_parts() -> None:
    layout = OutputPart(-1, index=1, count=2, fused=3).layout((4, 6))
    assert layout == ShardLayout((4, 12), (((0, 4),), ((2, 4), (6, 8), (10, 12))))
    assert OutputPart(1, index=0, count=4).layout((2, 3, 5)) == ShardLayout(
        (2, 12, 5), (((0, 2),), ((0, 3),), ((0, 5),))
    )


def test_outputs_of_unequal_parts() -> None:
    part = OutputPart(-1, index=3, count=4, size=14)
    assert part.layout((1, 7, 2)) == ShardLayout((1, 7, 14), (((0, 1),), ((0, 7),), ((12, 14),)))
    with pytest.raises(
        ValueError, match=r"^an output of shape \[1, 7, 4\] is not part 3 of 4 of a dimension of 14$"
    ):
        part.layout((1, 7, 4))
