"""Metadata as strict, canonical JSON: one text for one value, every float bit for bit.

JSON has no NaN and no infinity; they are written as `{"$float": "NaN" | "Infinity" | "-Infinity"}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeAlias

import numpy as np

from regress.errors import DumpError
from regress.untrusted_files import parse_json

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_TAG = "$float"
_AS_THEY_ARE = frozenset((str, bool, type(None)))
_DEPTH = 64  # far below the recursion limit of the parsers that read dumps back
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def plain(value: Any, where: str, depth: int = 0) -> Json:
    """Reduce `value` to plain JSON types (tuples become lists, numpy scalars Python numbers).

    Raises `DumpError` naming the place, such as `meta['layout'][0]`, of what is not plain data.
    """
    if depth > _DEPTH:
        raise DumpError(f"{where} is nested deeper than {_DEPTH} levels: flatten it before the tap")
    if value is None or isinstance(value, bool | np.bool_):
        return None if value is None else bool(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | np.integer):
        return _bounded(int(value), where)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, Mapping):
        return {_key(k, where): plain(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise DumpError(f"""{where} is a {type(value).__name__}, but metadata holds only plain JSON values: pass tensors as
    tensors and convert the rest""")


def _bounded(value: int, where: str) -> int:
    if not -(2**63) <= value < 2**64:
        raise DumpError(
            f"{where} is the integer {value:.3e}, which needs more than 64 bits: write it as a string"
        )
    return value


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str) or key == _TAG:
        raise DumpError(f"{where} has the key {key!r}, but keys are strings other than {_TAG!r}: rename it")
    return str(key)


def dumps(value: Any) -> str:
    """Return the canonical text of a plain value: sorted keys, no spaces, ASCII, strict JSON."""
    try:
        return _encode(value)
    except ValueError:  # a float is not finite, which is rare: only then pay for a walk through all of it
        return _encode(tag_floats(value))


def _encode(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def tag_floats(value: Any) -> Any:
    """Replace non-finite floats by their tagged form throughout `value`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: float_name(value)}
    if isinstance(value, dict):
        return {key: tag_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tag_floats(item) for item in value]
    return value


def strict(value: Any, where: str = "the report") -> Any:
    """Return a tree of `plain` JSON values with tagged floats, in one pass; dataclasses are their fields.

    Raises `DumpError` as `plain` does.
    """
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else {_TAG: float_name(value)}
    if kind is int:
        return _bounded(value, where)
    if kind in _AS_THEY_ARE:
        return value
    if kind is dict:
        return {
            key if type(key) is str else _key(key, where): strict(item, where) for key, item in value.items()
        }
    if kind is list or kind is tuple:
        return [strict(item, where) for item in value]
    if isinstance(value, Mapping):
        return strict(dict(value), where)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: strict(item, where) for name, item in vars(value).items()}
    return tag_floats(plain(value, where))


def float_name(value: float) -> str:
    """Return `NaN`, `Infinity` or `-Infinity`."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def loads(text: str | bytes) -> Any:
    """Parse strict JSON and restore tagged floats; raises `ValueError` for anything else, see `parse_json`."""
    return parse_json(text, pairs=_untag)


def _untag(item: dict[str, Any]) -> Any:
    if item.keys() == {_TAG}:
        return nonfinite(item[_TAG])
    return item


def nonfinite(name: Any) -> float:
    """Return the float that `float_name` named; raises `ValueError` for other names."""
    if not isinstance(name, str) or name not in _NONFINITE:
        raise ValueError(f"{name!r} is not a float")
    return _NONFINITE[name]
