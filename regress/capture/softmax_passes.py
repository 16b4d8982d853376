"""Forward passes as the softmax shows them: the rows of logits put to the tokens that they predict.

A row is known by the token that it trains on. Of the ways in which rows can lie along the columns of the ids (all
columns, all but the last, the last ones, one after another in chunks), the first is taken under which every row that
has a gradient trains on the token that follows. The last target of rows that were cut by one column is a token of its
sample, too: a sample has the same tokens, and so the same id, in whatever batch it lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regress.capture.forward_pass import Array, Pass, contents_of, inputs_of
from regress.capture.layout_inference import Arrangement, infer_layout
from regress.capture.row_placement import Group, placed, placed_groups
from regress.capture.softmax_calls import LOSS, RETURNED, SeenRows
from regress.capture.softmax_rows import UNKNOWN
from regress.capture.token_gradient import ROUNDING
from regress.capture.token_gradient_of_pass import accuracy_of
from regress.errors import CaptureError
from regress.layout import Segment, TokenLayout

Ints = NDArray[np.int64]
_LARGEST = 0.02
"""Largest part of a row's gradient that may be rounding, whatever the dtype."""


def rounding(dtype: torch.dtype) -> float:
    """Return the largest part of a row's gradient that may be rounding of this dtype."""
    return min(_LARGEST, 8 * ROUNDING * torch.finfo(dtype).eps)


