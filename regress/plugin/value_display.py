"""Values in words, for deciding whether they may become golden."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from regress.dump.numpy_arrays import Array, dtype_name, is_float
from regress.golden.value_tree import CONTAINERS, Tree, describe
from regress.report.number_format import short

_LINES = 40


def show(value: Tree) -> str:
    """Return a line for each leaf, at most forty."""
    lines = [f"{path}: {text}" for path, text in _leaves(value)]
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return "\n".join([*lines[:_LINES], *more])


def show_briefly(value: Tree) -> str:
    """Return the only leaf in words, or the number of leaves."""
    texts = [text for _, text in _leaves(value)]
    return texts[0] if len(texts) == 1 else f"{len(texts)} values"


def _leaves(value: Tree) -> Iterator[tuple[str, str]]:
    for path, node in value.nodes.items():
        if path in value.tensors:
            yield path, _tensor(value.tensors[path])
        elif node[0] not in CONTAINERS:
            yield path, describe(node)


def _tensor(array: Array) -> str:
    """Return `float32 [3, 5], -1.5 to 2, mean 0.1`, or the one value with its dtype."""
    dtype = dtype_name(array.dtype)
    if not array.shape:
        return f"{dtype} {float(array):.6g}" if is_float(array.dtype) else f"{dtype} {array.item()}"
    kind = f"{dtype} {[*array.shape]}"
    if array.size == 0:
        return kind
    if not is_float(array.dtype):
        return f"{kind}, {array.min()} to {array.max()}"
    values = array.astype(np.float64)
    finite = values[np.isfinite(values)]
    bad = values.size - finite.size
    spread = (
        [f"{short(finite.min())} to {short(finite.max())}", f"mean {short(finite.mean())}"]
        if finite.size
        else []
    )
    return ", ".join([kind, *spread, *([f"{bad} not finite"] if bad else [])])
