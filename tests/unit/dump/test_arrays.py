"""Copies of live tensors: same bits, own memory, every element type or a clear refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from regress.dump.numpy_arrays import DTYPES, to_numpy, to_torch
from regress.errors import DumpError


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_torch_there_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=getattr(torch, dtype))
    array = to_numpy(tensor, "x")
    assert (array.dtype, array.shape) == (DTYPES[dtype], shape)
    assert np.all(array.astype(np.float64) == 1)
    again = to_torch(array)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(again.double(), tensor.double())


def test_copy_is_detached_from_what_follows() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    array = np.zeros(3)
    copies = [to_numpy(weight, "w"), to_numpy(array, "a")]
    with torch.no_grad():
        weight += 1
    array += 1
    assert all((copy == 0).all() for copy in copies)


def test_views_become_contiguous() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view in (base.t(), base[:, ::2], base[1].expand(5, 4), torch.tensor(1.0 + 2j).conj().imag):
        copy = to_numpy(view, "v")
        assert copy.flags.c_contiguous
        assert copy.tolist() == view.tolist()
    assert to_numpy(np.arange(6).reshape(2, 3).T, "v").flags.c_contiguous


def test_big_endian_becomes_little() -> None:
    copy = to_numpy(np.array([1.5, -2.0], ">f4"), "x")
    assert copy.dtype.newbyteorder("<").str == copy.dtype.str == "<f4"
    assert copy.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("value", "dtype"), [(True, "bool"), (3, "int64"), (0.5, "float64"), (np.float32(1), "float32")]
)
def test_numbers(value: Any, dtype: str) -> None:
    copy = to_numpy(value, "x")
    assert (copy.dtype.name, copy.shape, copy.item()) == (dtype, (), value)


def test_inference_tensors_are_copied() -> None:
    with torch.inference_mode():
        copy = to_numpy(torch.ones(2), "x")
    copy += 1
    assert copy.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "tensor 'x' is a str"),
        ([1, 2], "tensor 'x' is a list"),
        (None, "tensor 'x' is a NoneType"),
        (np.array(["a"]), "element type str"),
        (np.array([None]), "element type object"),
        (torch.zeros(2, dtype=torch.complex64), "element type complex64"),
        (torch.eye(2).to_sparse(), "is sparse"),
    ],
)
def test_refusals(value: Any, reason: str) -> None:
    with pytest.raises(DumpError, match=reason):
        to_numpy(value, "x")