@dataclass(eq=False)
class SoftmaxPass:
    """A forward pass of which ids and rows of logits were seen.

    Attributes:
        found: its inputs; ``pad_token_id`` counts where nothing else tells padding.
        absolute: True if the model has a table of positions.
        dtype: returns the coarsest dtype that the trainer computes in.
        samples: key of each sample, where given.
        temperature: divisor of the logits that the trainer says it used; the rows are already divided.
        divisor: the one that head and hidden states tell.
        seen: rows, in the order of the calls.
        held: values that were tapped for this pass.
        reached: number of the microbatch whose backward call reached it first.
        told_by: what its loss was read from last, ``"logits"`` or ``"hidden_states"``.
        from_states: the pass as read from hidden states, where no softmax showed it.
        last_logits: ``[1, V]`` logits that the model returned for its last state, to check the head by.
    """

    found: Arrangement
    absolute: bool
    temperature: float | None
    dtype: Callable[[], torch.dtype]
    samples: Any = None
    seen: list[SeenRows] = field(default_factory=list)
    held: list[Mapping[str, Any]] = field(default_factory=list)
    reached: int | None = None
    divisor: float | None = None
    told_by: str = ""
    from_states: Pass | None = None
    last_logits: torch.Tensor | None = None

    def hold(self, values: Mapping[str, Any]) -> None:
        """Keep values that were tapped for this pass until its rows are put to tokens."""
        if values:
            self.held.append(dict(values))

    @cached_property
    def groups(self) -> list[Group]:
        """Rows at their places, in groups that cover each place once; none of rows that no softmax made.

        Raises:
            CaptureError: if the rows fit the ids under no arrangement.
        """
        return [] if self.from_states is not None else self.groups_told

    @property
    def _read(self) -> list[SeenRows]:
        return [one for one in self.seen if one.rows is not None]

    @property
    def is_told(self) -> bool:
        """True if the rows that backward passes reached so far tell the loss: a softmax made them, and each fits."""
        read = self._read
        if not any(one.level == LOSS for one in read) and any(
            _unexplained(one, self.dtype()) for one in read
        ):
            return False
        try:
            return bool(self.groups_told)
        except CaptureError:
            return False

    @property
    def groups_told(self) -> list[Group]:
        """As `groups`, of the rows that were reached so far."""
        read = self._read
        level = min((one.level for one in read), default=0)
        chosen = [one for one in read if one.level == level]
        if level == RETURNED and any(_unexplained(one, self.dtype()) for one in chosen):
            raise CaptureError("""no softmax of the logits was seen, and their gradient is not that of a softmax: what
            turns them into log-probs is compiled or of another language, and divides or bounds them before; run it
            uncompiled, or name the last hidden state by record(decoder=..., head=...)""")
        return [*placed_groups(chosen, self.found.input_ids)]

    def following(self, rows: SeenRows) -> Ints | None:
        """Return the token that follows each of some rows, where they can be placed by themselves."""
        group = placed([rows], self.found.input_ids)
        if group is None:
            return None
        ids = self.found.input_ids
        wide = np.concatenate([ids, np.full((len(ids), 1), UNKNOWN)], 1)
        return wide.reshape(-1)[group.places]

    @property
    def fillers(self) -> Counter[int]:
        """Token that a row ends with behind the last one that is trained on -> how often it stands there."""
        found = Counter[int]()
        if self.from_states is not None:
            return found
        ids = _extended(self.found.input_ids, self.groups, None)
        for row, last in zip(ids, _last_trained(ids, self.groups), strict=True):
            targets = row[row != UNKNOWN]
            tail = targets[last + 1 :][::-1] if last else targets[:0]
            found[int(targets[-1])] += next(
                (n for n, token in enumerate(tail) if token != targets[-1]), len(tail)
            )
        return found

    def placed(self, filler: int | None) -> Pass:
        """Return the pass with every row at its token.

        Args:
            filler: the token that pads rows, where no mask and no configuration tells it.
        """
        if self.from_states is not None:
            return self.from_states
        groups = self.groups
        pad = self.found.pad_token_id
        wide = _extended(self.found.input_ids, groups, filler if pad is None else pad)
        arrangement = self._arrangement(wide, groups, filler)
        layout = infer_layout(arrangement)
        values = _Values.of(groups, layout, rounding(self.dtype()))
        ids = arrangement.input_ids
        p = Pass(
            layout,
            values.targets,
            inputs_of(arrangement, layout, self.absolute),
            np.where(values.targets.attention_mask, ids, 0),
            contents_of(np.where(layout.attention_mask, ids, 0), layout),
            values=values.of_tokens,
            gradients=values.gradients,
            divisor=self.temperature or self.divisor,
            temperatures=[one for one in (self.divisor or self.temperature,) if one is not None],
            accuracy=values.accuracy(torch.finfo(self.dtype()).eps),
            strays=values.strays,
            reached=self.reached,
        )
        p.samples = None if self.samples is None else self.samples(len(p.contents))
        for arguments in self.held:
            p.hold(arguments)
        return p

    def _arrangement(self, ids: Ints, groups: Sequence[Group], filler: int | None) -> Arrangement:
        """Return the inputs with the tokens that only targets show, and a mask where only targets tell one."""
        T, found = self.found.input_ids.shape[1], self.found
        more = ids.shape[1] - T
        mask, positions = found.attention_mask, found.position_ids
        if found.cu_seq_lens is not None or (positions is not None and mask is None):
            return found
        if mask is None:
            mask = _mask_of(ids, groups, found.pad_token_id, filler)
        elif more:
            last = (ids[:, -1:] != UNKNOWN) & (mask[:, -1:] != 0)
            mask = np.concatenate([mask, np.where(last, mask[:, -1:], 0)], 1)
        if positions is not None and more:
            positions = np.concatenate([positions, positions[:, -1:] + 1], 1)
        return replace(found, input_ids=np.maximum(ids, 0), attention_mask=mask, position_ids=positions)


def _unexplained(seen: SeenRows, dtype: torch.dtype) -> bool:
    """Return True if a softmax of the logits leaves more of a row's gradient than rounding."""
    return seen.rows is not None and float(seen.rows.residual_R.max()) > rounding(dtype)


def _extended(ids: Ints, groups: Sequence[Group], padding: int | None) -> Ints:
    """Return the ids ``[B, T + 1]`` with the targets beyond the last column; ``[B, T]`` where there are none.

    Where every row takes its own first token there, targets were rolled, and no token follows.
    """
    B, T = ids.shape
    last = np.full(B, UNKNOWN)
    for group in groups:
        row, column = group.cells
        taken = (column == T) & (group.targets >= 0)
        first = ids[row[taken], 0]
        if len(set(first.tolist())) > 1 and (group.targets[taken] == first).all():
            continue
        real = group.live | (group.targets != (UNKNOWN if padding is None else padding))
        beyond = (column == T) & (group.targets >= 0) & real
        last[row[beyond]] = group.targets[beyond]
    return ids if (last == UNKNOWN).all() else np.concatenate([ids, last[:, None]], 1)


