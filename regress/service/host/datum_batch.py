"""Datums of a request as a batch of the engine, checked entry by entry.

The model reads the ``T`` tokens of a datum and then its last target, as a trainer that has the whole sequence does;
the target of position ``j`` is the loss token at position ``j + 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from regress.dump.trajectory import Trajectory
from regress.engine.mini_batch import LossTokens, TokenBatch
from regress.service.host.service_losses import Loss
from regress.service.service_api import Array, Datum, PassRequest, ServiceError

IGNORED = -100
"""Target that is left out of the loss."""


@dataclass(frozen=True)
class Limits:
    """Sizes that a datum must keep: token ids below ``vocabulary``, and at most ``length`` tokens and targets."""

    vocabulary: int
    length: int


@dataclass(frozen=True)
class Prepared:
    """Request as the engine takes it.

    Attributes:
        counted: ``[K]`` True for loss tokens that count: the loss depends on no other.
        places: for each datum the positions of its loss tokens among its targets, ``[T]`` or, row after row,
            ``[T, N]``.
        several: True if a datum has several targets at a position.
    """

    batch: TokenBatch
    tokens: LossTokens
    counted: Array
    places: Sequence[Array]
    several: bool


def prepare(
    request: PassRequest,
    loss: Loss,
    limits: Limits,
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Prepared:
    """Return a request's datums as a batch with the quantities of its loss.

    Args:
        name: name of the request in dumps; with the datum's number it is the key of a sample.

    Raises:
        ServiceError: naming the datum and the array, if anything is missing, too much, or out of its range.
    """
    if not request.data:
        raise ServiceError("the request has no datums; send at least one")
    rows = [_Row(number, datum, loss, request, limits) for number, datum in enumerate(request.data)]
    batch = TokenBatch(
        [row.trajectory(name) for row in rows],
        targets=[row.shown for row in rows],
        effective=[[0, *row.effective] for row in rows],
        choices=[[[], *row.choices] for row in rows] if any(row.several for row in rows) else None,
        device=device,
    )
    if not len(batch.sequence):
        raise ServiceError(
            f"every target_tokens entry is {IGNORED}, so nothing is left to compute; send targets"
        )

    def gathered(values: Sequence[Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device, dtype)

    counted = np.concatenate([row.counted[row.place] for row in rows])
    tokens = replace(
        batch.loss_tokens(),
        counted=torch.from_numpy(counted).to(device),
        weights=torch.from_numpy(np.concatenate([row.weights for row in rows])).to(device),
        advantages=gathered([row.advantages for row in rows]),
        old_log_probs=gathered([row.old for row in rows]) if loss.ratio else None,
    )
    several = any(row.several for row in rows)
    return Prepared(batch, tokens, counted, [row.place for row in rows], several)


class _Row:
    """One datum, checked; its targets and their values are flat, row after row, where a position has several."""

    def __init__(self, number: int, datum: Datum, loss: Loss, request: PassRequest, limits: Limits) -> None:
        self._name = f"datum {number}" if datum.id is None else f"datum {number} ({datum.id})"
        self._number, self._datum, self._limits = number, datum, limits
        self._check_names(loss, request.loss)
        self.tokens = self._ids("tokens", datum.tokens)
        self._length()
        self._rows = self._ids("target_tokens", datum.inputs["target_tokens"], targets=True)
        if self._rows.shape[1:] == (1,):
            self._rows = self._rows[:, 0]
        self.several = self._rows.ndim == 2
        if self.several and (loss.ratio or request.config.get("entropy_coeff")):
            what = f"loss_fn={request.loss}" if loss.ratio else "entropy_coeff"
            raise ServiceError(f"""{self._name}: target_tokens has the shape {list(self._rows.shape)}, and {what} takes
            one target a token; send a list, or cross_entropy without entropy_coeff""")
        targets = self._rows.ravel()
        self.place = np.flatnonzero(targets != IGNORED)
        mask = self._mask()
        values = (
            np.zeros(len(targets)) if loss.advantages is None else self._values(loss.advantages, loss.default)
        )
        old = self._values("logprobs", None) if loss.ratio else np.zeros(len(targets))
        entropy = bool(request.config.get("entropy_coeff"))
        if entropy and mask is None:
            raise ServiceError(f"""{self._name}: entropy_coeff={request.config["entropy_coeff"]} rewards the entropy of
            the tokens that were sampled, and without loss_mask nothing tells which those are; send loss_mask or leave
            entropy_coeff out""")
        kept = np.ones(len(targets), bool) if mask is None else mask
        counted = kept & (targets != IGNORED)
        if mask is None and loss.advantages is not None and loss.kind != "dro":
            counted &= values != 0  # all losses but those of their own are multiples of the advantage
        self.counted = counted
        self.weights = kept[self.place].astype(np.float64)
        self.advantages = np.where(kept, loss.sign * values, 0.0)[self.place]
        self.old = np.where(kept, old, 0.0)[self.place]

    @property
    def effective(self) -> Array:
        """``[T]`` True at positions with a target that counts."""
        found: Array = self.counted.reshape(len(self.tokens), -1).any(axis=1)
        return found

    @property
    def choices(self) -> list[list[int]]:
        """Targets at each position, those that are left out not among them."""
        return [
            [id for id in row.tolist() if id != IGNORED] for row in self._rows.reshape(len(self.tokens), -1)
        ]

    @property
    def shown(self) -> list[int]:
        """Token ids that the model has to predict, at the places of the tokens; where there is none, the token."""
        first = self._first
        return [self._whole[0], *np.where(first == IGNORED, self._whole[1:], first).tolist()]

    def trajectory(self, name: str) -> Trajectory:
        """Return the datum as a sample of the engine."""
        mask = [0, *(self._first != IGNORED).astype(int).tolist()]
        return Trajectory(name, self._number, self._whole, mask, reward=0.0, prompt_length=1)

    @cached_property
    def _first(self) -> Array:
        """First target at each position, `IGNORED` where there is none."""
        rows = self._rows.reshape(len(self.tokens), -1)
        column = (rows != IGNORED).argmax(axis=1)
        found: Array = rows[np.arange(len(rows)), column]
        return found

    @cached_property
    def _whole(self) -> list[int]:
        last = int(self._first[-1])
        return [*self.tokens.tolist(), 0 if last == IGNORED else last]

    def _check_names(self, loss: Loss, name: str) -> None:
        needed = ["target_tokens", *(["logprobs"] if loss.ratio else [])]
        if loss.advantages is not None and loss.default is None:
            needed.append(loss.advantages)
        for key in needed:
            if key not in self._datum.inputs:
                raise ServiceError(f"{self._name} lacks {key}, which loss_fn={name} needs; send it")
        known = {*needed, "loss_mask", *([loss.advantages] if loss.advantages else [])}
        if loss.advantages is None:
            known |= {"weights", "logprobs", "advantages"}  # only log-probs are asked for
        for key in self._datum.inputs:
            if key not in known:
                raise ServiceError(
                    f"{self._name} has {key}, which loss_fn={name} does not use; it uses {', '.join(sorted(known))}"
                )

    def _length(self) -> None:
        count = len(self.tokens)
        if count < 1 or count >= self._limits.length:
            raise ServiceError(f"""{self._name} has {count} tokens, and 1 to {self._limits.length - 1} fit beside the
            last target into the model's context of {self._limits.length}; shorten it""")

    def _ids(self, name: str, array: Array, *, targets: bool = False) -> Array:
        if array.ndim not in ((1, 2) if targets else (1,)) or array.dtype.kind not in "iu":
            raise ServiceError(f"""{self._name}: {name} has the shape {list(array.shape)} and dtype {array.dtype}; send
            a list of integers""")
        if targets and (len(array) != len(self.tokens) or not array.size):
            raise ServiceError(f"""{self._name}: {name} has the shape {list(array.shape)} for {len(self.tokens)} tokens;
            send one target a token, or a row of them""")
        bad = (array < 0) | (array >= self._limits.vocabulary)
        if targets:
            bad &= array != IGNORED
        if bad.any():
            raise ServiceError(f"""{self._name}: {name} holds {int(array[bad][0])}, and token ids are 0 to
            {self._limits.vocabulary - 1}; send those of the model's tokenizer""")
        return array.astype(np.int64)

    def _values(self, name: str, default: float | None) -> Array:
        if name not in self._datum.inputs:
            assert default is not None
            return np.full(self._rows.size, default)
        array = self._datum.inputs[name]
        if array.shape[1:] == (1,):
            array = array[:, 0]
        if array.shape != self._rows.shape:
            sizes = f"{list(array.shape)} for {len(self.tokens)} tokens"
            of = f" with targets of the shape {list(self._rows.shape)}" if self.several else ""
            each = "target" if self.several else "token"
            raise ServiceError(f"{self._name}: {name} has the shape {sizes}{of}; send one value a {each}")
        if array.dtype.kind not in "iuf":
            raise ServiceError(f"{self._name}: {name} has the dtype {array.dtype}; send real numbers")
        found = array.astype(np.float64).ravel()
        if not np.isfinite(found).all():
            where = int(np.flatnonzero(~np.isfinite(found))[0])
            raise ServiceError(
                f"{self._name}: {name} is {found[where]} at position {where}; send finite numbers",
                code="not_finite",
            )
        return found

    def _mask(self) -> Array | None:
        if "loss_mask" not in self._datum.inputs:
            return None
        values = self._values("loss_mask", None)
        if not ((values == 0) | (values == 1)).all():
            raise ServiceError(
                f"{self._name}: loss_mask holds other values than 0 and 1; send weights for those"
            )
        mask: Array = values != 0
        return mask


def split(values: Array, prepared: Prepared, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return ``[K]`` values of loss tokens datum by datum, each in a shape; 0 where a target is left out."""
    found, start = [], 0
    for place, shape in zip(prepared.places, shapes, strict=True):
        row = np.zeros(math.prod(shape), values.dtype)
        row[place] = values[start : start + len(place)]
        start += len(place)
        found.append(row.reshape(shape))
    return found
