"""Operations that leave float64, seen while they run.

A model of float64 weights is no float64 model: modules cast to float32 and back, and the weights do not tell. A
watch sees every operation on tensors, forward and backward, whatever the model is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TORCH = str(Path(torch.__file__).parent)
_MODES = ("__torch_dispatch__", "__torch_function__")


@dataclass(frozen=True)
class Operation:
    """Operation on tensors, by the place where it ran.

    Attributes:
        name: as torch calls it, such as ``aten._to_copy``.
        dtype: of its result, such as ``float32``; "none" if it has no kernel for its arguments.
        module: the innermost module of the watched model whose forward pass ran it, by name ("" is the model itself);
            None if it ran outside of the model's forward pass.
        line: file and number of the line that asked for it, such as
            ``transformers/models/qwen3/modeling_qwen3.py:64``.
        backward: True if a backward pass ran it; ``module`` and ``line`` are then those of the call of ``backward``.
    """

    name: str
    dtype: str
    module: str | None
    line: str
    backward: bool = False

    def __str__(self) -> str:
        where = " of the model" if self.module == "" else f" in {self.module}" if self.module else ""
        return f"{self.name}{' of the backward pass' if self.backward else ''}{where} ({self.line})"


class Float64Watch(TorchDispatchMode):
    """Mode that notes every operation whose floating result is narrower than float64.

    Enter it around what should be float64 throughout: it applies to this thread, costs a few microseconds an operation
    and changes no value. A result that holds whole numbers only (masks, positions, zeros) has lost nothing and is not
    noted.

    Args:
        model: its modules are named.

    Attributes:
        narrow: the operations, each line once, in the order in which they first ran.
        failed: the last operation that raised an error.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.narrow: list[Operation] = []
        self.failed: Operation | None = None
        self._model = model
        self._names: dict[int, str] | None = None

    @property
    def inside(self) -> list[Operation]:
        """The narrow operations of the model's own forward pass."""
        return [one for one in self.narrow if one.module is not None and not one.backward]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            self.failed = self._operation(func, "none")
            raise
        for leaf in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(leaf, Tensor) and is_narrow(leaf.dtype) and _fractional(func, leaf):
                found = self._operation(func, str(leaf.dtype).removeprefix("torch."))
                if found not in self.narrow:
                    self.narrow.append(found)
        return out

    def _operation(self, func: Callable[..., Any], dtype: str) -> Operation:
        if self._names is None:
            self._names = (
                {} if self._model is None else {id(m): name for name, m in self._model.named_modules()}
            )
        line, module = "", None
        for frame in _frames():
            line = line or f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
            module = self._names.get(id(frame.f_locals.get("self")))
            if module is not None:
                break
        node = torch._C._current_autograd_node()
        name = str(func).removesuffix(f".{getattr(func, '_overloadname', '')}")
        return Operation(name, dtype, module, line, backward=node is not None)


def is_narrow(dtype: torch.dtype) -> bool:
    """Return True for a floating or complex dtype of fewer bits than float64 has."""
    floating = dtype.is_floating_point or dtype.is_complex
    return floating and dtype not in (torch.float64, torch.complex128)


def _fractional(func: Callable[..., Any], values: Tensor) -> bool:
    """Return True if numbers may have been rounded; memory that is not yet written holds none."""
    if "empty" in str(func) or values.is_meta:
        return False
    with torch.no_grad():
        found = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        wide = found.detach().double()
        return bool((wide != wide.round()).any())


def _frames() -> Iterator[FrameType]:
    """Yield the frames that called an operation, innermost first, without those of torch and of modes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        own = code.co_filename in (__file__, "<string>") or code.co_name in _MODES
        if not own and not code.co_filename.startswith(_TORCH):
            yield frame
        frame = frame.f_back


def _short(file: str) -> str:
    """Return the path of a file from its package on."""
    return file.rpartition("site-packages/")[2]
