"""Attributes of each token at its place in a local tensor: its sample, its neighbours, its golden values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from regress.dump.numpy_arrays import Array
from regress.layout import ShardLayout, TokenFrame, TokenLayout

CLASSES = {
    "after_boundary": "the first token after a boundary (of samples in a row, or of ranks)",
    "before_boundary": "the last token before a boundary (of samples in a row, or of ranks)",
    "first_trained": "the first trained token of a sample",
    "last_trained": "the last trained token of a sample",
    "packed_behind": "samples that lie behind another in their row",
    "packed_first": "samples that lie first in a row of several",
    "behind_padding": "rows that begin with padding",
    "before_padding": "rows that end with padding",
    "beside_padding": "padding-adjacent tokens",
    "negative": "negative advantages",
    "positive": "positive advantages",
    "zero_variance": "samples of zero-variance groups",
    "varied": "samples of groups whose rewards vary",
    "clipped": "ratios beyond the clip range",
    "clipped_negative": "ratios beyond the clip range with a negative advantage",
    "clipped_positive": "ratios beyond the clip range with a positive advantage",
    "stopped": "tokens that the clip stops",
    "prompt": "prompt tokens",
    "tool": "tool tokens",
    "trained": "trained tokens",
    "after_other": "tokens that differ from the one before",
    "end": "the last token of a sample",
}
"""Classes of tokens that a fault may be confined to, in words that follow "only"."""

OF_LAYOUTS = frozenset(("packed_behind", "packed_first", "behind_padding", "before_padding"))
OF_SAMPLES = OF_LAYOUTS | {"negative", "positive", "zero_variance", "varied"}
"""Classes that a sample belongs to as a whole, so that its tokens are not independent evidence."""


@dataclass(frozen=True)
class TokenAttributes:
    """Attributes of each place of a local tensor's tokens, flattened, ``[P]``.

    Attributes:
        sample: index in the frame, -1 for padding.
        token: flat canonical index, -1 for padding.
        position, length: position of the token in its sample, and length of the sample.
        classes: mask of the places in each class, by name.
        names: names of all samples of the frame, ``group/run``.
    """

    sample: NDArray[np.int64]
    token: NDArray[np.int64]
    position: NDArray[np.int64]
    length: NDArray[np.int64]
    classes: Mapping[str, NDArray[np.bool_]]
    names: tuple[str, ...]

    def at(self, places: NDArray[np.int64]) -> TokenAttributes:
        """Return the attributes of some places, in this order."""
        return replace(
            self,
            **{name: getattr(self, name)[places] for name in ("sample", "token", "position", "length")},
            classes={name: members[places] for name, members in self.classes.items()},
        )

    def part(self, shards: ShardLayout, leading: tuple[int, ...]) -> TokenAttributes:
        """Return the attributes of places in a part of the tensor; ``leading`` is the shape of all places."""
        places = np.arange(len(self.sample)).reshape(leading)
        return self.at(ShardLayout(leading, shards.ranges[: len(leading)]).project(places).reshape(-1))


def token_classes(
    truth: Mapping[str, Mapping[str, Array]],
    frame: TokenFrame,
    loss_mask: NDArray[np.bool_] | None,
    clip: tuple[float, float] | None = None,
    sampled: NDArray[np.bool_] | None = None,
) -> dict[str, NDArray[np.bool_]]:
    """Return classes of canonical tokens, ``[frame.size]`` each, as far as the golden values tell them.

    Args:
        clip: the range that ratios are clipped to, if it is known.
        sampled: tokens that the policy sampled, by the rollouts: they are of no prompt and no tool, whatever the loss
            mask leaves out; None where only the loss mask tells.
    """
    starts, stops = frame.offsets[:-1], frame.offsets[1:]
    found = {"end": _at(frame.size, stops[stops > starts] - 1)}
    if loss_mask is not None and loss_mask.any():
        sample = np.repeat(np.arange(len(starts)), np.diff(frame.offsets))
        chosen = np.flatnonzero(loss_mask)
        firsts = chosen[np.unique(sample[chosen], return_index=True)[1]]
        lasts = chosen[len(chosen) - 1 - np.unique(sample[chosen][::-1], return_index=True)[1]]
        first_of = np.full(len(starts), frame.size, np.int64)
        first_of[sample[firsts]] = firsts
        index = np.arange(frame.size)
        given = ~loss_mask if sampled is None else ~loss_mask & ~sampled
        found |= {
            "first_trained": _at(frame.size, firsts),
            "last_trained": _at(frame.size, lasts),
            "trained": loss_mask,
            "prompt": (index < first_of[sample]) & given,
            "tool": (index > first_of[sample]) & given,
        }
    ids = truth.get("batch_inputs", {}).get("input_ids")
    if ids is not None and ids.shape == (frame.size,):
        other = np.ones(frame.size, bool)
        other[1:] = ids[1:] != ids[:-1]
        found["after_other"] = other
    return found | _of_values(truth, frame, loss_mask, clip)


def _of_values(
    truth: Mapping[str, Mapping[str, Array]],
    frame: TokenFrame,
    loss_mask: NDArray[np.bool_] | None,
    clip: tuple[float, float] | None,
) -> dict[str, NDArray[np.bool_]]:
    advantages = next(iter(truth.get("advantages", {}).values()), None)
    if advantages is None or advantages.shape != (frame.size,) or loss_mask is None:
        return {}
    signs = _signs(advantages.astype(np.float64), frame, loss_mask)
    ratio = next(iter(truth.get("ratio", {}).values()), None)
    if clip is None or ratio is None or ratio.shape != (frame.size,):
        return signs
    low, high = (ratio < clip[0]) & (ratio > 0), ratio > clip[1]
    outside = low | high
    return signs | {
        "clipped": outside,
        "clipped_negative": outside & signs["negative"],
        "clipped_positive": outside & signs["positive"],
        "stopped": (high & signs["positive"]) | (low & signs["negative"]),
    }


def _signs(
    advantages: NDArray[np.float64], frame: TokenFrame, loss_mask: NDArray[np.bool_]
) -> dict[str, NDArray[np.bool_]]:
    """Return classes by the sign of the advantage; all tokens of a sample share it if its trained ones do."""
    sign = np.where(loss_mask, np.sign(advantages), np.nan)
    for start, stop in zip(frame.offsets[:-1], frame.offsets[1:], strict=True):
        known = np.unique(sign[start:stop][loss_mask[start:stop]])
        if len(known) == 1:
            sign[start:stop] = known[0]
    varied = (sign == 1) | (sign == -1)
    return {"negative": sign == -1, "positive": sign == 1, "zero_variance": sign == 0, "varied": varied}


def _at(size: int, index: NDArray[np.int64]) -> NDArray[np.bool_]:
    found = np.zeros(size, bool)
    found[index] = True
    return found


def traits_of(
    layout: TokenLayout, frame: TokenFrame, classes: Mapping[str, NDArray[np.bool_]]
) -> TokenAttributes:
    """Return the attributes of the ``B * T`` places of a layout, in the frame's own sample numbers."""
    B, T = layout.shape
    token = np.full(B * T, -1, np.int64)
    canonical, local = layout.indices(frame.offsets)
    token[local] = canonical
    found = traits_at(token, frame, classes)
    return replace(found, classes={**found.classes, **classes_of_rows(layout.shape, layout.segments)})


