"""Selection of the modules and parameters to record: those whose name matches a regular expression."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from typing import Any, TypeVar

import torch
from torch import nn

from regress.dump.coordinates import Coordinates
from regress.dump.taps import Layout, current, tap, wanted
from regress.errors import ConfigError

T = TypeVar("T")
Shard = Callable[[str, tuple[int, ...]], Layout | None]


@contextmanager
def record_activations(model: nn.Module, pattern: str) -> Iterator[list[str]]:
    """Tap as "activations" the output of every module of `model` whose name `re.search(pattern, name)` matches.

    Keys are module names; of an output with several parts the first tensor is taken (a hidden state). A
    module that runs again at the same coordinates gets the keys `name#1`, `name#2` ...; outputs that gradient
    checkpointing computes again within the backward pass are not recorded. Yields the names; raises
    `ConfigError` if there are none.
    """
    with record_modules(matching_modules(model, pattern)) as names:
        yield names


@contextmanager
def record_modules(
    modules: Mapping[str, nn.Module], shard: Shard = lambda name, shape: None
) -> Iterator[list[str]]:
    """Record the activations of named modules, as `record_activations` does; there may be none.

    ``shard(name, shape)`` returns the part of the whole output that an output of this shape is; ``None`` for
    all of it.
    """
    handles = [module.register_forward_hook(_hook(name, shard)) for name, module in modules.items()]
    try:
        yield list(modules)
    finally:
        for handle in handles:
            handle.remove()


_pieces: ContextVar[dict[str, tuple[list[torch.Tensor], Shard]] | None] = ContextVar(
    "regress_pieces", default=None
)


@contextmanager
def joined(dim: int) -> Iterator[None]:
    """Record a module that runs several times inside once, its outputs concatenated along `dim`."""
    pieces: dict[str, tuple[list[torch.Tensor], Shard]] = {}
    token = _pieces.set(pieces)
    try:
        yield
    finally:
        _pieces.reset(token)
    for name, (parts, shard) in pieces.items():
        _tap_output(name, name, torch.cat(parts, dim), shard)


def _hook(name: str, shard: Shard) -> Callable[[nn.Module, Any, Any], None]:
    last: Coordinates | None = None
    repeats = 0

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal last, repeats
        if not wanted("activations") or in_backward():
            return
        tensor = first_tensor(output)
        if tensor is None:
            return
        if (pieces := _pieces.get()) is not None:
            # a copy, because later operations may work in place
            pieces.setdefault(name, ([], shard))[0].append(tensor.detach().clone())
        else:
            repeats = repeats + 1 if current() == last else 0
            last = current()
            label = f"{name}#{repeats}" if repeats else name
            _tap_output(name, label, tensor, shard)

    return hook


def in_backward() -> bool:
    """Return True if a backward pass runs in this thread, as it does where gradient checkpointing computes again."""
    return bool(torch._C._current_graph_task_id() != -1)


def _tap_output(name: str, label: str, tensor: torch.Tensor, shard: Shard) -> None:
    part = shard(name, tuple(tensor.shape))
    meta = None if part is None else {"shards": {label: part.to_json()}}
    tap("activations", {label: tensor}, meta=meta)


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor in the output of a module, such as a hidden state, or None."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    parts = output if isinstance(output, list | tuple) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def matching_modules(
    model: nn.Module, pattern: str, key: str = "target_module_pattern"
) -> dict[str, nn.Module]:
    """Return all modules of a model that `re.search(pattern, name)` matches; raises `ConfigError` if there
    are none.
    """
    return matching({name: module for name, module in model.named_modules() if name}, pattern, key)


def matching_parameters(parameters: Iterable[tuple[str, T]], pattern: str) -> dict[str, T]:
    """Return all named parameters that `re.search(pattern, name)` matches; raises `ConfigError` if there are none."""
    return matching(dict(parameters), pattern, "target_param_pattern")


def matching(items: Mapping[str, T], pattern: str, key: str) -> dict[str, T]:
    """Return the items whose name the pattern matches; raises `ConfigError` with the nearest names if there are none.

    `key` names the source of the pattern: a configuration key or an argument.
    """
    try:
        found = {name: item for name, item in items.items() if re.search(pattern, name)}
    except re.error as error:
        raise ConfigError(f"{key} {pattern!r} is not a regular expression ({error}): correct it") from None
    if not found:
        near = get_close_matches(pattern.replace("\\", ""), items, n=3, cutoff=0.0)
        raise ConfigError(f"""{key} {pattern!r} matches none of the {len(items)} names: the nearest are
        {", ".join(near)}, and .* matches all""")
    return found
