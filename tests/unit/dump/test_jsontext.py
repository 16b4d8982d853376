"""Metadata: plain, canonical, strict, lossless."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from regress.dump.canonical_json import dumps, loads, plain
from regress.errors import DumpError


def test_values_become_plain() -> None:
    value = {"a": (1, np.int32(2), np.float32(0.5), np.bool_(True)), "b": OrderedDict(c=None)}
    result = plain(value, "meta")
    assert result == {"a": [1, 2, 0.5, True], "b": {"c": None}}
    assert [type(item) for item in result["a"]] == [int, int, float, bool]  # type: ignore[index, call-overload, union-attr]


def test_text_is_canonical() -> None:
    assert dumps({"b": 1, "a": [0.1, -0.0]}) == dumps({"a": [0.1, -0.0], "b": 1}) == '{"a":[0.1,-0.0],"b":1}'


def test_floats_survive() -> None:
    values = [math.inf, -math.inf, 5e-324, 1.7976931348623157e308, 0.1 + 0.2, -0.0]
    again = loads(dumps(values))
    assert [value.hex() for value in again] == [value.hex() for value in values]
    assert math.isnan(loads(dumps([math.nan]))[0])


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"$float": "nan"}', '{"$float": []}', "[" * 10**5, ""]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(text)


def _nested(depth: int) -> Any:
    return [] if depth == 0 else [_nested(depth - 1)]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"t": torch.zeros(1)}, r"meta\['t'\] is a Tensor, but metadata holds only plain JSON"),
        ([{1}], r"meta\[0\] is a set"),
        ({1: 2}, "meta has the key 1, but keys are strings"),
        ({"$float": "NaN"}, "has the key '[$]float'"),
        ([2**64], r"meta\[0\] is the integer 1.845e\+19, which needs more than 64 bits"),
        (_nested(99), "nested deeper than 64 levels"),
    ],
)
def test_refusals(value: Any, reason: str) -> None:
    with pytest.raises(DumpError, match=reason):
        plain(value, "meta")
