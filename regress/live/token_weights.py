"""Weights of the tokens of an update, read from the gradient of the loss by the log-probs.

On tokens that nothing clips, a policy gradient by the log-prob is - weight * advantage * ratio. Where that holds
within each microbatch, the weights of the microbatches of all ranks have to agree: as weights of tokens, of samples,
or of microbatches that are averaged each by itself. Whatever else the loss holds (a KL or entropy term) makes the rule
silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regress.live.guarded_microbatch import Microbatch

FIT = 1e-3
"""Largest relative residual of a microbatch whose weights are read, and distance of a factor from an integer."""


@dataclass(frozen=True)
class Share:
    """Contribution of one microbatch to an update.

    Attributes:
        data_rank: first rank that holds the same samples; microbatch: number on it.
        scales: hypothesis -> common scale of the weights, None where the hypothesis does not fit.
        samples: ids of the rows.
        passes: backward passes that reached the log-probs.
    """

    data_rank: int
    microbatch: int
    scales: dict[str, float | None]
    samples: tuple[Any, ...]
    passes: int

    @property
    def name(self) -> str:
        """Words for the microbatch."""
        return f"microbatch {self.microbatch} of rank {self.data_rank}"


def share_of(micro: Microbatch, data_rank: int) -> Share:
    """Return what a microbatch contributes."""
    scales: dict[str, float | None] = dict.fromkeys(("tokens", "samples", "microbatches"))
    if micro.gradient is not None and micro.advantages is not None:
        ratio = 1.0 if micro.old is None else (micro.log_probs - micro.old).double().exp()
        terms = -micro.advantages.double() * ratio * micro.mask
        lengths = micro.mask.sum(1, keepdim=True).clamp(min=1)
        tokens = _scale(micro.gradient, terms)
        scales = {
            "tokens": tokens,
            "samples": _scale(micro.gradient, terms / lengths),
            "microbatches": None if tokens is None else tokens * int(micro.mask.sum()),
        }
    return Share(data_rank, micro.number, scales, tuple(micro.samples or ()), micro.passes)


def _scale(gradient: Tensor, terms: Tensor) -> float | None:
    """Return the factor between gradient and terms on tokens that have a gradient, None if no factor fits."""
    kept = (gradient != 0) & (terms != 0)
    if not bool(kept.any()):
        return None
    g, t = gradient[kept], terms[kept]
    factor = float((g * t).sum() / t.square().sum())
    if bool(((gradient != 0) & (terms == 0)).any()) or factor <= 0:
        return None
    return factor if float((g - factor * t).norm()) <= FIT * float(g.norm()) else None


def uneven(shares: Sequence[Share]) -> Iterator[str]:
    """Yield a sentence for each sample or microbatch that counts more than once."""
    for share in shares:
        if share.passes > 1:
            yield f"{share.name} was back-propagated {share.passes} times"
    yield from _repeated(shares)
    yield from _weighted([share for share in shares if share.passes == 1])


def _repeated(shares: Sequence[Share]) -> Iterator[str]:
    counts = Counter(sample for share in shares for sample in share.samples)
    for sample, count in counts.items():
        if count > 1:
            places = [share.name for share in shares if sample in share.samples]
            yield f"sample {sample} counts {count} times in this update: in {' and '.join(places)}"
            return


def _weighted(shares: Sequence[Share]) -> Iterator[str]:
    """Yield a sentence if the weights of microbatches differ by a whole factor and agree otherwise."""
    found = []
    for hypothesis in ("tokens", "samples", "microbatches"):
        known = [(share, scale) for share in shares if (scale := share.scales[hypothesis]) is not None]
        if len(known) < 2:
            continue
        low = min(scale for _, scale in known)
        factors = [scale / low for _, scale in known]
        if all(abs(factor - 1) <= FIT for factor in factors):
            return
        if all(abs(factor - round(factor)) <= FIT * factor for factor in factors):
            index = max(range(len(known)), key=factors.__getitem__)
            base = factors.index(1.0)
            found.append(
                f"{known[index][0].name} weighs {factors[index]:.3f} times as much as {known[base][0].name}"
            )
    yield from found[:1]


def alike(norms: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return numbers of one dtype on one device."""
    first = norms[0]
    if all(norm.dtype == first.dtype and norm.device == first.device for norm in norms):
        return norms
    return tuple(norm.to(first.device, torch.float64) for norm in norms)
