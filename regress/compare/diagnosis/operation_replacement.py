"""Replace one call of an operation while a formula runs: what people write in its place, by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from linecache import getline
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Call = Callable[..., Any]
_TORCH = str(Path(torch.__file__).parent)


def _detached(call: Call) -> Call:
    return lambda *args, **named: call(*args, **named).detach()


def _clamped_forward(x: Tensor, *args: Any, **named: Any) -> Tensor:
    """Return a clamp whose gradient goes through."""
    return x + (x.clamp(*args, **named) - x).detach()


_FIRST = ("first", "with the first part of `{}` alone", lambda a, b: a + 0 * b)
_SECOND = ("second", "with the second part of `{}` alone", lambda a, b: b + 0 * a)
_NO_GRADIENT = "without the gradient of `{}`"

OPERATIONS: Mapping[str, tuple[tuple[str, str, Call], ...]] = {
    "minimum": (
        ("maximum", "with a maximum in place of `{}`", torch.maximum),
        _FIRST,
        _SECOND,
        ("detached", _NO_GRADIENT, _detached(torch.minimum)),
    ),
    "maximum": (("minimum", "with a minimum in place of `{}`", torch.minimum), _FIRST, _SECOND),
    "clamp": (
        ("none", "without the clamp of `{}`", lambda x, *args, **named: x),
        ("straight_through", "with a gradient through the clamp of `{}`", _clamped_forward),
        ("detached", _NO_GRADIENT, _detached(torch.clamp)),
    ),
    "exp": (
        ("none", "with no exponential in `{}`", lambda x: x),
        ("linear", "with 1 + x in place of `{}`", lambda x: 1 + x),
        ("inverse", "with the inverse of `{}`", lambda x: torch.exp(-x)),
        ("detached", _NO_GRADIENT, _detached(torch.exp)),
    ),
    "log": (("none", "with no logarithm in `{}`", lambda x: x),),
    "sqrt": (("none", "with no root in `{}`", lambda x: x),),
    "detach": (("none", "with a gradient through `{}`", lambda x: x + 0),),
    "mul": (
        _FIRST,
        _SECOND,
        ("twice", "with `{}` twice", lambda a, b: 2 * (a * b)),
        ("reversed", "with the sign of `{}` reversed", lambda a, b: -(a * b)),
        ("detached", _NO_GRADIENT, _detached(torch.mul)),
    ),
    "div": (
        ("first", "with the first part of `{}` alone", lambda a, b: a),
        (
            "first_gradient",
            "with the gradient of the first part of `{}` alone",
            lambda a, b: a + (a / b - a).detach(),
        ),
        ("mul", "with `{}` the other way round", lambda a, b: a * b),
    ),
    "add": (
        _FIRST,
        _SECOND,
        ("sub", "with a difference in place of `{}`", lambda a, b: a - b),
        ("second_twice", "with the second part of `{}` twice", lambda a, b: a + 2 * b),
        ("detached", _NO_GRADIENT, _detached(torch.add)),
    ),
    "sub": (
        ("first", "with the first part of `{}` alone", lambda a, b: a + 0 * b),
        ("exchanged", "with the parts of `{}` exchanged", lambda a, b: b - a),
        ("add", "with a sum in place of `{}`", lambda a, b: a + b),
        ("second_twice", "with the second part of `{}` twice", lambda a, b: a - 2 * b),
        ("detached", _NO_GRADIENT, _detached(torch.sub)),
    ),
    "square": (
        ("none", "with no square in `{}`", lambda x: x),
        ("abs", "with an absolute value in place of `{}`", torch.abs),
    ),
    "mean": (
        ("sum", "with a sum in place of `{}`", torch.sum),
        ("median", "with a median in place of `{}`", torch.median),
    ),
    "neg": (
        ("none", "with the sign of `{}` reversed", lambda x: x),
        ("detached", _NO_GRADIENT, _detached(torch.neg)),
    ),
    "sum": (("mean", "with a mean in place of `{}`", torch.mean),),
    "logsumexp": (
        ("zero", "without `{}`", lambda x, *args, **named: 0 * x.logsumexp(*args, **named).detach()),
        ("amax", "with the maximum in place of `{}`", lambda x, dim, **named: x.amax(dim, **named)),
        ("detached", _NO_GRADIENT, _detached(torch.logsumexp)),
    ),
}
"""Operation -> name of what may have been computed in its place, words with the expression in their braces, call."""
_ALIASES = {
    "__radd__": "add",
    "__rmul__": "mul",
    "__rsub__": "rsub",
    "multiply": "mul",
    "true_divide": "div",
    "clip": "clamp",
}


class Operation(TorchFunctionMode):
    """Run what is inside of it with one call of an operation replaced, and note all calls.

    Attributes:
        calls: name, source text and function of each call of an operation that has alternatives, in order.
    """

    def __init__(self, number: int | None = None, other: Call | None = None) -> None:
        """Replace the ``number``-th call by ``other``; without them, note the calls."""
        super().__init__()
        self.calls: list[tuple[str, str, str]] = []
        self._number, self._other, self._seen = number, other, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, or what stands in its place."""
        name = getattr(func, "__name__", "")
        name, named = _ALIASES.get(name, name), kwargs or {}
        if name == "rsub":  # 1 - x reaches us as x.__rsub__(1)
            func, name, args = torch.sub, "sub", (torch.as_tensor(args[1], dtype=args[0].dtype), args[0])
        if name not in OPERATIONS or not any(isinstance(a, Tensor) and a.is_floating_point() for a in args):
            return func(*args, **named)
        self._seen += 1
        if self._number is None:
            self.calls.append((name, *_source()))
        elif self._seen == self._number + 1 and self._other is not None:
            return self._other(*args, **named)
        return func(*args, **named)


def _source() -> tuple[str, str]:
    """Return the text of the expression that is evaluated in the formula's own code, and the name of its function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    code = frame.f_code
    first, last, start, stop = [*code.co_positions()][frame.f_lasti // 2]
    if first is None or last is None:
        return code.co_name, code.co_name
    lines = [getline(code.co_filename, number).rstrip("\n") for number in range(first, last + 1)]
    lines[-1] = lines[-1][:stop]
    lines[0] = lines[0][start or 0 :]
    return " ".join(line.strip() for line in lines), code.co_name
