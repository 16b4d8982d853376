"""Precision that a trainer computes in, observed while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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
    """

    computed: set[str] = field(default_factory=set)
    autocast: str | None = None
    parameters: dict[str, int] = field(default_factory=dict)
    tf32: bool = False

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
        return {"autocast": self.autocast, "parameters": self.parameters, "tf32": self.tf32}


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
