"""Arrays of a request: from JSON lists, from bytes and from sparse rows, with bounds on what they expand to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regress.service.service_api import Array, Datum, ServiceError
from regress.service.wires.app_settings import Limits
from regress.service.wires.wire_protocol import shown_name

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}

TARGETS = "target_tokens"


def from_list(values: list[Any], dtype: np.dtype[Any], where: str) -> Array:
    """Return a nested list of numbers as an array of a dtype.

    Raises:
        ServiceError: rows differ in length, an element is not a number, or the dtype cannot hold it.
    """
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        raise ServiceError(f"{where} must be a list of numbers whose rows have one length") from None
    if found.size == 0:
        return np.zeros(found.shape, dtype)
    kinds = "iu" if dtype.kind == "i" else "iuf"
    if found.dtype.kind not in kinds:
        what = "integers" if dtype.kind == "i" else "numbers"
        raise ServiceError(f"{where} must be a list of {what}: {dtype} cannot hold every value")
    if dtype.kind == "i":
        bounds = np.iinfo(dtype)
        if int(found.min()) < bounds.min or int(found.max()) > bounds.max:
            raise ServiceError(f"{where} has integers that {dtype} cannot hold")
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def flat_from_list(values: list[Any], dtype: np.dtype[Any], where: str) -> Array:
    """Return a flat list of numbers as an array of a dtype; raises as `from_list`."""
    found = from_list(values, dtype, where)
    if found.ndim != 1:
        raise ServiceError(f"{where} must be a flat list of numbers")
    return found


def from_bytes(data: bytes, dtype: np.dtype[Any], shape: Sequence[int], where: str, limits: Limits) -> Array:
    """Return little-endian bytes as an array of a dtype and a shape."""
    size = shape_size(shape, where, limits)
    if len(data) != size * dtype.itemsize:
        raise ServiceError(
            f"{where} has {len(data)} bytes, but shape {list(shape)} of {dtype} takes {size * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(tuple(shape))


def from_rows(
    values: Array, row_starts: Array, columns: Array, shape: Sequence[int], where: str, limits: Limits
) -> Array:
    """Return sparse rows (CSR) as a dense ``[R, C]`` array; the bound is on the dense size.

    Args:
        values: ``[N]`` values.
        row_starts: ``[R + 1]`` int64, where the values of each row start.
        columns: ``[N]`` int64 column of each value.
        shape: R and C.
        where: name of the array in sentences.
        limits: bounds of a request.
    """
    if len(shape) != 2:
        raise ServiceError(f"{where} has sparse rows, but its shape {list(shape)[:8]} has not two dimensions")
    shape_size(shape, where, limits)
    rows, width = shape
    steps = np.diff(row_starts)
    if (
        len(row_starts) != rows + 1
        or row_starts[0] != 0
        or row_starts[-1] != len(values)
        or (steps < 0).any()
        or (steps > width).any()
    ):
        raise ServiceError(
            f"{where} has {rows} sparse rows, but its row starts do not cut its values into those"
        )
    if len(columns) != len(values) or (len(columns) and not 0 <= columns.min() <= columns.max() < width):
        raise ServiceError(f"{where} needs one column from 0 to {width - 1} for each of its sparse values")
    found = np.zeros((rows, width), values.dtype)
    found[np.repeat(np.arange(rows), steps), columns] = values
    return found


def datum_of(
    tokens: Array,
    inputs: dict[str, Array],
    where: str,
    datum_id: str | None = None,
    *,
    several: bool = False,
) -> Datum:
    """Return a datum whose arrays have the length of its tokens.

    Args:
        several: True if arrays may have a row for each token.

    Raises:
        ServiceError: an array has another length or number of dimensions, or a number that is not finite.
    """
    checked = {}
    for name, array in inputs.items():
        called = f"{where}.loss_fn_inputs.{shown_name(name)}"
        if array.ndim == 2 and array.shape[1] == 1 and not several:
            array = array[:, 0]
        if array.ndim != 1 and not (several and array.ndim == 2):
            raise ServiceError(
                f"{called} has shape {list(array.shape)}; one number for each token is supported"
            )
        if len(array) != len(tokens):
            raise ServiceError(
                f"{called} has {len(array)} numbers for {len(tokens)} tokens; send one for each"
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            place = int(np.argmin(np.isfinite(array)))
            raise ServiceError(f"{called} has {array.flat[place]} at position {place}; send finite numbers")
        checked[name] = array
    if TARGETS in checked:
        checked[TARGETS] = _token_ids(checked[TARGETS], f"{where}.loss_fn_inputs.{TARGETS}", ignored=-100)
    return Datum(tokens=tokens, inputs=checked, id=datum_id)


def tokens_of(pieces: Sequence[Array], where: str) -> Array:
    """Return the chunks of an input as ``[T]`` int64 token ids."""
    tokens = np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)
    if not len(tokens):
        raise ServiceError(f"{where} has no tokens; send one at least")
    return _token_ids(tokens, where)


def check_count(tensors: int, where: str, limits: Limits) -> None:
    """Refuse a datum of too many tensors."""
    if tensors > limits.tensors:
        raise ServiceError(f"{where} has {tensors} tensors, more than {limits.tensors}", code="too_large")


def check_total(data: Sequence[Datum], limits: Limits) -> None:
    """Refuse a request without datums, or with too many tokens."""
    if not data:
        raise ServiceError("the request has no data; send one datum at least")
    total = sum(max([len(datum.tokens), *(array.size for array in datum.inputs.values())]) for datum in data)
    if total > limits.tokens:
        raise ServiceError(
            f"the request has {total} tokens, more than {limits.tokens}; send it in parts", code="too_large"
        )


def shape_size(shape: Sequence[int], where: str, limits: Limits) -> int:
    """Return the number of elements of a shape, which the limits bound; raises `ServiceError` beyond them."""
    if len(shape) > 8 or any(not 0 <= size <= limits.tensor_elements for size in shape):
        raise ServiceError(f"""{where} has a shape of {len(shape)} dimensions or of sizes that are not from 0 to
        {limits.tensor_elements}""")
    size = math.prod(shape)
    if size > limits.tensor_elements:
        raise ServiceError(
            f"{where} has {size} elements, more than {limits.tensor_elements}; send smaller tensors",
            code="too_large",
        )
    return size


def _token_ids(tokens: Array, where: str, ignored: int | None = None) -> Array:
    if tokens.dtype.kind != "i":
        raise ServiceError(f"{where} is {tokens.dtype}; token ids are integers")
    wrong = (tokens < 0) & (tokens != ignored) if ignored is not None else tokens < 0
    if wrong.any():
        place = int(np.argmax(wrong))  # row after row
        besides = f", or {ignored} to leave a position out" if ignored is not None else ""
        raise ServiceError(
            f"{where} has {tokens.flat[place]} at position {place}; token ids are from 0{besides}"
        )
    return tokens.astype(np.int64)
