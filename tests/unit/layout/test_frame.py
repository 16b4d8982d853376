"""Canonical coordinates of flat token indices."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from regress.layout import TokenFrame

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def frame_of(lengths: list[int]) -> TokenFrame:
    return TokenFrame(tuple((f"g{i // 2}", i % 2) for i in range(len(lengths))), tuple(lengths))


@settings(deadline=None)
@given(LENGTHS)
def test_every_flat_index_has_one_sample_and_position(lengths: list[int]) -> None:
    frame = frame_of(lengths)
    expected = [
        (sample, position)
        for sample, length in zip(frame.samples, lengths, strict=True)
        for position in range(length)
    ]
    assert [frame.locate(index) for index in range(frame.size)] == expected


@settings(deadline=None)
@given(LENGTHS, st.data())
def test_a_selection_keeps_keys_and_lengths_together(lengths: list[int], data: st.DataObject) -> None:
    frame = frame_of(lengths)
    chosen = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(1, len(lengths)))]
    part = frame.select(chosen)
    known = dict(zip(frame.samples, frame.lengths, strict=True))
    assert [known[key] for key in part.samples] == list(part.lengths)
    assert part.samples == tuple(frame.samples[i] for i in chosen)
