"""Token spans of a record, read from its metadata; nothing else reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from regress.dump.numpy_arrays import Array
from regress.errors import CompareError
from regress.layout import SampleKey, Segment, TokenFrame, TokenLayout

PADDING = -1

NO_LAYOUT = 'tap it with layout= and meta={"samples": [(group_id, run_id), ...]}, one for each segment, or by tap_batch'


@dataclass(frozen=True)
class Spans:
    """Places of tokens in local ``[B, T]`` tensors.

    Attributes:
        segments: ``(sample, start, stop, row, column)`` of each run of tokens.
    """

    shape: tuple[int, int]
    segments: tuple[tuple[SampleKey, int, int, int, int], ...]

    @classmethod
    def of(cls, meta: Mapping[str, Any], name: str) -> Spans:
        """Return the layout in a record's metadata; raises `CompareError` for none, or an unusable one."""
        if "layout" in meta and "samples" not in meta:
            raise CompareError(
                f"{name} has a token layout, but nothing tells whose tokens these are: {NO_LAYOUT}"
            )
        try:
            rows, columns = (int(size) for size in meta["layout"]["shape"])
            keys = [(str(group), int(run)) for group, run in meta["samples"]]
            table = [[*map(int, segment)] for segment in meta["layout"]["segments"]]
            runs = [(start, stop, row, col) for _, start, stop, row, col in table]
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise CompareError(
                f"{name} has no usable token layout ({type(error).__name__}: {error}): {NO_LAYOUT}"
            ) from None
        if len(keys) != len(runs):
            raise CompareError(f"""{name} has {len(runs)} segments but {len(keys)} samples in its metadata; name the
            sample of each segment""")
        segments = tuple((key, *run) for key, run in zip(keys, runs, strict=True))
        for key, start, stop, row, col in segments:
            inside = 0 <= row < rows and 0 <= col <= columns - (stop - start)
            if not (inside and 0 <= start < stop):
                raise CompareError(
                    f"{name} has a segment of sample {key[0]}/{key[1]} that leaves its tensors; record it again"
                )
        _refuse_overlaps(segments, name)
        return cls((rows, columns), segments)

    def layout(self, index: Mapping[SampleKey, int], frame: TokenFrame) -> TokenLayout:
        """Return the layout in the sample numbers of a frame; tokens outside of the frame count as padding.

        Args:
            index: the frame's number of each sample, by the key that it has here.
        """
        segments = (
            Segment(index[key], start, min(stop, frame.lengths[index[key]]), row, col)
            for key, start, stop, row, col in self.segments
            if key in index
        )
        return TokenLayout(self.shape, tuple(segment for segment in segments if segment.start < segment.stop))

    def misfit(self, name: str, frame: TokenFrame) -> str:
        """Return why these are not the tokens of a frame; empty if they are."""
        for key, _, stop, _, _ in self.segments:
            words = f"{key[0]}/{key[1]}"
            if key not in frame.index:
                return f"{name} holds sample {words}, which does not belong to this update"
            if stop > (length := frame.lengths[frame.index[key]]):
                return f"{name} holds {stop} tokens of sample {words}, which has {length}"
        return ""

    def runs(self, array: Array | None) -> Iterator[tuple[SampleKey, slice, Array]]:
        """Yield sample, positions and values of each run of tokens; nothing of a tensor that is not ``[B, T]``."""
        if array is not None and array.shape == self.shape:
            for key, start, stop, row, col in self.segments:
                yield key, slice(start, stop), array[row, col : col + stop - start]

    @property
    def samples(self) -> tuple[SampleKey, ...]:
        """The samples that have a token here."""
        return tuple(dict.fromkeys(segment[0] for segment in self.segments))


def _refuse_overlaps(segments: Sequence[tuple[SampleKey, int, int, int, int]], name: str) -> None:
    """Refuse two segments at one place of a tensor, since nothing tells whose value lies there."""
    end: dict[int, int] = {}
    for key, start, stop, row, col in sorted(segments, key=lambda segment: segment[3:]):
        if col < end.get(row, 0):
            raise CompareError(f"""{name} has a segment of sample {key[0]}/{key[1]} over another segment, at row {row},
            column {col}; record it again""")
        end[row] = col + stop - start
