"""Recorded choices of experts, taken by the routers of the engine: its values then differ by precision alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regress.capture.expert_routing import EXPERTS, Routed, routed
from regress.dump.module_selection import in_backward
from regress.dump.record import Record
from regress.dump.taps import tap, wanted
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.mini_batch import Microbatch
from regress.errors import OracleError
from regress.layout import TokenLayout

Tokens: TypeAlias = tuple[int, ...]
Experts: TypeAlias = dict[str, dict[Tokens, NDArray[np.int64]]]
"""Router -> token ids of a sample -> experts of each of its tokens, ``[S, k]``; -1 where none are recorded."""


def recorded_experts(records: list[Record], ids: Mapping[Any, Tokens]) -> Experts:
    """Return the experts that the routers of a trainer chose.

    Args:
        records: activations of an update.
        ids: key of a sample -> its token ids.
    """
    found: Experts = {}
    for record in records:
        names = [name for name in record.tensors if name.endswith(EXPERTS)]
        if not names:
            continue
        layout = TokenLayout.from_json(record.meta["layout"])  # type: ignore[arg-type]  # what is not, raises
        samples: Any = record.meta["samples"]
        for (group, run), segment in zip(samples, layout.segments, strict=True):
            tokens = ids.get((str(group), int(run)))
            if tokens is None:
                continue
            columns = slice(segment.col, segment.col + segment.stop - segment.start)
            for name in names:
                array = np.asarray(record.tensors[name], np.int64)
                own = found.setdefault(name.removesuffix(EXPERTS), {})
                own.setdefault(tokens, np.full((len(tokens), array.shape[-1]), -1, np.int64))
                own[tokens][segment.start : segment.stop] = array[segment.row, columns]
    return found


@contextmanager
def forced(policy: LocalPolicy, experts: Experts) -> Iterator[None]:
    """Let the routers of a policy take recorded experts inside, and record the choice that they would have made.

    Raises:
        OracleError: if the policy lacks a router, or a router does not choose by `torch.topk`.
    """
    modules = policy.modules()
    lacking = next((name for name in experts if name not in modules), None)
    if lacking is not None:
        raise OracleError(f"""the dump tells the experts of {lacking}, and the model of the oracle has no such router;
        give --model with the architecture that was recorded""")
    current: list[Microbatch] = []
    compute = policy._forward

    def forward(micro: Microbatch, **options: Any) -> Any:
        current[:] = [micro]
        return compute(micro, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(policy, "_forward", forward))
        for name, known in experts.items():
            route = _forced_route(name, modules[name], known, current)
            stack.enter_context(mock.patch.object(modules[name], "forward", route))
        yield


def _forced_route(
    name: str, router: nn.Module, known: Mapping[Tokens, NDArray[np.int64]], current: list[Microbatch]
) -> Callable[..., Any]:
    own = router.forward

    def route(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            free = routed(own(*args, **kwargs))
        if free is None:
            raise OracleError(
                f"{name} tells no choice of experts, so none can be forced; record without routing"
            )
        chosen = _chosen(free.experts, known, current[0])
        with mock.patch.object(torch, "topk", _taking(chosen)):
            output = own(*args, **kwargs)
        found = routed(output)
        if found is None or not torch.equal(found.experts, chosen):
            raise OracleError(f"""{name} does not choose its experts by torch.topk, so the recorded ones cannot be
            forced; record without routing""")
        if wanted("activations") and not in_backward():
            _tap(name, found, free, current[0])
        return output

    return route


def _taking(chosen: Tensor) -> Callable[..., Any]:
    """Return a stand-in for `torch.topk` that takes given indices, where it is asked for as many of each row."""
    real = torch.topk

    def topk(values: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        if dim in (-1, values.dim() - 1) and (*values.shape[:-1], k) == chosen.shape:
            return values.gather(-1, chosen), chosen
        return real(values, k, dim, *args, **kwargs)

    return topk


def _chosen(free: Tensor, known: Mapping[Tokens, NDArray[np.int64]], micro: Microbatch) -> Tensor:
    """Return the recorded experts of each row, and those of the router itself where none are recorded."""
    chosen = free.clone().reshape(*micro.input_ids.shape, -1)
    for segment in micro.layout.segments:
        columns = slice(segment.col, segment.col + segment.stop - segment.start)
        tokens = tuple(micro.input_ids[segment.row, columns].tolist())
        experts = known.get(tokens)
        if experts is not None:
            there = torch.from_numpy(experts[segment.start : segment.stop]).to(chosen)
            here = chosen[segment.row, columns]
            chosen[segment.row, columns] = torch.where(there >= 0, there, here)
    return chosen.reshape(free.shape)


def _tap(name: str, found: Routed, free: Routed, micro: Microbatch) -> None:
    """Record logits and weights under the recorded choice, and the router's own choice."""
    grid = micro.input_ids.shape
    tensors = {**found.named(name), name + EXPERTS: free.experts.sort(dim=-1).values}
    tap(
        "activations",
        {label: tensor.detach().reshape(*grid, -1) for label, tensor in tensors.items()},
        meta={"forced_routing": True},
    )
