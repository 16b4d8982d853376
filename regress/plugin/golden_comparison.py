"""Comparison of a value with its golden: one verdict for each leaf."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import Tolerance
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array, dtype_name, is_float
from regress.errors import CheckError
from regress.golden.value_tree import CONTAINERS, TENSOR, Node, Tree, describe

NOWHERE = Place()  # a check belongs to no step
_EXACT = "texts and structure are compared exactly"
_INTEGERS = Tolerance(0.0, reason="integers and booleans are compared exactly")
_NONE = "none was asked for: give rtol= or atol=, and the reason as why=, if equal floats cannot be expected"
_GRAVITY = {status: rank for rank, status in enumerate(Status)}


def tolerance_of(rtol: float, atol: float, why: str, scale: float = 1.0) -> Tolerance:
    """Return a call's tolerance times `scale`; raises `CheckError` if it is invalid or has no reason."""
    for key, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise CheckError(f"{key}={value!r} is not a tolerance: give a finite number that is not negative")
    if not isinstance(why, str):
        raise CheckError(f"why={why!r} is not a reason: give a sentence")
    if (rtol or atol) and not why.strip():
        raise CheckError(f"""rtol={rtol:g}, atol={atol:g} without a reason: say in why= where this tolerance comes from,
        or leave it out""")
    return Tolerance(float(rtol), float(atol), reason=why or _NONE).scaled(scale)


def compare(actual: Tree, golden: Tree, tolerance: Tolerance, quantity: str) -> list[Verdict]:
    """Judge every leaf of either value; the gravest verdict comes first, and the furthest off among equals.

    Nodes below a missing, additional or different container are not judged again.
    """
    verdicts: list[Verdict] = []
    settled: list[str] = []
    for path in dict.fromkeys([*golden.nodes, *actual.nodes]):
        if any(_below(path, parent) for parent in settled):
            continue
        verdict = _judge(path, actual, golden, tolerance, quantity)
        if _other_container(actual.nodes.get(path), golden.nodes.get(path)):
            settled.append(path)
        if verdict is not None:
            verdicts.append(verdict)
    return sorted(verdicts, key=lambda verdict: (_GRAVITY[verdict.status], -verdict.multiple))


def _other_container(actual_node: Node | None, golden_node: Node | None) -> bool:
    return actual_node != golden_node and any(
        node is not None and node[0] in CONTAINERS for node in (actual_node, golden_node)
    )


def _below(path: str, parent: str) -> bool:
    return path.startswith(parent) and path[len(parent) : len(parent) + 1] in ("[", ".", "#")


def _judge(path: str, actual: Tree, golden: Tree, tolerance: Tolerance, quantity: str) -> Verdict | None:
    actual_node, golden_node = actual.nodes.get(path), golden.nodes.get(path)
    if actual_node == golden_node == TENSOR:
        return _tensor(path, actual.tensors[path], golden.tensors[path], tolerance, quantity)
    if actual_node == golden_node:
        assert actual_node is not None
        if actual_node[0] in CONTAINERS:
            return None
        return Verdict(Status.OK, quantity, path, NOWHERE, count=1, reason=_EXACT)
    status, detail = _unlike(actual_node, golden_node)
    return Verdict(status, quantity, path, NOWHERE, detail, multiple=math.inf, over=1, count=1, reason=_EXACT)


def _tensor(path: str, actual: Array, golden: Array, tolerance: Tolerance, quantity: str) -> Verdict:
    def locate(index: int) -> str:
        return f"element {[int(i) for i in np.unravel_index(index, golden.shape)]}" if golden.shape else path

    verdict = judge_tensor(
        actual,
        golden,
        tolerance if is_float(golden.dtype) else _INTEGERS,
        quantity=quantity,
        name=path,
        place=NOWHERE,
        dtype=dtype_name(golden.dtype),
        locate=locate,
    )
    if verdict.status is Status.MASK:  # an integer of a user's test is not a mask and no token
        return replace(verdict, status=Status.DRIFT, detail="")
    return verdict


def _unlike(actual_node: Node | None, golden_node: Node | None) -> tuple[Status, str]:
    """Return the status and detail for two different nodes at one path, or for one that is missing."""
    if actual_node is None:
        assert golden_node is not None
        return Status.MISSING, f"the golden has {describe(golden_node)} here, and the value nothing"
    if golden_node is None:
        return Status.EXTRA, f"the value has {describe(actual_node)} here, and the golden nothing"
    detail = f"golden {describe(golden_node)}, actual {describe(actual_node)}"
    return (Status.DRIFT if actual_node[0] == golden_node[0] != "column" else Status.DTYPE), detail
