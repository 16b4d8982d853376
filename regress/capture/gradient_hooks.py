"""The moments at which gradients are final: before anything clips them, and after everything was accumulated.

torch's clip functions, whoever calls them (a trainer, accelerate, transformers, FSDP's own method) and however they
were imported, group the gradients with one helper of `torch.nn.utils.clip_grad`; that look-up, the public names and the
methods of FSDP and GradScaler are intercepted while somebody records. The function that scales gradients to a norm is
replaced in every module that holds it, since a trainer may have imported it by name before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad


class Listener:
    """Receiver of events on gradients, in the order in which they happen; each does nothing where it is not handled."""

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Handle that gradients, some of these tensors, are about to be measured or clipped."""

    def clip_norm(self, norm: Any, limit: Any) -> None:
        """Handle the total norm of gradients, and the one that they are clipped to."""

    def before_backward(self, root: Any, gradients: Any) -> None:
        """Handle the start of a backward pass at a tensor, or at several."""

    def after_backward(self) -> None:
        """Handle the end of a backward pass without an error."""

    def scaled(self, scaler: Any) -> None:
        """Handle that a GradScaler multiplied a loss."""

    def unscaled(self, optimizer: Any) -> None:
        """Handle that a GradScaler divided the gradients of an optimizer by its scale."""

    def stepped_by_scaler(self, optimizer: Any) -> None:
        """Handle that a GradScaler made or skipped the step of an optimizer."""


_listeners: list[Listener] = []
_installed = ExitStack()
_lock = threading.RLock()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener for everything that happens inside; several may overlap in any order."""
    with _lock:
        if not _listeners:
            _install()
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                _installed.close()


def _notify(name: str, *args: Any) -> None:
    for listener in _listeners:
        getattr(listener, name)(*args)


def _install() -> None:
    _replace(clip_grad, "_group_tensors_by_device_and_dtype", _grouping)
    scaling = vars(clip_grad).get("_clip_grads_with_norm_")
    if scaling is not None:
        _replace_everywhere(scaling, _clipping)
    _replace(torch.autograd, "backward", _backward)
    scaler = torch.amp.GradScaler
    _replace(scaler, "scale", _after("scaled", own=True))
    _replace(scaler, "unscale_", _after("unscaled"))
    _replace(scaler, "step", _after("stepped_by_scaler"))
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        _replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", _fsdp_clip)


def _replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    if name not in vars(owner):
        return
    original = vars(owner)[name]
    setattr(owner, name, make(original))
    _installed.callback(setattr, owner, name, original)


def _replace_everywhere(original: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function under every name that a module has for it; those that imported it since are restored, too."""
    wrapper = make(original)
    _exchange(original, wrapper)
    _installed.callback(_exchange, wrapper, original)


def _exchange(old: Any, new: Any) -> None:
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", None)  # `vars` of a module that loads lazily could import it
        if isinstance(names, dict):
            for name in [name for name, value in [*names.items()] if value is old]:
                names[name] = new


def _grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(tensorlists: Any, *args: Any, **kwargs: Any) -> Any:
        _notify("before_clip", [t for found in tensorlists for t in found if isinstance(t, Tensor)])
        return original(tensorlists, *args, **kwargs)

    return wrapper


def _clipping(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        _notify("before_clip", [p.grad for p in found if p.grad is not None])
        total_norm = _reduced(total_norm)
        _notify("clip_norm", total_norm, max_norm)
        return original(found, max_norm, total_norm, *args, **kwargs)

    return wrapper


def _reduced(norm: Any) -> Any:
    """Return a distributed norm as every rank has it: the one collective that clipping would make of it next."""
    placements = getattr(norm, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return norm
    from torch.distributed.tensor import Replicate

    return norm.redistribute(placements=[Replicate()] * len(placements))


def _fsdp_clip(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
        _notify("before_clip", [p.grad for p in module.parameters() if p.grad is not None])
        norm = original(module, *args, **kwargs)
        _notify("clip_norm", norm, args[0] if args else kwargs.get("max_norm"))
        return norm

    return wrapper


def _backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # the backward call of a checkpoint, within another pass
            return original(tensors, grad_tensors, *args, **kwargs)
        alone = isinstance(tensors, tuple | list) and len(tensors) == 1
        _notify("before_backward", tensors[0] if alone else tensors, grad_tensors)
        result = original(tensors, grad_tensors, *args, **kwargs)
        _notify("after_backward")
        return result

    return wrapper


def _after(event: str, own: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            _notify(event, scaler if own else (args[0] if args else kwargs.get("optimizer")))
            return result

        return wrapper

    return make


def versions(gradients: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return storage and version of each gradient, which reveal a later change in place; no tensor is held."""
    found = {}
    for name, grad in gradients.items():
        local = getattr(grad, "_local_tensor", grad)
        found[name] = (local.data_ptr(), local._version)
    return found
