"""Log-probs of sampled tokens, and the entropy of their distributions, without a second copy of the logits.

The log-sum-exp runs over pieces of the vocabulary (online: a running maximum, and sums rescaled when it
rises), and the backward pass writes the gradient of the logits piece by piece. Beyond the logits and their
gradient only blocks of at most `block` elements are held. Source: Milakov & Gimelshein, arXiv 1805.02867.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regress.grpo.argument_checks import InputError

BLOCK = 1 << 20
"""Elements of the largest scratch buffer, chosen to fit a processor's cache."""

VOCAB_CHUNK = 1 << 14
"""Columns of a piece of the vocabulary."""


@dataclass(frozen=True)
class TokenLogProbs:
    """``log_probs`` and ``entropy`` (nats) of shape [...], float32, or float64 for float64 logits."""

    log_probs: Tensor
    entropy: Tensor | None


def token_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_chunk: int = VOCAB_CHUNK,
    block: int = BLOCK,
    entropy: bool | Literal["no_grad"] = False,
) -> TokenLogProbs:
    """Return the log-probability of ``targets[...]`` under ``softmax(logits[..., V] / temperature)``.

    Half-precision logits are accumulated in float32. ``entropy=True`` gives a differentiable entropy of the
    same (tempered) distribution, ``"no_grad"`` one without gradient. Rows whose outputs receive no gradient
    get exactly 0, whatever their values. Logits of minus infinity are tokens of probability 0.

    Args:
        vocab_chunk: columns that are reduced at a time.
        block: elements of the largest scratch buffer, which decides how many rows are reduced at a time.

    Raises:
        InputError: shapes that do not match, a target outside the vocabulary, a size below 1, or a temperature of 0 or
            less.
    """
    check_logits(logits, targets, temperature, vocab_chunk, block)
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[-1]:
        raise InputError(f"""targets span {int(targets.min())} to {int(targets.max())}, outside the vocabulary of
        {logits.shape[-1]}: fill positions without a target with any token id, such as 0.""")
    outputs: tuple[Tensor, Tensor | None]
    outputs = _TokenLogProbs.apply(logits, targets, temperature, Pieces(vocab_chunk, block), entropy)
    return TokenLogProbs(*outputs)


@dataclass(frozen=True)
class Pieces:
    """Sizes in which a matrix of logits is gone through: columns of a piece, elements of a block of rows."""

    columns: int = VOCAB_CHUNK
    elements: int = BLOCK


def check_logits(logits: Tensor, targets: Tensor, temperature: float, vocab_chunk: int, block: int) -> None:
    """Raise `InputError` unless ``targets[...]`` match ``logits[..., V]`` in shape; target values are not checked."""
    if not temperature > 0:
        raise InputError(f"temperature={temperature} cannot divide logits: it must be greater than 0.")
    if vocab_chunk < 1:
        raise InputError(f"vocab_chunk={vocab_chunk} is not a size: it must be at least 1.")
    if block < 1:
        raise InputError(f"block={block} is not a size: it must be at least 1.")
    if not logits.is_floating_point() or logits.shape[:-1] != targets.shape or targets.dtype != torch.int64:
        raise InputError(f"""targets ({targets.dtype}, shape {tuple(targets.shape)}) do not fit logits ({logits.dtype},
        shape {tuple(logits.shape)}): give int64 targets [...] for floating-point logits [..., V].""")


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        pieces: Pieces,
        entropy: bool | Literal["no_grad"],
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        # row statistics: log-probs, maximum, log of the sum of exp(x - maximum), entropy
        stats = torch.empty(4, targets.numel(), dtype=dtype, device=logits.device)
        flat_targets = targets.reshape(-1)
        for rows, block in row_blocks(logits, pieces):
            maximum, total, moment = online_softmax(block, temperature, pieces.columns, dtype, bool(entropy))
            log_sum = total.log()
            target = scaled(block.gather(1, flat_targets[rows, None]), temperature, dtype).squeeze(1)
            stats[0, rows] = (target - maximum) - log_sum
            stats[1, rows], stats[2, rows], stats[3, rows] = maximum, log_sum, log_sum - moment / total
        log_probs = stats[0].view(targets.shape)
        entropies = stats[3].view(targets.shape).clone() if entropy else None
        ctx.save_for_backward(logits, flat_targets, stats)
        ctx.temperature, ctx.pieces, ctx.entropy_grad = temperature, pieces, entropy is True
        if entropies is not None and entropy == "no_grad":
            ctx.mark_non_differentiable(entropies)
        return log_probs.clone(), entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        logits, targets, stats = ctx.saved_tensors
        up_entropy = grad_entropy if ctx.entropy_grad else None
        grad = logits_gradient(
            logits, targets, stats, grad_log_probs, up_entropy, ctx.temperature, ctx.pieces
        )
        return grad, None, None, None, None


