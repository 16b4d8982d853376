"""Positions that are counted along the row: position ids, and embeddings that a model looks up by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.diagnosis.tensor_failures import FailureContexts
from regress.compare.quantities import QuantitySource
from regress.dump.numpy_arrays import Array
from regress.layout import Segment, TokenFrame, TokenLayout

LENGTHS = (40, 5, 7, 9)
"""Embeddings are known as far as the longest sample has positions, so it stands last in its row."""
FRAME = TokenFrame(tuple((f"{i:03d}", 0) for i in range(len(LENGTHS))), LENGTHS)
POSITIONS = np.concatenate([np.arange(length) for length in LENGTHS])


def row(order: tuple[int, ...], left: int = 0) -> TokenLayout:
    """Return samples packed into one row, behind as many places of padding."""
    starts = left + np.cumsum([0, *(LENGTHS[i] for i in order)])
    segments = [Segment(i, 0, LENGTHS[i], 0, int(start)) for i, start in zip(order, starts, strict=False)]
    return TokenLayout((1, int(starts[-1])), tuple(segments))


def held(layout: TokenLayout, name: str, table: Array, actual: Array) -> set[str]:
    """Return the hypotheses that explain ``[1, T, H]`` embeddings, or ``[1, T]`` position ids if there is no table."""
    quantity = "batch_inputs" if name == "position_ids" else "activations"
    canonical = POSITIONS if name == "position_ids" else table[POSITIONS]
    truth = {"batch_inputs": {"position_ids": POSITIONS}, "activations": {name: table[POSITIONS]}}
    contexts = FailureContexts(truth, FRAME, np.ones(FRAME.size, bool), {})
    golden = np.zeros((layout.shape[1], *canonical.shape[1:]), canonical.dtype)
    at, local = layout.indices(FRAME.offsets)
    golden[local] = canonical[at]
    golden = golden.reshape(*layout.shape, *canonical.shape[1:])
    real = np.zeros(layout.shape, bool)
    real.reshape(-1)[local] = True
    around = contexts.tokens(QuantitySource("", name, quantity, name), layout, layout.shape)
    over = (actual != golden) & real.reshape(*layout.shape, *[1] * (actual.ndim - 2))
    found = around.affected(actual, golden, over, real, 1e-12)
    assert found is not None
    return {*found.held}


TABLE = np.random.default_rng(0).standard_normal((64, 6))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(order=st.permutations(range(1, len(LENGTHS))), left=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_model_that_counts_columns_looks_up_their_embeddings(
    order: list[int], left: int, seed: int
) -> None:
    layout = row((*order, 0), left)
    columns = TABLE[np.arange(layout.shape[1])][None]
    assert "columns" in held(layout, "transformer.wpe", TABLE, columns)
    noise = columns + 0.1 * np.random.default_rng(seed).standard_normal(columns.shape)
    assert "columns" not in held(layout, "transformer.wpe", TABLE, noise)
    other = TABLE[(np.arange(layout.shape[1]) + 1) % 64][None]
    assert "columns" not in held(layout, "transformer.wpe", TABLE, other)


@pytest.mark.parametrize("name", ["model.layers.0", "model.embed_tokens"])
def test_other_modules_look_nothing_up_by_position(name: str) -> None:
    layout = row((1, 2, 3, 0))
    assert "columns" not in held(layout, name, TABLE, TABLE[: layout.shape[1]][None])


def test_position_ids_that_count_columns() -> None:
    layout = row((1, 0, 3, 2))
    columns = np.arange(layout.shape[1])[None]
    assert "columns" in held(layout, "position_ids", TABLE, columns)
    assert "columns" not in held(layout, "position_ids", TABLE, columns + 1)
