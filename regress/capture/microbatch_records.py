"""Records of microbatches: one backward call and the forward passes that it reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regress.capture.forward_pass import Array, Pass, stacked, together
from regress.capture.softmax_passes import SoftmaxPass
from regress.capture.token_gradient_of_pass import gradient_facts, unscaled
from regress.dump.trajectory import Trajectory, to_record
from regress.layout import SampleKey, TokenLayout

OTHER_RANKS = 1_000_000
"""Offset between ranks in the numbers of identical samples."""

Add = Callable[[int | None, str, Mapping[str, Any], Mapping[str, Any]], None]
"""Function that takes microbatch, type, tensors and metadata of a record of the current step."""


@dataclass(eq=False)
class Micro:
    """One backward call: the passes that it reached, and the loss that it started from."""

    task: int
    reached: list[Pass | SoftmaxPass] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    loss: float | None = None

    def place(self, filler: int | None) -> None:
        """Put the rows of passes that were seen at the softmax to their tokens."""
        self.passes = [p if isinstance(p, Pass) else p.placed(filler) for p in self.reached]


@dataclass(eq=False)
class Naming:
    """Gives samples without an id one of their own: made of their tokens, and the number of their repetition.

    Attributes:
        root: the first rank that holds the same samples as this one.
    """

    root: int = 0
    _seen: Counter[str] = field(default_factory=Counter)
    _known: dict[int, list[SampleKey]] = field(default_factory=dict)

    def of(self, p: Pass) -> list[SampleKey]:
        """Return the keys of the samples of a pass, the same on every call."""
        if p.samples is not None:
            return p.samples
        if id(p) not in self._known:
            self._known[id(p)] = [self.new(content) for content in p.contents]
        return self._known[id(p)]

    def new(self, key: str) -> SampleKey:
        """Return the key of a further sample with these tokens."""
        self._seen[key] += 1
        return key, self.root * OTHER_RANKS + self._seen[key] - 1


@dataclass(frozen=True, eq=False)
class _Stack:
    """Passes stacked by rows: their common layouts, and the places of each pass's rows."""

    passes: Sequence[Pass]
    layout: TokenLayout
    targets: TokenLayout
    places: Sequence[tuple[int, int]]
    keys: Sequence[SampleKey]

    @classmethod
    def of(cls, passes: Sequence[Pass], naming: Naming) -> _Stack:
        return cls(passes, *stacked(passes), [key for p in passes for key in naming.of(p)])

    def join(self, of: str, name: str) -> Array:
        return together([getattr(p, of).get(name) for p in self.passes], self.places, self.layout.shape)

    def names(self, of: str) -> list[str]:
        return list(dict.fromkeys(name for p in self.passes for name in getattr(p, of)))

    def meta(self, layout: TokenLayout) -> dict[str, Any]:
        return {"layout": layout.to_json(), "samples": [self.keys[s.sample] for s in layout.segments]}

    @property
    def divisor(self) -> dict[str, float]:
        """The temperature of the log-probs, where all passes have the same and tell it."""
        temperatures = {p.divisor for p in self.passes}
        (one,) = temperatures if len(temperatures) == 1 else (None,)
        return {} if one is None else {"temperature": one}


def write_micro(micro: Micro, number: int, naming: Naming, scale: float, add: Add) -> list[str]:
    """Write everything that belongs to a microbatch, and return the modules whose outputs could not be placed.

    Args:
        scale: factor between the loss of the mini-batch and the back-propagated one.
    """
    stack = _Stack.of(micro.passes, naming)
    at_tokens, at_targets = stack.meta(stack.layout), stack.meta(stack.targets)
    extra = {name: stack.join("extra", name) for name in stack.names("extra")}
    masks = {} if "loss_mask" not in extra else {"response_mask": extra.pop("loss_mask") != 0}
    inputs = {name: stack.join("inputs", name) for name in stack.names("inputs")}
    add(number, "batch_inputs", {**inputs, **masks}, at_tokens)
    left_out = _write_activations(stack, number, at_tokens, add)
    values = {name: stack.join("values", name) for name in stack.names("values")}
    ids = together([p.target_ids for p in micro.passes], stack.places, stack.layout.shape)
    add(
        number,
        "forward_data",
        {**values, **masks, "input_ids": ids},
        {**at_targets, **stack.divisor},
    )
    if extra:
        valid = {"effective_valid": masks["response_mask"]} if masks else {}
        add(number, "is_loss_debug", {**extra, **valid}, at_targets)
    if micro.loss is not None:
        loss = np.asarray(micro.loss / scale, values["log_probs"].dtype)
        add(number, "loss", {"loss": loss}, {**at_targets, "backward_scale": scale})
    found = {name: stack.join("gradients", name) for name in stack.names("gradients")}
    if found:
        add(
            number,
            "token_gradient",
            unscaled(found, scale),
            {**at_targets, **gradient_facts(micro.passes, scale)},
        )
    return left_out


