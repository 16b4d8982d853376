"""Layouts of a trainer: four samples padded, packed, in microbatches, compiled, on two ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regress.engine.numeric_types import true_float64

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Log = list[Tensor]
LENGTHS = (5, 9, 3, 7)
"""Tokens of each sample."""


@dataclass(frozen=True)
class Measured:
    """Log-probs of each sample's tokens but the first, and gradients of their weighted sum by parameter."""

    log_probs: Log
    gradients: Mapping[str, Tensor]


Layout = Callable[["PreTrainedModel", Sequence[Tensor]], Measured]


def measure(
    model: PreTrainedModel,
    samples: Sequence[Tensor],
    run: Callable[[PreTrainedModel, Sequence[Tensor]], Log],
    weights: Tensor | None = None,
) -> Measured:
    """Run samples and the backward pass of the sum of their log-probs, weighted by place.

    Args:
        weights: one for each log-prob; by default from -1 to 1.5.
    """
    model.zero_grad(set_to_none=True)
    log_probs = run(model, samples)
    together = torch.cat(log_probs)
    if together.requires_grad:
        (together * (_weights(samples) if weights is None else weights)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Measured([one.detach() for one in log_probs], gradients)


def _weights(samples: Sequence[Tensor]) -> Tensor:
    return torch.linspace(-1.0, 1.5, sum(len(ids) - 1 for ids in samples), dtype=torch.float64)


def _log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-prob of each token but the first of a sample, from the logits of its row."""
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def alone(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    """Return the log-probs of each sample by itself."""
    return [_log_probs(model(input_ids=ids[None], use_cache=False).logits[0], ids) for ids in samples]


def _padded(model: PreTrainedModel, samples: Sequence[Tensor], *, left: bool, positions: bool = False) -> Log:
    width = max(len(ids) for ids in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    places = [slice(width - len(one), width) if left else slice(0, len(one)) for one in samples]
    for row, (place, one) in enumerate(zip(places, samples, strict=True)):
        ids[row, place], mask[row, place] = one, 1
    more = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
    pairs = zip(places, samples, strict=True)
    return [_log_probs(logits[row, place], one) for row, (place, one) in enumerate(pairs)]


def _packed(model: PreTrainedModel, samples: Sequence[Tensor], *, lengths_given: bool) -> Log:
    positions = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
    stops = torch.tensor([0, *(len(ids) for ids in samples)]).cumsum(0, dtype=torch.int32)
    longest = max(len(ids) for ids in samples)
    more: Any = {"cu_seq_lens_q": stops, "cu_seq_lens_k": stops} if lengths_given else {}
    more |= {"max_length_q": longest, "max_length_k": longest} if lengths_given else {}
    ids = torch.cat([*samples])[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, **more).logits[0]
    pairs = zip(stops.tolist(), stops[1:].tolist(), samples, strict=False)
    return [_log_probs(logits[a:b], own) for a, b, own in pairs]


def _microbatches(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    return [one for part in (samples[:1], samples[1:]) for one in _padded(model, part, left=False)]


def _after_generation(model: Any, samples: Sequence[Tensor]) -> Log:
    mask = torch.ones_like(samples[0][None])
    model.eval()
    try:
        model.generate(
            samples[0][None], attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    finally:
        model.train()
    return _padded(model, samples, left=False)


def _checkpointed(model: Any, samples: Sequence[Tensor]) -> Log:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        return _padded(model, samples, left=False)
    finally:
        model.gradient_checkpointing_disable()


def _compiled(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    torch.compiler.reset()
    call: Any = torch.compile(model, backend="aot_eager")
    return _padded(call, samples, left=False)


def _saved(model: PreTrainedModel, samples: Sequence[Tensor]) -> Log:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = (
            type(model).from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").train()
        )
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
            if not torch.equal(mine, theirs):
                raise ValueError("a weight is another one after saving and loading")
    found = alone(again, samples)
    own = alone(model, samples)
    return [mine + (theirs - mine).detach() for mine, theirs in zip(own, found, strict=True)]


def _data_parallel(model: PreTrainedModel, samples: Sequence[Tensor]) -> Measured:
    """Give each of two ranks half of the samples, under DistributedDataParallel."""
    from regress.parallel.launch.rank_pool import RankPool

    model.zero_grad(set_to_none=True)
    with RankPool(("transformers", __name__)) as pool:
        given = {
            "kind": type(model),
            "config": model.config,
            "state": model.state_dict(),
            "samples": list(samples),
        }
        parts = pool.run(on_rank, given, 2, timeout=_SECONDS, patience=_SECONDS, what="data parallel")
    log_probs = [torch.from_numpy(one) for part in parts for one in part[0]]
    return Measured(log_probs, {name: torch.from_numpy(each) for name, each in parts[0][1].items()})


_SECONDS = 120.0


def on_rank(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    state: Mapping[str, Tensor],
    samples: Sequence[Tensor],
) -> tuple[list[Any], dict[str, Any]]:
    """Run the samples of this rank; return log-probs, and gradients summed over ranks, as arrays."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    rank, world = distributed.get_rank(), distributed.get_world_size()
    share = len(samples) // world
    start = rank * share
    weights = _weights(samples).split([len(ids) - 1 for ids in samples])[start : start + share]
    with true_float64():
        model = kind(config).double().train()
        model.load_state_dict(state)
        wrapped: Any = DistributedDataParallel(model)
        run = partial(_padded, left=False)
        found = measure(wrapped, samples[start : start + share], run, world * torch.cat(weights))
    gradients = {name.removeprefix("module."): each.numpy() for name, each in found.gradients.items()}
    return [one.numpy() for one in found.log_probs], gradients


_OF_LOG_PROBS: Mapping[str, Callable[[PreTrainedModel, Sequence[Tensor]], Log]] = {
    "padded right": partial(_padded, left=False),
    "padded left": partial(_padded, left=True),
    "padded left, position ids": partial(_padded, left=True, positions=True),
    "packed by position ids": partial(_packed, lengths_given=False),
    "packed by cu_seq_lens": partial(_packed, lengths_given=True),
    "microbatches": _microbatches,
    "generate, then score": _after_generation,
    "checkpointed": _checkpointed,
    "compiled": _compiled,
    "saved and loaded": _saved,
}
LAYOUTS: Mapping[str, Layout] = {
    **{name: partial(measure, run=run) for name, run in _OF_LOG_PROBS.items()},
    "data parallel": _data_parallel,
}
