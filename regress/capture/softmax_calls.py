"""The calls of torch in which logits become log-probs, as they happen: whatever a trainer's modules look like.

A function mode sees `log_softmax`, `softmax`, `logsumexp` and `cross_entropy` on tensors with a gradient whose last
dimension is that of the vocabulary, the tokens that are then gathered from them, and the look-up of the embeddings that
a forward pass begins with. A hook on those very logits reads their gradient in the backward pass, and keeps a few
numbers of each row: of the logits only the values are kept that the softmax took, until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from regress.capture.model_structure import whole
from regress.capture.softmax_rows import UNKNOWN, SoftmaxRows, read_rows

_SOFTMAX = {
    torch.log_softmax,
    functional.log_softmax,
    Tensor.log_softmax,
    torch.logsumexp,
    Tensor.logsumexp,
    torch.softmax,
    functional.softmax,
    Tensor.softmax,
}
_GATHER = {torch.gather, Tensor.gather, torch.take_along_dim, Tensor.take_along_dim}
_CROPPED = 0.85
"""Least share of the vocabulary that a trainer crops its logits to; anything narrower is another softmax."""


LOSS, QUIET, RETURNED = range(3)
"""Rows that a softmax took; that it took while gradients were off, as in a function of one's own for autograd or for a
metric; that the model returned, for what is compiled or written in another language. The first that there are count."""


@dataclass(eq=False)
class SeenRows:
    """Rows of logits that one call turned into log-probs.

    Attributes:
        shape: of the logits without their last dimension.
        targets: ``[R]`` tokens that were gathered or given, `UNKNOWN` where none was; ignored ones are below 0.
        level: how sure it is that the loss is made of these: `LOSS`, `QUIET` or `RETURNED`.
        owner: the forward pass that they belong to.
        rows: what the gradient shows, summed over backward passes; None before the first.
    """

    shape: tuple[int, ...]
    targets: Tensor
    level: int = 0
    owner: Any = None
    rows: SoftmaxRows | None = None

    def take_targets(self, targets: Any, ignored: int = UNKNOWN) -> None:
        """Take the tokens that the trainer asked for, if there is one for each row; an ignored one is unknown."""
        if (
            isinstance(targets, Tensor)
            and not targets.is_floating_point()
            and targets.numel() == len(self.targets)
        ):
            rows = targets.detach().reshape(-1).to(torch.int64)
            self.targets = rows.masked_fill(rows == ignored, UNKNOWN)


@dataclass(eq=False)
class SoftmaxCalls:
    """Sees the calls, while it is on.

    Attributes:
        tables: shapes ``[V, H]`` of the model's embeddings, whose V logits may have: of whole weights, as a look-up
            takes them, whatever a wrapper shards.
        owns: returns True for a parameter of the model, as it is now; that of a critic may have the same shape.
        embedded: is called with the token ids of a forward pass with gradients, as its embeddings look them up.
        seen: is called with rows and their logits, as they become log-probs; returns whether they are to be read.
        reached: is called with rows, as a backward pass reaches them.
        following: returns the token that follows each row ``[R]``, `UNKNOWN` where none does; None if nothing tells.
        computed: coarsest dtype that the trainer computes in.
    """

    tables: set[tuple[int, ...]]
    owns: Callable[[nn.Parameter], bool]
    embedded: Callable[[Tensor], None]
    seen: Callable[[SeenRows, Tensor], bool]
    reached: Callable[[SeenRows], None]
    following: Callable[[SeenRows], Tensor | None]
    computed: Callable[[], torch.dtype]
    active: bool = True
    _table: tuple[int, ...] | None = None
    _rows: dict[int, tuple[ReferenceType[Tensor], SeenRows]] = field(default_factory=dict)
    _readers: list[ReferenceType[_Read]] = field(default_factory=list)
    _asked: dict[int, tuple[ReferenceType[Tensor], Tensor]] = field(default_factory=dict)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Read a call that was made."""
        if function is functional.embedding:
            self._look_up(args, kwargs)
        elif function in _SOFTMAX or function is functional.cross_entropy:
            self._softmax(function, args, kwargs, result)
        elif function in _GATHER or function is Tensor.__getitem__:
            self._gathered(function, args, kwargs)

    def _gathered(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the tokens that were asked for of rows, or of logits before they are rows."""
        source = args[0] if args else kwargs.get("input")
        if not isinstance(source, Tensor):
            return
        if function is Tensor.__getitem__:
            last = args[1][-1] if isinstance(args[1], tuple) and len(args[1]) == source.dim() else None
            index = last if isinstance(last, Tensor) and last.dtype == torch.int64 else None
        else:
            index = next((one for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor)), None)
        if index is None:
            return
        if (rows := self._known(source)) is not None:
            rows.take_targets(index)
        elif self._is_vocabulary(source) and index.numel() * source.shape[-1] == source.numel():
            self._asked[id(source)] = ref(source), index.detach().reshape(-1)

    def _known(self, tensor: Tensor) -> SeenRows | None:
        found = self._rows.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def _base_of(self, logits: Tensor) -> Tensor:
        """Return the logits that tokens were asked for, of which these may be a few rows: the gradient is theirs."""
        base = logits._base
        known = None if base is None else self._asked.get(id(base))
        same = base is not None and known is not None and known[0]() is base and base.requires_grad
        return base if base is not None and same and base.shape[-1] == logits.shape[-1] else logits

    def _targets_of(self, logits: Tensor) -> Tensor | None:
        """Return the tokens that were asked for of these logits before they were rows."""
        found = self._asked.get(id(logits))
        return found[1] if found is not None and found[0]() is logits else None

    def _look_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        ids = args[0] if args else kwargs.get("input")
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if not isinstance(ids, Tensor) or not isinstance(weight, Tensor) or ids.dim() not in (1, 2):
            return
        shape = tuple(weight.shape)
        if isinstance(weight, nn.Parameter) and not self.owns(weight):
            return
        if shape in self.tables and ids.numel():
            self._table = shape if self._table is None else self._table  # the first; others hold positions
            if shape == self._table:
                self.embedded(ids)

    def _softmax(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        logits = args[0] if args else kwargs.get("input")
        if not isinstance(logits, Tensor) or not logits.requires_grad or not self._is_vocabulary(logits):
            return
        if not _last(function, args, kwargs, logits.dim()):
            return
        logits = self._base_of(logits)
        found = self._watched(logits, LOSS if torch.is_grad_enabled() else QUIET)
        if function is functional.cross_entropy:
            ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
            found.take_targets(args[1] if len(args) > 1 else kwargs.get("target"), ignored)
        elif isinstance(result, Tensor):
            self._rows[id(result)] = ref(result), found

    def returned(self, logits: Any) -> None:
        """Watch what the model returns, if it is logits."""
        if isinstance(logits, Tensor) and logits.requires_grad and self._is_vocabulary(logits):
            self._watched(logits, RETURNED)

    def _watched(self, logits: Tensor, level: int) -> SeenRows:
        found = self._known(logits)
        if found is None:
            rows = logits.numel() // logits.shape[-1]
            unknown = torch.full((rows,), UNKNOWN, dtype=torch.int64, device=logits.device)
            found = SeenRows(tuple(logits.shape[:-1]), unknown, level)
            found.take_targets(self._targets_of(logits))
            self._rows[id(logits)] = ref(logits), found
            if self.seen(found, logits):
                reader = _Read(self, found, logits.detach())
                logits.register_hook(reader)
                self._readers.append(ref(reader))
        found.level = min(found.level, level)
        if level == LOSS:
            self._let_go(found)
        return found

    def _let_go(self, found: SeenRows) -> None:
        """Drop what the model returned, where rows of the same pass were seen since."""
        readers = [one() for one in self._readers]
        for reader in readers:
            if reader is not None and reader.rows.owner is found.owner and reader.rows.level == RETURNED:
                reader.values = None
        self._readers = [ref(one) for one in readers if one is not None and one.values is not None]

    def _is_vocabulary(self, logits: Tensor) -> bool:
        width = logits.shape[-1] if logits.dim() in (2, 3) else 0
        return any(_CROPPED * size <= width <= size for size, *_ in self.tables)

    def read(self, found: SeenRows, values: Tensor, gradient: Tensor) -> None:
        """Read the gradient of rows of logits."""
        if not self.active:
            return
        width = gradient.shape[-1]
        logits, slope = (whole(each).reshape(-1, width) for each in (values, gradient.detach()))
        targets = torch.where((found.targets >= 0) & (found.targets < width), found.targets, UNKNOWN)
        rows = read_rows(logits, slope, targets, self.computed())
        found.rows = rows if found.rows is None else found.rows.plus(rows)
        if bool((rows.targets_R == UNKNOWN).any()):
            found.rows = found.rows.completed(logits, self.following(found))
        self.reached(found)

    def clear(self) -> None:
        """Drop tensors that are gone."""
        self._rows = {key: each for key, each in self._rows.items() if each[0]() is not None}
        self._asked = {key: each for key, each in self._asked.items() if each[0]() is not None}


class _Read:
    """The hook on logits; it holds their values for as long as the graph holds the hook."""

    def __init__(self, calls: SoftmaxCalls, rows: SeenRows, values: Tensor) -> None:
        self.rows = rows
        self.values: Tensor | None = values
        self._calls = calls

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:  # of what nobody used, from a wrapper that hands it on so
            return
        if self.values is not None:
            self._calls.read(self.rows, self.values, gradient)


class SoftmaxMode(TorchFunctionMode):
    """Shows every call of a function of torch to `SoftmaxCalls`, outside of backward passes."""

    def __init__(self, calls: SoftmaxCalls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and show the call; a compiler sees the call alone."""
        named = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **named)
        result = func(*args, **named)
        if self._calls.active and torch._C._current_graph_task_id() == -1:
            with torch._C.DisableTorchFunction():
                self._calls.called(func, args, named, result)
        return result


def _last(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], dimensions: int) -> bool:
    """Return True if a softmax is over the last dimension."""
    if function is functional.cross_entropy:
        return dimensions == 2
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return dim in (-1, dimensions - 1, (-1,), [-1])
