"""Digest of requests: equal exactly for what is the same request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from regress.service.core.request_digest import content_of, size_of
from regress.service.service_api import Datum, PassRequest, SaveKind

KINDS = st.sampled_from([np.dtype("<i8"), np.dtype("<f4"), np.dtype("<f8")])
ARRAYS = arrays.arrays(KINDS, st.integers(0, 4), elements={"min_value": -2, "max_value": 2})


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@given(ARRAYS, ARRAYS)
def test_arrays_are_the_same_by_dtype_shape_and_bytes(one: np.ndarray, other: np.ndarray) -> None:
    assert (content_of(one).digest == content_of(other).digest) == same(one, other)
    assert content_of(one).digest == content_of(one.copy()).digest


def test_every_part_of_a_request_counts() -> None:
    datum = Datum(np.array([1, 2]), {"weights": np.array([np.nan, 1.0], "f4")}, "a")
    request = PassRequest([datum], "ppo", {"clip": 0.1})
    others = [
        replace(request, loss="cispo"),
        replace(request, config={"clip": 0.2}),
        replace(request, config={}),
        replace(request, forward_only=True),
        replace(request, data=[datum, datum]),
        replace(request, data=[replace(datum, id="b")]),
        replace(request, data=[replace(datum, inputs={"weight": datum.inputs["weights"]})]),
        replace(request, data=[replace(datum, tokens=np.array([2, 1]))]),
    ]
    digests = [content_of(one).digest for one in (request, *others)]
    assert len(set(digests)) == len(digests)
    assert content_of(request).digest == content_of(PassRequest((datum,), "ppo", {"clip": 0.1})).digest
    assert content_of("ab", "c").digest != content_of("a", "bc").digest
    assert content_of(SaveKind.STATE).digest != content_of("STATE").digest
    assert content_of(1).digest != content_of(True).digest


def test_sizes_are_those_of_the_arrays_about() -> None:
    large = np.zeros(1000)
    assert 8000 <= size_of([large]) <= 9000
    assert 8000 <= content_of(large).size <= 9000
    with pytest.raises(TypeError, match="object is not a type of a request"):
        content_of(object())
