"""Log-probs of a vocabulary cut into parts of any size, beside those of the whole one, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from regress.grpo.selective_log_softmax import TokenLogProbs, token_log_probs
from regress.parallel.vocabulary_log_probs import vocab_parallel_log_probs


@dataclass(frozen=True)
class Cut:
    """``[2, 5, V]`` logits of which each rank holds so many columns."""

    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    entropy: bool | Literal["no_grad"] = True
    temperature: float = 0.7
    vocab_chunk: int = 3
    scale: float = 3.0
    minus_infinity: bool = False
    rows: int = 5

    def logits(self) -> Tensor:
        generator = torch.Generator().manual_seed(sum(self.sizes))
        logits = torch.randn(2, self.rows, sum(self.sizes), generator=generator, dtype=torch.float64)
        if self.minus_infinity:
            logits[:, :, 1::2] = -torch.inf
            logits[:, 0, : sum(self.sizes[:2])] = -torch.inf  # all that the first two ranks hold
            logits[:, 0, -1] = 0.0
        return (self.scale * logits).to(self.dtype)

    def targets(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        targets = torch.randint(0, sum(self.sizes), (2, self.rows), generator=generator)
        if self.minus_infinity:
            targets = targets // 2 * 2
            targets[:, 0] = sum(self.sizes) - 1
        return targets


def compare(cut: Cut) -> dict[str, Any]:
    rank, start = dist.get_rank(), sum(cut.sizes[: dist.get_rank()])
    stop = start + cut.sizes[rank]
    whole = cut.logits().requires_grad_()
    part = cut.logits()[..., start:stop].clone().requires_grad_()
    settings = {"temperature": cut.temperature, "vocab_chunk": cut.vocab_chunk, "entropy": cut.entropy}
    expected = token_log_probs(whole, cut.targets(), **settings)
    group = dist.group.WORLD
    actual = vocab_parallel_log_probs(part, cut.targets(), start=start, group=group, **settings)
    for out in (expected, actual):
        _backward(out, cut)
    assert part.grad is not None
    assert whole.grad is not None
    values = torch.stack([actual.log_probs, actual.entropy]).detach()  # type: ignore[list-item]
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, values.numpy().tobytes())
    return {
        "log_probs": _worst(actual.log_probs, expected.log_probs),
        "entropy": _worst(actual.entropy, expected.entropy),
        "gradient": _worst(part.grad, whole.grad[..., start:stop]),
        "signal": whole.grad.abs().max().item() if whole.grad.numel() else 1.0,
        "replicas": len(set(held)) == 1,
        "dtype": str(actual.log_probs.dtype),
        "no_grad": actual.entropy is not None and not actual.entropy.requires_grad,
        "idle": part.grad[:, -1:].abs().sum().item(),
    }


def _backward(out: TokenLogProbs, cut: Cut) -> None:
    """The last row gets no gradient."""
    weights = torch.linspace(-1, 2, 2 * cut.rows, dtype=out.log_probs.dtype).view(2, cut.rows)
    loss = (weights * out.log_probs)[:, :-1].sum()
    if out.entropy is not None and out.entropy.requires_grad:
        loss = loss + (weights.flip(0) * out.entropy)[:, :-1].sum()
    loss.backward()


def _worst(actual: Tensor | None, expected: Tensor | None) -> float:
    assert actual is not None
    assert expected is not None
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    if not actual.numel():
        return 0.0
    return (actual - expected).abs().max().item()


EXACT: dict[str, Cut] = {
    "unequal": Cut((4, 4, 4, 2)),
    "an empty part": Cut((5, 0, 7, 2)),
    "only one part": Cut((0, 9, 0, 0)),
    "one column each": Cut((1, 1, 1, 1)),
    "minus infinity": Cut((4, 3, 4, 4), minus_infinity=True),
    "large logits": Cut((3, 4, 2, 4), scale=300.0),
    "no entropy gradient": Cut((4, 4, 4, 2), entropy="no_grad"),
    "one pass": Cut((4, 4, 4, 2), vocab_chunk=100, temperature=1.0),
    "no rows": Cut((4, 4, 4, 2), rows=0),
}
OTHER: dict[str, Cut] = {
    "float32": Cut((4, 4, 4, 2), dtype=torch.float32),
    "bfloat16": Cut((4, 0, 4, 2), dtype=torch.bfloat16),
}
JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    name: partial(compare, cut) for name, cut in {**EXACT, **OTHER}.items()
}
