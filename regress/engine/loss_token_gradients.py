"""Token gradients: gradients of the loss with respect to each token's log-prob, entropy and logits.

A backward pass runs after the coordinates of its microbatch were left, in threads without context variables,
in an order that a schedule chooses. So recorder and coordinates are bound when the forward pass makes a
tensor, and a hook on the tensor catches its gradient without changing it. A tensor that the loss does not
depend on gets zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regress.dump.coordinates import Coordinates
from regress.dump.module_selection import in_backward
from regress.dump.record import LOSS_ROWS
from regress.dump.taps import BoundTap, bound, current, wanted
from regress.engine.mini_batch import Microbatch
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import ShardLayout

STAGE = "token_gradient"
Shard = Callable[[tuple[int, ...]], ShardLayout | None]


class _Gradient:
    """Sum of the gradients that reach a tensor, ``[K]`` or ``[K, V]`` on the CPU; zeros if none does."""

    def __init__(self, of: Tensor) -> None:
        self._zeros = torch.zeros((), dtype=of.dtype).expand(of.shape)  # one number, whatever the shape
        self._sum: Tensor | None = None
        if of.requires_grad:
            of.register_hook(self._add)

    @torch.no_grad()
    def _add(self, gradient: Tensor | None) -> None:
        if gradient is not None:  # the loss may depend on the function's other output only
            known = gradient.detach().to("cpu", copy=True)
            self._sum = known if self._sum is None else self._sum.add_(known)

    def over(self, scale: float) -> Tensor:
        """Return the gradient divided by the scale of the backward pass."""
        value = self._zeros if self._sum is None else self._sum
        return value if scale == 1.0 else value / scale


@dataclass
class _Caught:
    """Gradients of one microbatch."""

    put: BoundTap
    logits: list[_Gradient] = field(default_factory=list)
    shard: Shard = lambda shape: None
    micro: Microbatch | None = None
    log_probs: _Gradient | None = None
    entropy: _Gradient | None = None

    @torch.no_grad()
    def write(self, scale: float) -> None:
        """Record the caught gradients; a microbatch whose loss was never computed has none."""
        if self.micro is None or self.log_probs is None:
            return
        token = self.log_probs.over(scale)
        entropy = torch.zeros_like(token) if self.entropy is None else self.entropy.over(scale)
        tensors = {"token_gradient": self._at_targets(token), "entropy_gradient": self._at_targets(entropy)}
        targets = self.micro.place.targets
        meta: dict[str, object] = {"samples": self.micro.samples_of(targets), "backward_scale": scale}
        if self.logits:
            rows = torch.cat([part.over(scale) for part in self.logits]).unsqueeze(0)
            tensors["logit_gradient"] = rows
            meta["logit_gradient"] = LOSS_ROWS
            if (shard := self.shard(tuple(rows.shape))) is not None:
                meta["shards"] = {"logit_gradient": shard.to_json()}
        self.put(tensors, layout=targets, meta=meta)

    def _at_targets(self, values: Tensor) -> Tensor:
        assert self.micro is not None
        out = values.new_zeros(self.micro.place.targets.shape)
        out.view(-1)[self.micro.local.to("cpu")] = values
        return out


@dataclass
class _Open:
    """Microbatches whose backward pass is not over, and the scale of their losses."""

    scale: float
    caught: dict[Coordinates, _Caught] = field(default_factory=dict)


_open: ContextVar[_Open | None] = ContextVar("regress_token_gradients", default=None)


@contextmanager
def recorded(backward_scale: float) -> Iterator[None]:
    """Record the token gradients of the passes inside, if they are wanted; nothing after an exception.

    ``backward_scale`` multiplies each share of the loss before the backward pass; it is divided out of the
    record.
    """
    if not wanted(STAGE):
        yield
        return
    token = _open.set(_Open(backward_scale))
    try:
        yield
        write()
    finally:
        _open.reset(token)


def write() -> None:
    """Record the microbatches so far, whose backward passes are over."""
    if (here := _open.get()) is not None:
        for caught in here.caught.values():
            caught.write(here.scale)
        here.caught.clear()


def catch_logits(logits: Tensor, shard: Shard) -> None:
    """Catch the gradient of logits ``[K, V]``: those of all loss tokens of the microbatch, or of the next
    chunk of them.

    ``shard(shape)`` is the part of all logits ``[1, K, V]`` that logits of this shape are; ``None`` for all
    of them. Logits that gradient checkpointing computes again are ignored.
    """
    if _open.get() is not None and not in_backward() and (caught := _here()) is not None:
        caught.logits.append(_Gradient(logits))
        caught.shard = shard


def catch(micro: Microbatch, out: TokenLogProbs) -> None:
    """Catch the gradients of log-probs and entropies ``[K]`` of a microbatch's loss tokens."""
    if _open.get() is not None and (caught := _here()) is not None:
        caught.micro = micro
        caught.log_probs = _Gradient(out.log_probs)
        caught.entropy = None if out.entropy is None else _Gradient(out.entropy)


def _here() -> _Caught | None:
    """Return the gradients caught for the microbatch at the current coordinates."""
    here, where = _open.get(), current()
    if here is None or where is None:
        return None
    if where not in here.caught:
        put = bound(STAGE)
        if put is None:
            return None
        here.caught[where] = _Caught(put)
    return here.caught[where]