def _write_activations(stack: _Stack, number: int, meta: Mapping[str, Any], add: Add) -> list[str]:
    """Write outputs of modules that have a row for each token, and return the names of those that have not."""
    found: dict[str, Array] = {}
    shards: dict[str, Any] = {}
    left_out = []
    for name in stack.names("activations"):
        parts = [_by_row(p.activations.get(name, (None, None, None)), p.layout.shape) for p in stack.passes]
        arrays, layouts = [array for array, _ in parts], [layout for _, layout in parts]
        shapes = [a.shape if at is None else at.shape for a, at in parts if a is not None]
        grids = [p.layout.shape for p, a in zip(stack.passes, arrays, strict=True) if a is not None]
        fits = all(shape[:2] == grid for shape, grid in zip(shapes, grids, strict=True))
        if fits and not any(layouts):
            found[name] = together(arrays, stack.places, stack.layout.shape)
        elif fits and len(parts) == 1:
            found[name], shards[name] = arrays[0], layouts[0].to_json()
        else:
            left_out.append(name)
    if found:
        add(number, "activations", found, {**meta, "shards": shards} if shards else meta)
    return left_out


def _by_row(output: tuple[Any, Any, Any], grid: tuple[int, int]) -> tuple[Any, Any]:
    """Return a whole output of rows of tokens, as routers have, as ``[B, T, ...]``; any other as it is.

    Rows of ``[B * T, ...]`` and of ``[T * B, ...]`` look alike: what the modules around get tells which. Where nothing
    does, the output stays as it is and is left out.
    """
    array, part, order = output
    rows, columns = grid
    flat = array is not None and part is None and array.shape[:1] == (rows * columns,)
    if not flat or array.shape[:2] == grid:
        return array, part
    if 1 in grid or order == grid:
        return array.reshape(*grid, *array.shape[1:]), None
    if order == (columns, rows):
        return np.ascontiguousarray(array.reshape(columns, rows, *array.shape[1:]).swapaxes(0, 1)), None
    return array, part


def write_classified(passes: Iterable[tuple[str, Pass]], naming: Naming, add: Add) -> None:
    """Write the log-probs of passes without gradients, all of one kind in one record of the step."""
    kinds: dict[str, list[Pass]] = {}
    for kind, p in passes:
        kinds.setdefault(kind, []).append(p)
    for kind, found in kinds.items():
        stack = _Stack.of(found, Naming(naming.root))
        meta = {**stack.meta(stack.targets), **stack.divisor}
        add(None, kind, {kind: stack.join("values", "log_probs")}, meta)


def write_rewards(micros: Iterable[Micro], naming: Naming, add: Add) -> None:
    """Write the samples whose rewards were tapped as rollouts of the step."""
    found = []
    for p in (p for micro in micros for p in micro.passes if p.rewards is not None):
        assert p.rewards is not None
        for s, key, reward in zip(p.layout.segments, naming.of(p), p.rewards, strict=True):
            here = np.s_[s.row, s.col : s.col + s.stop - s.start]
            mask = p.extra.get("loss_mask")
            kept = [0] * (s.stop - s.start) if mask is None else (mask[here] != 0).astype(int).tolist()
            prompt = kept.index(1) if 1 in kept else 0
            found.append(Trajectory(*key, p.inputs["input_ids"][here].tolist(), kept, reward, prompt))
    if found:
        record = to_record(found, 0)
        add(None, "trajectory", record.tensors, record.meta)
