"""Values of any shape as flat trees: nested dicts, lists and tables, flattened to leaves with one path each.

Nothing is rounded and nothing guessed: a value that cannot be kept bit for bit is refused. Only libraries
that the caller has already loaded are used, so that a check of a number needs no torch and no pandas.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from regress.dump.numpy_arrays import Array, to_numpy
from regress.errors import CheckError, DumpError

Node: TypeAlias = tuple[str, str]
"""Kind and content: `("dict", "")`, `("text", "abc")`, `("tensor", "")`."""

TENSOR: Node = ("tensor", "")
CONTAINERS = ("dict", "list", "table", "series", "index", "column")
ROOT = "value"

_DEPTH = 64
_LONGEST = 1000  # characters of a tensor name that every dump format can hold
_INT64 = range(-(2**63), 2**63)
_Leaf: TypeAlias = tuple[str, Node, "Array | None"]


@dataclass(frozen=True)
class Tree:
    """Flattened value.

    Attributes:
        nodes: node at each path (`value['loss'][0]`), containers before what they contain.
        tensors: the array at each path whose node is `TENSOR`. A Python number is one: float64, int64 or bool, 0-d.
    """

    nodes: dict[str, Node]
    tensors: dict[str, Array]

    @classmethod
    def of(cls, value: Any) -> Tree:
        """Flatten a value; every array is copied.

        Tensors, arrays and numbers are the same kind of leaf; lists and tuples are the same kind of
        container. Keys of dicts are texts or integers. Tables and series are those of pandas: labels, index,
        dtypes and every cell.

        Raises `CheckError` naming the path of what cannot be kept bit for bit.
        """
        nodes: dict[str, Node] = {}
        tensors: dict[str, Array] = {}
        for path, node, array in _walk(value, ROOT, 0):
            nodes[path] = node
            if array is not None:
                tensors[path] = array
        return cls(nodes, tensors)


def describe(node: Node) -> str:
    """Return a node in words, such as `a dict` or `the text 'abc'`."""
    kind, content = node
    if kind in ("text", "integer"):
        return f"the {kind} {content!r}" if kind == "text" else f"the integer {content}"
    if kind == "column":
        return f"a column of dtype {content}"
    return {"none": "None", "missing": "a missing value", "series": "a series"}.get(kind, f"a {kind}")


def _walk(value: Any, path: str, depth: int) -> Iterator[_Leaf]:
    if depth > _DEPTH:
        raise CheckError(f"{ROOT} is nested deeper than {_DEPTH} levels: flatten it before the check")
    if value is None:
        yield path, ("none", ""), None
    elif isinstance(value, str):
        yield path, ("text", str(value)), None
    elif type(value) is int and value not in _INT64:
        yield path, ("integer", str(value)), None
    elif isinstance(value, Mapping):
        yield path, ("dict", ""), None
        for key in sorted(value, key=lambda key: (str(type(key)), key) if _is_key(key) else ("", "")):
            yield from _walk(value[key], _item(path, key), depth + 1)
    elif isinstance(value, list | tuple):
        yield path, ("list", ""), None
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]", depth + 1)
    elif (pandas := sys.modules.get("pandas")) is not None and isinstance(
        value, pandas.DataFrame | pandas.Series
    ):
        yield from _pandas(value, path, depth)
    elif pandas is not None and value is pandas.NA:
        yield path, ("missing", ""), None
    else:
        yield path, TENSOR, _array(value, path)


def _is_key(key: object) -> bool:
    return isinstance(key, str | int) and not isinstance(key, bool)


def _item(path: str, key: Any) -> str:
    if not _is_key(key):
        raise CheckError(f"{path} has the key {key!r}, but keys of a check are texts or integers: rename it")
    return _short(f"{path}[{str(key)!r}]" if isinstance(key, str) else f"{path}[{int(key)}]")


def _short(path: str) -> str:
    if len(path) > _LONGEST:
        raise CheckError(f"""{path[:60]}... is a path of {len(path)} characters, but {_LONGEST} are the limit: shorten
        its keys""")
    return path


def _array(value: Any, path: str) -> Array:
    torch = sys.modules.get("torch")
    if not isinstance(value, np.ndarray | np.generic | bool | int | float) and not (
        torch is not None and isinstance(value, torch.Tensor)
    ):
        raise CheckError(f"""{path} is of type {type(value).__name__}, but a check holds tensors, arrays, numbers,
        texts, None, dicts, lists, DataFrames and Series: convert it""")
    try:
        return to_numpy(value, _short(path))
    except DumpError as error:
        raise CheckError(f"{path} cannot be stored: {error}") from None


def _pandas(value: Any, path: str, depth: int) -> Iterator[_Leaf]:
    if value.ndim == 1:
        yield path, ("series", ""), None
        yield from _walk(value.name, f"{path}.name", depth + 1)
        yield from _index(value.index, f"{path}.index", depth + 1)
        yield from _column(value, f"{path}.values", depth + 1)
        return
    yield path, ("table", ""), None
    yield from _index(value.columns, f"{path}.columns", depth + 1)
    yield from _index(value.index, f"{path}.index", depth + 1)
    seen: dict[str, int] = {}
    for position, label in enumerate(value.columns):
        name = _short(f"{path}[{label!r}]")
        seen[name] = seen.get(name, 0) + 1
        suffix = "" if seen[name] == 1 else f"#{seen[name]}"
        yield from _column(value.iloc[:, position], name + suffix, depth + 1)


def _index(index: Any, path: str, depth: int) -> Iterator[_Leaf]:
    """Yield the row or column labels, level by level, and the names of the levels."""
    yield path, ("index", ""), None
    yield from _walk(list(index.names), f"{path}.names", depth + 1)
    for level in range(index.nlevels):
        yield from _column(index.get_level_values(level), f"{path}[{level}]", depth + 1)


def _column(holder: Any, path: str, depth: int) -> Iterator[_Leaf]:
    """Yield the cells of a series or an index, in the representation of their dtype."""
    import pandas

    dtype = holder.dtype
    kind = dtype.kind if isinstance(dtype, np.dtype) else None
    if kind is not None and kind in "biuf":
        yield path, TENSOR, _array(np.asarray(holder.array), path)
        return
    if isinstance(dtype, pandas.CategoricalDtype):
        yield path, ("column", "ordered category" if dtype.ordered else "category"), None
        yield from _column(dtype.categories, f"{path}.categories", depth + 1)
        yield f"{path}.codes", TENSOR, _array(np.asarray(holder.array.codes), path)
        return
    yield path, ("column", str(dtype)), None
    if isinstance(dtype, pandas.StringDtype):
        for row, cell in enumerate(holder.array):
            yield f"{path}[{row}]", ("missing", "") if pandas.isna(cell) else ("text", str(cell)), None
    elif kind == "O":
        for row, cell in enumerate(holder.array):
            yield from _walk(cell, f"{path}[{row}]", depth + 1)
    elif kind in ("m", "M") or isinstance(dtype, pandas.DatetimeTZDtype):
        yield f"{path}.ticks", TENSOR, _array(np.asarray(holder.array.asi8), path)
    elif getattr(getattr(dtype, "numpy_dtype", None), "kind", "?") in "biuf":
        filled = holder.array.to_numpy(dtype=dtype.numpy_dtype, na_value=0)
        yield f"{path}.values", TENSOR, _array(filled, path)
        yield f"{path}.missing", TENSOR, _array(np.asarray(holder.array.isna()), path)
    else:
        raise CheckError(f"{path} is a column of dtype {dtype}, which a check cannot hold: convert it")