def traits_at(
    token: NDArray[np.int64], frame: TokenFrame, classes: Mapping[str, NDArray[np.bool_]]
) -> TokenAttributes:
    """Return the attributes of the tokens with these canonical indices, ``[P]``, -1 for padding."""
    there = token >= 0
    sample = np.searchsorted(frame.offsets, token, side="right") - 1
    lengths = np.append(np.asarray(frame.lengths, np.int64), 0)  # that of padding
    return TokenAttributes(
        sample,
        token,
        np.where(there, token - frame.offsets[sample], 0),
        lengths[sample],
        {name: there & members[token] for name, members in classes.items()},
        tuple(f"{group}/{run}" for group, run in frame.samples),
    )


def classes_of_rows(
    shape: tuple[int, int], segments: Iterable[tuple[object, int, int, int, int]]
) -> dict[str, NDArray[np.bool_]]:
    """Return classes that depend on the places of tokens, ``[B * T]``; ``segments`` are those of a `TokenLayout`."""
    B, T = shape
    mask = np.zeros((B, T), bool)
    known = ("after_boundary", "before_boundary", "packed_behind", "packed_first")
    found = {name: np.zeros((B, T), bool) for name in known}
    rows: dict[int, list[tuple[int, int, int]]] = {}
    for _, start, stop, row, col in segments:
        rows.setdefault(row, []).append((col, start, stop - start))
    for row, runs in rows.items():
        for number, (col, start, width) in enumerate(sorted(runs)):
            end = col + width
            mask[row, col:end] = True
            found["after_boundary"][row, col] = number > 0 or start > 0
            found["before_boundary"][row, end - 1] = number < len(runs) - 1
            if len(runs) > 1:
                found["packed_behind" if number else "packed_first"][row, col:end] = True
    padded = np.pad(~mask, ((0, 0), (1, 1)), constant_values=False)
    found["beside_padding"] = mask & (padded[:, :-2] | padded[:, 2:])
    found["behind_padding"] = mask & ~mask[:, :1]
    found["before_padding"] = mask & ~mask[:, -1:]
    return {name: members.reshape(-1) for name, members in found.items() if members.any()}