def _mask_of(ids: Ints, groups: Sequence[Group], pad: int | None, filler: int | None) -> Ints:
    """Return where tokens lie: padding at the ends left out, but for a token that is trained on.

    Args:
        pad: padding, as the model or the user tells it; filler: as the tails of other rows do.
    """
    mask, last = np.zeros(ids.shape, np.int64), _last_trained(ids, groups)
    for b, row in enumerate(ids):
        stop = max(last[b] + 1, _end(row, filler if pad is None else pad))
        start = next((c for c in range(stop) if row[c] != pad), stop) if pad is not None else 0
        mask[b, start:stop] = 1
    return mask


def _last_trained(ids: Ints, groups: Sequence[Group]) -> Ints:
    """Return the last column of each row whose token has a gradient; 0 where none has."""
    last = np.zeros(len(ids), np.int64)
    for group in groups:
        row, column = group.cells
        np.maximum.at(last, row[group.live], column[group.live])
    return last


def _end(row: Ints, filler: int | None) -> int:
    stop = len(row)
    while stop and row[stop - 1] in (UNKNOWN, filler):
        stop -= 1
    return stop


@dataclass(frozen=True)
class _Values:
    """Hold the values of a layout's tokens, ``[B, T]`` each, that rows tell."""

    targets: TokenLayout
    of_tokens: dict[str, Array]
    gradients: dict[str, Array]
    errors: dict[str, float]
    strays: int

    @classmethod
    def of(cls, groups: Sequence[Group], layout: TokenLayout, most: float) -> _Values:
        shape = layout.shape
        found = {name: np.zeros(shape) for name in ("log_probs", "entropy", *_GRADIENTS)}
        recoverable, covered, read = np.ones(shape, bool), np.zeros(shape, bool), np.zeros(shape, bool)
        predictable = np.zeros(shape, bool)
        for s in layout.segments:
            predictable[s.row, s.col + 1 : s.col + s.stop - s.start] = True
        errors = dict.fromkeys(("token_gradient", "entropy_gradient"), 0.0)
        strays = 0
        explained = sorted(groups, key=lambda group: float(group.rows.residual_R.max()) > most)
        for number, group in enumerate(explained):
            rows = {name: each.cpu().numpy() for name, each in vars(group.rows).items()}
            row, column = group.cells
            inside = column < shape[1]
            inside[inside] &= predictable[row[inside], column[inside]]
            strays += int((rows["live_R"] & ~inside).sum())
            at, here = (row[inside], column[inside]), {name: each[inside] for name, each in rows.items()}
            recorded = np.isfinite(here["log_probs_R"])
            if number == 0:
                covered[at] = recorded
                found["log_probs"][at] = np.nan_to_num(here["log_probs_R"])
                found["entropy"][at] = here["entropies_R"] * recorded
            good = here["recoverable_R"]
            recoverable[at] &= good
            leads_on = read[at] & (here["residual_R"] > most)  # to rows that were read by themselves
            good = good & ~leads_on
            read[at] |= here["live_R"]
            for name, (value, error) in _GRADIENTS.items():
                if error is None:
                    found[name][at] = np.maximum(found[name][at], here[value])
                    continue
                new = np.where(good, here[value], 0.0)
                found[name][at] += new
                bounds = here[error][good & np.isfinite(here[error])]
                errors[name] += float(bounds.max(initial=0.0))
        targets = TokenLayout(shape, tuple(_runs(layout, covered)))
        gradients = {name: found[name] for name in _GRADIENTS} | {"recoverable": recoverable}
        return cls(
            targets, {name: found[name] for name in ("log_probs", "entropy")}, gradients, errors, strays
        )

    def accuracy(self, eps: float) -> dict[str, float]:
        """Return the bounds of the errors, by tensor."""
        return accuracy_of(self.errors, eps)


_GRADIENTS: Mapping[str, tuple[str, str | None]] = {
    "token_gradient": ("log_prob_R", "log_prob_error_R"),
    "entropy_gradient": ("entropy_R", "entropy_error_R"),
    "token_residual": ("residual_R", None),
}


def _runs(layout: TokenLayout, covered: NDArray[np.bool_]) -> Iterator[Segment]:
    """Yield the covered tokens of each sample, in runs."""
    for s in layout.segments:
        own = np.concatenate([[0], covered[s.row, s.col : s.col + s.stop - s.start].astype(np.int8), [0]])
        edges = np.flatnonzero(np.diff(own))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield s._replace(start=s.start + start, stop=s.start + stop, col=s.col + start)