def logits_gradient(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    pieces: Pieces,
) -> Tensor:
    """Return the gradient of logits ``[..., V]``, given those of the log-probs and entropies of their rows.

    ``targets`` of shape [rows] may lie outside ``0:V``, where the logits are a part of the vocabulary. ``stats`` of
    shape [4, rows] are log-probs, maximum, log of the sum of exp(x - maximum), and entropy.
    """
    grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    out = grad.view(targets.numel(), logits.shape[-1])
    g_log_probs = grad_log_probs.reshape(-1).to(stats.dtype)
    g_entropy = None if grad_entropy is None else grad_entropy.reshape(-1).to(stats.dtype)
    for rows, block in row_blocks(logits, pieces):
        up = g_log_probs[rows, None] / temperature
        up_entropy = None if g_entropy is None else g_entropy[rows, None] / temperature
        idle = up == 0 if up_entropy is None else (up == 0) & (up_entropy == 0)
        some_idle = bool(idle.any())
        maximum, log_sum, entropy = stats[1:, rows, None]
        for cols in chunks(block.shape[1], pieces.columns):
            log_p = (scaled(block[:, cols], temperature, stats.dtype) - maximum).sub_(log_sum)
            if up_entropy is None:
                piece = log_p.exp_().mul_(-up)
            else:
                piece = log_p.exp()
                piece *= log_p.clamp_(min=FLOOR).add_(entropy).mul_(-up_entropy).sub_(up)
            # in full precision: the sum cancels if a probability is almost 1
            column = targets[rows, None] - cols.start
            inside = (column >= 0) & (column < piece.shape[1])
            piece.scatter_add_(1, column.clamp(0, piece.shape[1] - 1), up * inside)
            if some_idle:
                piece.masked_fill_(idle, 0)
            out[rows, cols] = piece
    return grad


FLOOR = -1e4
"""Lower limit of x in x exp(x): exp of it is 0 in float32 and float64, so minus infinity never makes NaN."""


def online_softmax(
    block: Tensor, temperature: float, vocab_chunk: int, dtype: torch.dtype, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, per row, the maximum m, sum exp(x - m) and sum (x - m) exp(x - m) (0 if no entropy is wanted)."""
    # the least finite number rather than -inf, so that the first rescaling multiplies 0 by something finite
    maximum = torch.full((block.shape[0],), torch.finfo(dtype).min, dtype=dtype, device=block.device)
    total = torch.zeros_like(maximum)
    moment = torch.zeros_like(maximum)
    for cols in chunks(block.shape[1], vocab_chunk):
        x = scaled(block[:, cols], temperature, dtype)
        higher = torch.maximum(maximum, x.amax(1))
        shift, maximum = maximum - higher, higher
        x = x - maximum[:, None]
        weights = x.exp()
        if entropy:
            moment = (moment + shift * total) * shift.exp() + x.clamp_(min=FLOOR).mul_(weights).sum(1)
        total = total * shift.exp() + weights.sum(1)
    return maximum, total, moment


def scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    """Return the tempered logits in the type they are accumulated in."""
    logits = logits.to(dtype)
    return logits if temperature == 1.0 else logits / temperature


def chunks(size: int, step: int) -> Iterator[slice]:
    """Yield ``0:size`` in slices of at most ``step``."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def row_blocks(logits: Tensor, pieces: Pieces) -> Iterator[tuple[slice, Tensor]]:
    """Yield views of ``logits`` as (rows, [R, V]), a piece of which has at most the elements of a block (or one row);
    none if ``V`` is 0.
    """
    V = logits.shape[-1]
    if V == 0:
        return
    step = max(1, pieces.elements // min(V, pieces.columns))
    start = 0
    for part in _as_rows(logits):
        for rows in chunks(part.shape[0], step):
            yield slice(start + rows.start, start + rows.stop), part[rows]
        start += part.shape[0]


def _as_rows(logits: Tensor) -> Iterator[Tensor]:
    """Yield 2-D views that cover ``logits`` in order: a single one if its strides allow, so that no slice
    is copied.
    """
    if logits.dim() == 1:
        yield logits[None]
    elif logits.dim() == 2:
        yield logits
    elif logits.is_contiguous():
        yield logits.view(-1, logits.shape[-1])
    else:
        for part in logits.unbind(0):
            yield from _as_rows(part)
