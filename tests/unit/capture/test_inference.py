"""Layouts inferred from masks, positions and borders; what can be read in two ways is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.capture.layout_inference import Arrangement, infer_layout, predicted
from regress.errors import CaptureError
from regress.layout import Segment

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def ids(rows: int, columns: int) -> np.ndarray:
    return np.arange(rows * columns).reshape(rows, columns) + 2


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 3), st.randoms(use_true_random=False))
def test_one_run_of_ones_anywhere_in_each_row(lengths: list[int], spare: int, random: object) -> None:
    width = max(lengths) + spare
    mask = np.zeros((len(lengths), width), np.int64)
    starts = [random.randint(0, width - length) for length in lengths]  # type: ignore[attr-defined]
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        mask[row, start : start + length] = 1
    found = infer_layout(Arrangement(ids(*mask.shape), mask))
    want = tuple(Segment(r, 0, n, r, c) for r, (c, n) in enumerate(zip(starts, lengths, strict=True)))
    assert found.segments == want


@settings(deadline=None)
@given(LENGTHS, st.booleans(), st.sampled_from(["positions", "borders", "numbers"]))
def test_packed_rows_are_cut_where_samples_start(lengths: list[int], padded: bool, told: str) -> None:
    tail = 3 * padded
    total = sum(lengths) + tail
    borders = np.cumsum([0, *lengths])
    numbers = np.concatenate([np.repeat(np.arange(len(lengths)) + 1, lengths), np.zeros(tail, np.int64)])
    positions = np.concatenate([*(np.arange(n) for n in lengths), np.zeros(tail, np.int64)])
    extra: dict[str, Any] = {
        "positions": {
            "position_ids": positions[None],
            "attention_mask": (numbers[None] > 0).astype(np.int64),
        },
        "borders": {"cu_seq_lens": borders},
        "numbers": {"attention_mask": numbers[None]},
    }[told]
    found = infer_layout(Arrangement(ids(1, total), **extra))
    want = tuple(Segment(i, 0, n, 0, int(borders[i])) for i, n in enumerate(lengths))
    assert found.segments == want


def test_positions_alone_cut_a_row_without_padding() -> None:
    positions = np.array([[0, 1, 2, 0, 1, 0, 1, 2, 3]])
    found = infer_layout(Arrangement(ids(1, 9), None, positions, pad_token_id=0))
    assert [(s.col, s.stop) for s in found.segments] == [(0, 3), (3, 2), (5, 4)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "holes": (
        {"attention_mask": np.array([[1, 1, 0, 1, 1]])},
        r"row 0 of the attention mask has 2 runs of ones, .* record\(position_ids=\.\.\.\), or borders with",
    ),
    "holes with positions that go on": (
        {"attention_mask": np.array([[1, 1, 0, 1, 1]]), "position_ids": np.array([[0, 1, 1, 2, 3]])},
        r"2 runs of ones",
    ),
    "jump": (
        {"position_ids": np.array([[0, 1, 5, 6, 7]])},
        r"position_ids of row 0 go from 1 to 5 at column 2, .* record\(cu_seq_lens=\.\.\.\)",
    ),
    "restart at every token": (
        {"position_ids": np.array([[0, 1, 0, 0, 0]])},
        r"restart at every token from column 2 on, .* record\(attention_mask=\.\.\.\)",
    ),
    "falling borders": (
        {"cu_seq_lens": np.array([0, 4, 2])},
        r"cu_seq_lens \[0, 4, 2\] are not rising borders of one packed row of 5 tokens",
    ),
    "borders that join samples": (
        {"cu_seq_lens": np.array([0, 5]), "position_ids": np.array([[0, 1, 2, 0, 1]])},
        r"cu_seq_lens say that columns 0 to 4 are one sample, and position_ids begin anew at column 3: correct",
    ),
    "mask of another shape": (
        {"attention_mask": np.array([[1, 1, 1]])},
        r"attention_mask has the shape \[1, 3\], but input_ids has \[1, 5\]: give record\(attention_mask=\.\.\.\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_read_in_two_ways_is_refused(name: str) -> None:
    told, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        infer_layout(Arrangement(ids(1, 5), **told))


def test_position_ids_of_padding_may_stay_what_they_are() -> None:
    told = {"cu_seq_lens": np.array([0, 3, 6]), "position_ids": np.array([[0, 1, 0, 0, 1, 0]])}
    assert infer_layout(Arrangement(ids(1, 6), **told)).segments == (
        Segment(0, 0, 3, 0, 0),
        Segment(1, 0, 3, 0, 3),
    )


def test_padding_without_a_mask_is_refused() -> None:
    row = np.array([[5, 6, 7, 0, 0]])
    with pytest.raises(
        CaptureError, match=r"row 0 of input_ids ends with the padding token 0 and no attention mask"
    ):
        infer_layout(Arrangement(row, pad_token_id=0))
    assert infer_layout(Arrangement(row, pad_token_id=None)).segments == (Segment(0, 0, 5, 0, 0),)


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 6))
def test_a_state_predicts_the_next_token_of_its_sample(lengths: list[int], first: int) -> None:
    total = sum(lengths)
    layout = infer_layout(Arrangement(ids(1, total), cu_seq_lens=np.cumsum([0, *lengths])))
    targets = predicted(layout, min(first, total - 1))
    told = {(s.sample, p) for s in targets.segments for p in range(s.start, s.stop)}
    want = {
        (s.sample, p)
        for s in layout.segments
        for p in range(1, s.stop)
        if s.col + p - 1 >= min(first, total - 1)
    }
    assert told == want
