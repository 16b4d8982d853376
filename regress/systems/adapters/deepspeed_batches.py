"""Microbatches of the loop around DeepSpeed: padded or packed rows, or the part of them that a rank of Ulysses has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regress.layout import Segment, TokenLayout
from regress.systems.exported import Sample
from regress.systems.loop_numbers import loss_mask, sampler_log_probs


@dataclass(frozen=True)
class Batch:
    """A microbatch on one rank.

    Attributes:
        inputs: ``input_ids``, ``attention_mask`` and ``position_ids``, ``[B, T]``.
        passed: names of the inputs that the model gets.
        of_inputs: places of the tokens in the inputs, and the samples that are there.
        of_log_probs: the same of the tokens that the columns of the logits predict: the next ones.
        next_ids, mask, old, advantage: ``[B, T]``, of the predicted tokens.
        labels: ``[B, T]``, as transformers takes them, -100 outside of the loss.
    """

    inputs: dict[str, Tensor]
    passed: tuple[str, ...]
    of_inputs: dict[str, Any]
    of_log_probs: dict[str, Any]
    next_ids: Tensor
    mask: Tensor
    old: Tensor
    advantage: Tensor
    labels: Tensor


def batch_of(micro: Sequence[tuple[Sample, float]], part: tuple[int, int], *, packed: bool = False) -> Batch:
    """Return the columns of a rank, of rows that are padded on the right or of one packed row.

    Args:
        micro: samples with their advantages.
        part: number of the rank in its group of sequence parallelism, and the size of the group.
        packed: put all samples into one row, one after another.
    """
    rows = [list(micro)] if packed else [[one] for one in micro]
    index, parts = part
    longest = max(sum(len(sample.tokens) for sample, _ in row) for row in rows)
    T = -(-longest // parts)
    first = index * T

    def cut(values: Iterable[Iterable[Any]], fill: Any, shift: int = 0) -> Tensor:
        whole = [[*row, *[fill] * (T * parts + 1)] for row in map(list, values)]
        return torch.tensor([row[first + shift : first + shift + T] for row in whole])

    def joined(of: Any) -> Iterator[list[Any]]:
        for row in rows:
            yield [value for sample, advantage in row for value in of(sample, advantage)]

    ids = cut(joined(lambda sample, _: sample.tokens), 0)
    mask = cut(joined(lambda sample, _: loss_mask(sample)), 0, 1)
    inputs = {
        "input_ids": ids,
        "attention_mask": cut(joined(lambda sample, _: [1] * len(sample.tokens)), 0),
        "position_ids": cut(_positions(rows, T * parts), 0),
    }
    kept = cut(joined(lambda sample, _: loss_mask(sample)), 0)
    return Batch(
        inputs=inputs,
        passed=("input_ids", "position_ids") if packed or parts > 1 else ("input_ids", "attention_mask"),
        of_inputs=_places(rows, first, T, 0),
        of_log_probs=_places(rows, first, T, 1),
        next_ids=cut(joined(lambda sample, _: sample.tokens), 0, 1),
        mask=mask,
        old=cut(joined(lambda sample, _: sampler_log_probs(sample)), 0.0, 1),
        advantage=cut(joined(lambda sample, advantage: [advantage] * len(sample.tokens)), 0.0, 1),
        labels=ids.masked_fill(kept == 0, -100),
    )


def _positions(rows: Sequence[Sequence[tuple[Sample, float]]], width: int) -> Iterator[list[int]]:
    """Yield the positions of a row; those of padding go on, so that it is not a sample of its own."""
    for row in rows:
        found = [position for sample, _ in row for position in range(len(sample.tokens))]
        last = found[-1]
        yield [*found, *range(last + 1, last + 1 + width - len(found))]


def _places(rows: Sequence[Sequence[tuple[Sample, float]]], first: int, T: int, shift: int) -> dict[str, Any]:
    """Return layout and samples of the columns of a rank, or (with a shift of 1) of what these predict."""
    segments: list[Segment] = []
    keys: list[list[Any]] = []
    for index, row in enumerate(rows):
        begin = 0
        for sample, _ in row:
            start = max(first, begin) + shift
            stop = min(first + T + shift, begin + len(sample.tokens))
            if start < stop:
                segments.append(Segment(len(keys), start - begin, stop - begin, index, start - first - shift))
                keys.append([*sample.key])
            begin += len(sample.tokens)
    return {"layout": TokenLayout((len(rows), T), tuple(segments)), "meta": {"samples": keys}}
