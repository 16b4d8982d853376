"""Precision that a trainer computes in, observed while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regress.dump.float64_watch import Float64Watch

ORDER = ("bfloat16", "float16", "float32", "float64")
"""Dtypes, coarsest first: the coarsest decides the bounds that values are judged by."""


@dataclass
class Precision:
    """Observed number formats.

    Attributes:
        computed: dtypes of hidden states and of products.
        autocast: dtype that autocast asks for, if it is on.
        parameters: number of parameters of each dtype.
        tf32: whether float32 products are rounded to ten bits.
        left: operations of a float64 model that gave something narrower, by the line of the model that asked for them.
    """

    computed: set[str] = field(default_factory=set)
    autocast: str | None = None
    parameters: dict[str, int] = field(default_factory=dict)
    tf32: bool = False
    left: tuple[str, ...] = ()
    _watch: Float64Watch | None = None
    _watched: bool = False

    def begin(self, root: nn.Module) -> None:
        """Watch the first forward pass of a float64 model; a compiled one shows nothing of its operations."""
        if self._watched or not torch.is_grad_enabled():
            return
        self._watched = True
        compiled = any(getattr(module, "_compiled_call_impl", None) is not None for module in root.modules())
        if not compiled and {p.dtype for p in _matrices(root)} == {torch.float64}:
            self._watch = Float64Watch(root)
            self._watch.__enter__()

    def end(self) -> None:
        """Note what the forward pass that is watched showed."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)
            self.left = tuple(f"{one} gives {one.dtype}" for one in watch.inside)

    def look(self, hidden: Tensor, decoder: nn.Module) -> None:
        """Note the precision of the forward pass that is under way."""
        device = hidden.device.type
        self.computed.add(_name(hidden.dtype))
        if torch.is_autocast_enabled(device):
            self.autocast = _name(torch.get_autocast_dtype(device))
            self.computed.add(self.autocast)
        self.computed |= {_name(p.dtype) for p in _matrices(decoder)}
        self.tf32 = device == "cuda" and torch.backends.cuda.matmul.allow_tf32

    def count(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Note the dtypes in which parameters are kept."""
        self.parameters = dict(Counter(_name(p.dtype) for _, p in parameters))

    @property
    def dtype(self) -> str:
        """Coarsest dtype that products are computed in; float32 products of ten bits count as float16."""
        found = next((name for name in ORDER if name in self.computed), "float32")
        return "float16" if self.tf32 and found == "float32" else found

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the entries of the manifest."""
        facts = {"autocast": self.autocast, "parameters": self.parameters, "tf32": self.tf32}
        return facts | ({"left_float64": list(self.left)} if self.left else {})


def _matrices(module: nn.Module) -> Iterable[nn.Parameter]:
    """Yield the first few weights of products, since norms may be kept in another dtype."""
    found = 0
    for parameter in module.parameters():
        if parameter.dim() >= 2 and parameter.is_floating_point():
            yield parameter
            found += 1
            if found == 4:
                return


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
