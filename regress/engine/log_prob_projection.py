"""Projection of hidden states to log-probs of loss tokens: selected rows only, a chunk at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from regress.engine.attention import VarlenSegments
from regress.engine.numeric_types import arithmetic, checkpoint_contexts
from regress.errors import ConfigError
from regress.grpo.selective_log_softmax import TokenLogProbs

Entropy = bool | Literal["no_grad"]


@contextmanager
def logits_at(model: PreTrainedModel, index: Tensor, counted: Tensor | None = None) -> Iterator[None]:
    """Make the model return logits ``[1, K, V]`` of the flat positions ``index`` only.

    The selection happens on the hidden states, before the output projection, so any later operation of the
    model on its logits still runs.

    Args:
        counted: ``[K]`` True for the rows that the loss depends on. The others are projected apart and without a
            graph, since the number of rows in a matrix product may change the rounding of each of them. A head whose
            input is split over ranks projects all rows together. None: all of them.
    """

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        return (_rows(hidden, index), *rest)

    apart: AbstractContextManager[None] = nullcontext()
    if counted is not None and not bool(counted.all()):
        apart = _projected_apart(model.get_output_embeddings(), counted)
    with _before_head(model, keep), apart:
        yield


@contextmanager
def _projected_apart(head: nn.Module, counted: Tensor) -> Iterator[None]:
    project: Callable[[Tensor], Tensor] = head.forward
    previous = vars(head).get("forward")
    kept, shown = counted.nonzero()[:, 0], (~counted).nonzero()[:, 0]

    def forward(rows: Tensor) -> Tensor:
        if type(rows) is not Tensor:
            return project(rows)
        with torch.no_grad():
            others = project(rows.index_select(1, shown))
            whole = others.new_empty(1, len(counted), others.shape[-1]).index_copy_(1, shown, others)
        return whole.index_copy(1, kept, project(rows.index_select(1, kept)))

    head.forward = forward  # between the hooks of the module, which stay as they are
    try:
        yield
    finally:
        if previous is None:
            del head.forward
        else:
            head.forward = previous


@contextmanager
def hidden_at(model: PreTrainedModel, index: Tensor) -> Iterator[list[Tensor]]:
    """Skip the model's output projection, and put the hidden states ``[1, K, H]`` of the flat positions
    ``index`` into the list.
    """
    found: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        found.append(_rows(hidden, index))
        return (hidden.flatten(0, 1)[:0].unsqueeze(0), *rest)

    with _before_head(model, keep):
        yield found


def chunked_log_probs(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    log_probs: Callable[[Tensor, Tensor], TokenLogProbs],
    *,
    chunk: int,
    counted: Tensor | None = None,
) -> TokenLogProbs:
    """Return ``log_probs(logits, targets)`` of the projected hidden states ``[1, K, H]``, ``chunk`` rows at a time.

    Logits of a chunk are dropped once its log-probs are known, and computed again in the backward pass. The
    mathematics is the same; the gradient of the projection's weight is summed chunk by chunk.

    Args:
        counted: ``[K]`` True for the rows that the loss depends on; chunks hold these or the others. None: all.
    """
    if counted is None or bool(counted.all()):
        return _in_chunks(model, hidden, targets, log_probs, chunk)
    kept, shown = counted.nonzero()[:, 0], (~counted).nonzero()[:, 0]

    def part(index: Tensor) -> TokenLogProbs:
        return _in_chunks(model, hidden.index_select(1, index), targets[index], log_probs, chunk)

    with torch.no_grad():
        others = part(shown)
    own = part(kept)

    def joined(first: Tensor, second: Tensor) -> Tensor:
        return first.new_empty(len(counted)).index_copy_(0, shown, first).index_copy(0, kept, second)

    entropy = None
    if own.entropy is not None and others.entropy is not None:
        entropy = joined(others.entropy, own.entropy)
    return TokenLogProbs(joined(others.log_probs, own.log_probs), entropy)


def _in_chunks(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    log_probs: Callable[[Tensor, Tensor], TokenLogProbs],
    chunk: int,
) -> TokenLogProbs:
    head = model.get_output_embeddings()

    def project(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        out = log_probs(head(rows).squeeze(0), targets)
        return out.log_probs, out.entropy

    contexts = functools.partial(checkpoint_contexts, model.dtype)
    parts = [
        checkpoint(project, rows, ids, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        if torch.is_grad_enabled()
        else project(rows, ids)
        for rows, ids in zip(hidden.split(chunk, dim=1), targets.split(chunk), strict=True)
    ]
    values, entropies = zip(*parts, strict=True)
    return TokenLogProbs(torch.cat(values), None if entropies[0] is None else torch.cat(entropies))


def require_plain_logits(model: PreTrainedModel) -> None:
    """Refuse a model that changes its logits after the output projection, which chunks would miss.

    Raises:
        ConfigError: naming the model.
    """
    head = model.get_output_embeddings()
    probe = torch.linspace(-100, 100, 2 * head.weight.shape[0], dtype=model.dtype, device=model.device)
    projected = probe.view(1, 2, -1)
    handle = head.register_forward_hook(lambda *_: projected)
    try:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=model.device)
        with torch.no_grad(), arithmetic(model.dtype):
            logits = model(input_ids=tokens, use_cache=False, varlen=VarlenSegments(None, (2,))).logits
    finally:
        handle.remove()
    if not torch.equal(projected, logits.to(projected.dtype)):
        raise ConfigError(f"""batching.log_prob_chunk_size: {type(model).__name__} changes its logits after the output
        projection, which chunks leave out; set batching.log_prob_chunk_size=null""")


def _rows(hidden: Tensor, index: Tensor) -> Tensor:
    return hidden.flatten(0, 1).index_select(0, index).unsqueeze(0)


@contextmanager
def _before_head(
    model: PreTrainedModel, hook: Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]
) -> Iterator[None]:
    # before the hooks of a parallel strategy, which may turn the hidden states into something else
    handle = model.get_output_embeddings().register_forward_pre_hook(hook, prepend=True)
    try:
        yield
    finally:
        handle.remove()
