"""Planner of every rank's token layouts: which samples it holds, and which of their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from regress.layout.layout_planner import BatchPlan, plan_microbatches
from regress.layout.rank_mesh import Mesh
from regress.layout.token_layout import Segment, TokenLayout

SAMPLE_SPLITS = ("contiguous", "interleaved")
SEQUENCE_SPLITS = ("contiguous", "zigzag")

Columns = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankPlan:
    """Rules that assign samples and their tokens to ranks.

    Args:
        mesh: the ranks.
        sample_split: data ranks get ``"contiguous"`` blocks of samples (the last ones fewer, or none), or one
            sample each in turn (``"interleaved"``).
        sequence_split: the columns of a context-parallel rank are one ``"contiguous"`` block, or two that balance
            the work of causal attention (``"zigzag"``: blocks r and 2 cp - 1 - r of 2 cp).
        sequence_parallel: tensor-parallel ranks share the columns between matrix products.

    Raises:
        ValueError: if a split is unknown.
    """

    mesh: Mesh = field(default_factory=Mesh)
    sample_split: str = "contiguous"
    sequence_split: str = "contiguous"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("sample_split", self.sample_split, SAMPLE_SPLITS),
            ("sequence_split", self.sequence_split, SEQUENCE_SPLITS),
        ):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}; choose one")

    @property
    def columns_multiple(self) -> int:
        """Number that the length of a whole row must be a multiple of."""
        blocks = self.mesh.cp * (2 if self.sequence_split == "zigzag" and self.mesh.cp > 1 else 1)
        return blocks * (self.mesh.tp if self.sequence_parallel else 1)

    def samples(self, count: int, rank: int) -> list[int]:
        """Return the samples of a rank, out of ``count``."""
        share, shares = self.mesh.data_index(rank), self.mesh.data_size
        if self.sample_split == "interleaved":
            return list(range(share, count, shares))
        size = -(-count // shares)
        return list(range(share * size, min((share + 1) * size, count)))

    def columns(self, width: int, rank: int) -> Columns:
        """Return the column ranges of a row of ``width`` columns that a rank holds, in local order."""
        cp, index = self.mesh.cp, self.mesh.coordinates(rank)["cp"]
        if cp == 1:
            return ((0, width),)
        if self.sequence_split == "contiguous":
            size = width // cp
            return ((index * size, (index + 1) * size),)
        size = width // (2 * cp)
        return tuple((block * size, (block + 1) * size) for block in (index, 2 * cp - 1 - index))


@dataclass(frozen=True)
class RankLayout:
    """One microbatch on one rank.

    Attributes:
        tokens: layout of the inputs; without tokens if the rank has no samples left.
        targets: layout of the loss values: each token's value at the token's own place or, where the sequence
            is split, at the place of the token before it, whose hidden state predicts it.
        whole: layout of the inputs before the sequence is split over ranks.
        columns: column ranges of ``whole`` that lie on this rank, in local order.
    """

    tokens: TokenLayout
    targets: TokenLayout
    whole: TokenLayout
    columns: Columns


def plan_ranks(lengths: Sequence[int], plan: BatchPlan, ranks: RankPlan) -> list[list[RankLayout]]:
    """Return the layouts of samples of these lengths, by rank and microbatch.

    Among ranks that hold different tokens, every token lies on exactly one. All ranks have the same number of
    microbatches, since they synchronize in each of them: a rank with fewer samples ends with empty ones.
    Under pipeline parallelism all microbatches have one shape.

    Raises:
        ValueError: on the same conditions as `plan_microbatches`.
    """
    multiple = math.lcm(plan.pad_to_multiple_of, ranks.columns_multiple)
    plan = replace(plan, pad_to_multiple_of=multiple)
    by_share: dict[int, list[TokenLayout]] = {}
    shares = [ranks.mesh.data_index(rank) for rank in range(ranks.mesh.world_size)]
    for rank, share in enumerate(shares):
        if share not in by_share:
            by_share[share] = _share(lengths, ranks.samples(len(lengths), rank), plan)
    if ranks.mesh.pp > 1:
        rows = max(layout.shape[0] for layouts in by_share.values() for layout in layouts)
        width = max(layout.shape[1] for layouts in by_share.values() for layout in layouts)
        by_share = {
            share: [_widened(layout, rows, width, plan) for layout in layouts]
            for share, layouts in by_share.items()
        }
    count = max(len(layouts) for layouts in by_share.values())
    empty = TokenLayout((1, multiple), ())
    if ranks.mesh.pp > 1:
        empty = TokenLayout((rows, width), ())
    return [
        [_on(ranks, rank, layout, lengths) for layout in _filled(by_share[share], count, empty)]
        for rank, share in enumerate(shares)
    ]


def _share(lengths: Sequence[int], samples: Sequence[int], plan: BatchPlan) -> list[TokenLayout]:
    if not samples:
        return []
    layouts = plan_microbatches([lengths[sample] for sample in samples], plan)
    return [
        replace(layout, segments=tuple(s._replace(sample=samples[s.sample]) for s in layout.segments))
        for layout in layouts
    ]


def _filled(layouts: list[TokenLayout], count: int, empty: TokenLayout) -> list[TokenLayout]:
    return layouts + [empty] * (count - len(layouts))


def _widened(layout: TokenLayout, rows: int, width: int, plan: BatchPlan) -> TokenLayout:
    """Return the layout of the same samples in a larger tensor, padded on the same side."""
    shift = width - layout.shape[1] if plan.layout == "padded" and plan.padding_side == "left" else 0
    return TokenLayout((rows, width), tuple(s._replace(col=s.col + shift) for s in layout.segments))


def _on(ranks: RankPlan, rank: int, whole: TokenLayout, lengths: Sequence[int]) -> RankLayout:
    columns = ranks.columns(whole.shape[1], rank)
    if ranks.mesh.cp == 1:
        return RankLayout(whole, whole, whole, columns)
    tokens = _columns_of(whole, columns)
    return RankLayout(tokens, _shifted(tokens, lengths), whole, columns)


def _columns_of(layout: TokenLayout, columns: Columns) -> TokenLayout:
    """Return the part of a layout in these column ranges, laid side by side; the parts of a sample stay in order."""
    segments = []
    for segment in layout.segments:
        offset = 0
        for first, last in columns:
            left, right = max(segment.col, first), min(segment.col + segment.stop - segment.start, last)
            if left < right:
                start, col = segment.start + left - segment.col, offset + left - first
                segments.append(segment._replace(start=start, stop=start + right - left, col=col))
            offset += last - first
    return TokenLayout((layout.shape[0], sum(last - first for first, last in columns)), tuple(segments))


def _shifted(tokens: TokenLayout, lengths: Sequence[int]) -> TokenLayout:
    """Return the layout with every token at the place of the one before it; a sample's first token has none."""
    segments = (
        Segment(s.sample, s.start + 1, min(s.stop + 1, lengths[s.sample]), s.row, s.col)
        for s in tokens.segments
    )
    return TokenLayout(tokens.shape, tuple(s for s in segments if s.start < s.stop))
