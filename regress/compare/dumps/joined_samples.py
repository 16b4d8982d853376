"""Unknown samples that are several known ones, one behind the other: a packed row that was taken for one sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.local_shard import others
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.sample_contents import token_ids
from regress.compare.dumps.sample_matching import Sample, Tokens
from regress.compare.record_header import Header
from regress.layout import SampleKey

JOINED = "one behind the other"
"""Words for a sample that is several known ones."""
MOST = 1 << 16
"""Most tokens of an unknown sample that is looked into."""


def joined_samples(
    side: Side, records: Sequence[Header], unknown: Collection[SampleKey], known: Iterable[Sample]
) -> Iterator[tuple[SampleKey, tuple[SampleKey, ...]]]:
    """Yield each sample without a counterpart that is made of known ones, with these.

    Args:
        records: those of the side that has the unknown samples.
        known: samples of either side.
    """
    if not unknown:
        return
    parts: dict[Tokens, SampleKey] = {}
    for sample in known:
        if isinstance(sample.content, Tokens) and sample.content.count and sample.key not in unknown:
            parts.setdefault(sample.content, sample.key)
    for key, ids in token_ids(side, records, unknown).items():
        found = parts_of(ids, parts) if ids.size <= MOST else ()
        if len(found) > 1:
            yield key, found


def joined_words(found: Sequence[tuple[SampleKey, Sequence[SampleKey]]], has: str = "") -> str:
    """Return words for unknown samples that are known ones, one behind the other.

    Args:
        has: the dump that has them, ``golden`` or ``actual``, where there are two.
    """
    key, parts = found[0]
    named = ", ".join(map(named_as, parts[:3])) + (" ..." if len(parts) > 3 else "")
    where = f" of the {has} dump" if has else ""
    return f"sample {named_as(key)}{where} is {len(parts)} samples, {JOINED} ({named}){others(len(found), 'sample')}"


def named_as(key: SampleKey) -> str:
    """Return the name of a sample, ``group/run``."""
    return f"{key[0]}/{key[1]}"


def parts_of(ids: NDArray[np.int64], parts: Mapping[Tokens, SampleKey]) -> tuple[SampleKey, ...]:
    """Return the known samples whose tokens, one behind the other, are these ids; empty if there are none."""
    counts = sorted({tokens.count for tokens in parts}, reverse=True)
    ends: dict[int, tuple[int, SampleKey]] = {}  # end of a part -> its beginning, and the sample
    waiting = [0]
    while waiting and len(ids) not in ends:
        start = waiting.pop()
        for count in counts:
            stop = start + count
            if stop <= len(ids) and stop not in ends:
                key = parts.get(Tokens.of(ids[start:stop]))
                if key is not None:
                    ends[stop] = start, key
                    waiting.append(stop)
    found: list[SampleKey] = []
    at = len(ids) if len(ids) in ends else 0
    while at:
        at, key = ends[at]
        found.append(key)
    return tuple(reversed(found))
