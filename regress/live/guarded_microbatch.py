"""Values of one microbatch, as the trainer hands them over, and the gradient that comes back to its log-probs.

Rules about its tokens alone: values are finite, and the ratio of a policy with itself is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regress.errors import GuardError

Recompute = Callable[[], Tensor]
"""Function that computes the log-probs of a microbatch again, with the weights that the model then holds."""


@dataclass(eq=False)
class Microbatch:
    """One forward pass of the policy: ``[B, T]`` token values, ``[B]`` sample values.

    Attributes:
        log_probs: of the trained policy, detached.
        mask: loss tokens.
        advantages: ``[B, T]``.
        samples: an id for each row; groups: the group of each row.
        weight_versions: of the weights that each token was sampled with; ``weight_version`` those that are trained.
        gradient: derivative of the back-propagated loss by the log-probs; None until it is known.
        passes: backward passes that reached the log-probs.
    """

    number: int
    log_probs: Tensor
    mask: Tensor
    old: Tensor | None = None
    sampler: Tensor | None = None
    advantages: Tensor | None = None
    samples: list[Any] | None = None
    groups: list[Any] | None = None
    routing: Tensor | None = None
    sampler_routing: Tensor | None = None
    weight_versions: Tensor | None = None
    weight_version: int | None = None
    on_policy: bool = False
    recompute: Recompute | None = None
    gradient: Tensor | None = None
    passes: int = 0

    def reached(self, gradient: Tensor) -> None:
        """Keep the gradient of a backward pass; those of several add up."""
        found = gradient.detach().to(torch.float64)
        self.gradient = found if self.gradient is None else self.gradient + found
        self.passes += 1

    @property
    def expected(self) -> Tensor | None:
        """The trainer's log-probs at the weights that sampled, ``[B, T]``; None if unknown."""
        return self.log_probs if self.old is None and self.on_policy else self.old

    def place(self, index: int) -> str:
        """Return words for a loss token, counted over the rows."""
        row, column = torch.nonzero(self.mask)[index].tolist()
        sample = "" if self.samples is None else f" (sample {self.samples[row]})"
        return f"row {row}, column {column} of microbatch {self.number}{sample}"


def open_microbatch(
    number: int,
    log_probs: Tensor,
    loss_mask: Tensor | None,
    *,
    tokens: dict[str, Tensor | None],
    advantages: Tensor | None,
    samples: Sequence[Any] | None,
    groups: Sequence[Any] | None,
) -> Microbatch:
    """Return a microbatch whose values were checked for their shapes.

    Raises:
        GuardError: if a value does not fit the log-probs ``[B, T]``.
    """
    values = {"loss_mask": loss_mask, **tokens, "advantages": advantages}
    _refuse_types(values, {"samples": samples, "groups": groups})
    if not isinstance(log_probs, Tensor) or not log_probs.is_floating_point():
        kind = log_probs.dtype if isinstance(log_probs, Tensor) else type(log_probs).__name__
        raise GuardError(f"guard.batch(log_probs=...) is of type {kind}: give a tensor of log-probs, [B, T]")
    if log_probs.dim() != 2:
        raise GuardError(
            f"guard.batch(log_probs=...) has the shape {list(log_probs.shape)}: give one for each token, [B, T]"
        )
    B, T = log_probs.shape
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask != 0
    for name, value in {"loss_mask": mask, **tokens}.items():
        if value is not None and value.shape[:2] != (B, T):
            raise GuardError(f"""guard.batch({name}=...) has the shape {list(value.shape)}, log_probs {[B, T]}: give
            both the same rows and columns""")
    for name, ids in {"samples": samples, "groups": groups}.items():
        if ids is not None and len(ids) != B:
            raise GuardError(
                f"guard.batch({name}=...) tells {len(ids)} ids for {B} rows: give one for each row"
            )
    return Microbatch(
        number,
        log_probs.detach(),
        mask.detach(),
        advantages=None if advantages is None else _spread(advantages.detach(), B, T),
        samples=None if samples is None else [_plain(value) for value in samples],
        groups=None if groups is None else [_plain(value) for value in groups],
    )


def _refuse_types(tensors: Mapping[str, Any], ids: Mapping[str, Any]) -> None:
    """Raise `GuardError` for values of a microbatch that are not tensors, and ids that are not a sequence of them."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise GuardError(f"guard.batch({name}=...) is of type {type(value).__name__}: give a tensor")
    for name, value in ids.items():
        if value is not None and (isinstance(value, str | bytes) or not hasattr(value, "__len__")):
            raise GuardError(
                f"guard.batch({name}=...) is of type {type(value).__name__}: give a sequence with an id for each row"
            )
        for one in value if isinstance(value, Sequence) else ():
            if not isinstance(one, Hashable):
                raise GuardError(f"guard.batch({name}=...) has the id {one!r}: give texts, numbers or tuples")


def _spread(advantages: Tensor, B: int, T: int) -> Tensor:
    if advantages.shape == (B,):
        advantages = advantages[:, None]
    if advantages.shape not in ((B, 1), (B, T)):
        raise GuardError(f"""guard.batch(advantages=...) has the shape {list(advantages.shape)}: give [{B}], one for
        each row, or [{B}, {T}]""")
    return advantages.expand(B, T)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Spacing of numbers at 1."""

ROUNDING = 32.0
"""Spacings by which a log-prob may move when rows are split, padded or packed otherwise; benchmarks/guard.py
prints the largest one of its runs."""


def not_finite(micro: Microbatch) -> Iterator[str]:
    """Yield a sentence for each kind of value that is not finite at a loss token."""
    for name, values in (
        ("log_probs", micro.log_probs),
        ("old_log_probs", micro.old),
        ("advantages", micro.advantages),
    ):
        if values is None:
            continue
        wrong = ~torch.isfinite(values[micro.mask])
        if bool(wrong.any()):
            index = int(wrong.nonzero()[0])
            value = float(values[micro.mask][index])
            yield f"{name} is {value} at {micro.place(index)}, and at {int(wrong.sum())} of {wrong.numel()} loss tokens"


def off_policy(micro: Microbatch, eps: float) -> str | None:
    """Return a sentence if a ratio of policies with the same weights is not 1.

    Args:
        eps: spacing of the numbers in which the model computes.
    """
    if not micro.on_policy or micro.old is None:
        return None
    gap = (micro.log_probs - micro.old)[micro.mask].to(torch.float64)
    bound = ROUNDING * eps * (1 + micro.log_probs[micro.mask].to(torch.float64).abs())
    over = gap.abs() - bound
    if not over.numel() or not bool((over > 0).any()):
        return None
    index = int(torch.nan_to_num(over, nan=math.inf).argmax())
    count = int((over > 0).sum())
    return (
        f"the ratio is {math.exp(float(gap[index])):.6g} at {micro.place(index)}, and not 1 at {count} of "
        f"{gap.numel()} loss tokens, although no update lies between the old log-probs and these: look for "
        "dropout, another temperature, mask or position, or log-probs of other tokens"
    )
