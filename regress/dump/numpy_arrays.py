"""Tensors as numpy arrays: one table of element types, copies that share nothing, torch only if loaded.

bfloat16 and the 8-bit floats live in numpy through ml_dtypes, so that reading a dump needs no torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from regress.errors import DumpError

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
"""Element types a dump can hold, by the name that numpy, torch and ml_dtypes agree on."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FLOATS = {dtype for name, dtype in DTYPES.items() if "float" in name}
_CARRIERS = {1: "uint8", 2: "int16"}  # torch and numpy exchange types that numpy lacks as bits of this type


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return True if `dtype` has a NaN (numpy files most ml_dtypes types under its kind for unknown types)."""
    return dtype in _FLOATS


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of an element type; numpy builds it anew each time, at the cost of copying a small tensor."""
    return _NAMES.get(dtype) or dtype.name


def to_numpy(value: Any, name: str) -> Array:
    """Copy a torch tensor, a numpy array or a number into a new contiguous little-endian array.

    The copy is detached and on the CPU; nothing the caller does later reaches it. Raises `DumpError` naming
    `name` when the value has no element type that every dump format can hold.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value, name)
    if not isinstance(value, np.ndarray | np.generic | bool | int | float):
        raise DumpError(f"""tensor {name!r} is a {type(value).__name__}, but a dump holds tensors and numbers: convert
        it to a tensor, or pass it in meta""")
    array = np.array(value, order="C", copy=True)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    _check_dtype(dtype_name(array.dtype), name)
    return array


def _from_torch(tensor: torch.Tensor, name: str) -> Array:
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    _check_dtype(dtype, name)
    _check_held(tensor, name)
    if tensor.layout != torch.strided:
        raise DumpError(f"tensor {name!r} is sparse, but a dump holds dense tensors: call to_dense() on it")
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    copy.copy_(tensor.detach())
    described = DTYPES[dtype]
    if is_float(described) and not hasattr(np, dtype):
        carrier = getattr(torch, _CARRIERS[described.itemsize])
        viewed: Array = copy.view(carrier).numpy().view(described)
        return viewed
    plain: Array = copy.numpy()
    return plain


def _check_held(tensor: torch.Tensor, name: str) -> None:
    """Refuse tensors whose values this process does not hold."""
    distributed = sys.modules.get("torch.distributed.tensor")  # loaded if a DTensor exists
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise DumpError(
            f"tensor {name!r} is a DTensor, of which this rank holds a part: tap its to_local() with its shard layout "
            'in meta["shards"], or its full_tensor(), or let regress.record() do it'
        )
    if tensor.is_meta:
        raise DumpError(
            f"tensor {name!r} is on the meta device, where tensors have no values: tap it after it was materialized"
        )


def to_torch(array: Array) -> torch.Tensor:
    """Return the tensor of the same element type and bits; it shares memory with a writable `array`."""
    import torch

    if not array.flags.writeable:
        array = array.copy()
    dtype = dtype_name(array.dtype)
    if is_float(array.dtype) and not hasattr(np, dtype):
        return torch.from_numpy(array.view(_CARRIERS[array.dtype.itemsize])).view(getattr(torch, dtype))
    return torch.from_numpy(array)


def raw(array: Array) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def canonical_nans(array: Array) -> Array:
    """Return the values with every NaN in its default bit pattern: text formats cannot carry NaN payloads."""
    if not is_float(array.dtype):
        return array
    with np.errstate(invalid="ignore"):  # signaling NaNs raise the processor's flag when read
        nan = np.isnan(array)
    if not nan.any():
        return array
    array = array.copy()
    array[nan] = np.asarray(np.nan, dtype=np.float64).astype(array.dtype)
    return array


def _check_dtype(dtype: str, name: str) -> None:
    if dtype not in DTYPES:
        raise DumpError(f"""tensor {name!r} has element type {dtype}, but a dump holds only {", ".join(DTYPES)}: convert
        it before the tap""")
