"""Operators: small changes of one node of a function, as a slip of the hand would make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
_EXCHANGED = {
    "min": "max",
    "amin": "amax",
    "minimum": "maximum",
    "floor": "ceil",
    "sum": "mean",
    "logical_and": "logical_or",
    "any": "all",
    "cumsum": "cumprod",
    "zeros": "ones",
    "zeros_like": "ones_like",
    "new_zeros": "new_ones",
    "argmin": "argmax",
    "sin": "cos",
    "exp": "expm1",
    "log": "log1p",
    "log_softmax": "softmax",
    "mul": "div",
    "mul_": "div_",
    "add": "sub",
    "add_": "sub_",
}
EXCHANGED = _EXCHANGED | {new: old for old, new in _EXCHANGED.items() if old not in ("sum", "exp", "log")}
"""Names of functions and methods, and what is called in place of them."""
LEFT_OUT = frozenset(
    [
        "detach",
        "clone",
        "abs",
        "double",
        "float",
        "clamp",
        "clamp_",
        "contiguous",
        "flip",
        "t",
        "transpose",
        "mT",
        "exp",
        "log",
        "square",
        "sqrt",
        "neg",
        "expand_as",
        "nan_to_num",
        "masked_fill",
        "sort",
        "unique",
        "cumsum",
        "roll",
        "type_as",
        "to",
        "bool",
        "long",
    ]
)
"""Methods that are left out: their object takes the place of the call."""
_NO_NUMERICS = (
    "isinstance",
    "getattr",
    "hasattr",
    "Error",
    "warn",
    "warning",
    "info",
    "debug",
    "repr",
    "print",
)


CHECKS = ("require", "check", "refuse")
"""Names of functions that only refuse what they are given begin so."""


@dataclass(frozen=True)
class Change:
    """One change of a function: the node that it takes the place of, by its number in `walk`.

    Attributes:
        index: number of the node.
        operator: name of the change, in the words of a table.
        new: node that takes its place; None leaves a statement out.
    """

    index: int
    operator: str
    new: ast.AST | None


def changes(function: ast.FunctionDef) -> Iterator[Change]:
    """Yield all changes of a function, without those of messages, checks and annotations."""
    for index, node in enumerate(walk(function)):
        for operator, new in _of(node):
            yield Change(index, operator, new)


def walk(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function that compute, in an order that is the same for each copy of it."""
    for statement in function.body:
        yield from _below(statement)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    if _only_speaks(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _below(child)


def _only_speaks(node: ast.AST) -> bool:
    """Tell messages, checks, docstrings and declarations."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Pass):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if (
        isinstance(node, ast.If)
        and all(isinstance(part, ast.Raise) for part in node.body)
        and not node.orelse
    ):
        return True
    if isinstance(node, ast.Call):
        name = _called(node)
        return any(name.endswith(part) for part in _NO_NUMERICS) or name.startswith(CHECKS)
    return False


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


Made = Iterator[tuple[str, ast.AST | None]]


def _of(node: ast.AST) -> Made:
    match node:
        case ast.Compare(left, [compared], comparators):
            for other in _COMPARED.get(type(compared), ()):
                change = ast.Compare(left, [other()], comparators)
                yield f"{_sign(compared)} to {_sign(other())}", change
        case ast.BinOp(left, computed, right) if not (_text(left) or _text(right)):
            if new := _COMPUTED.get(type(computed)):
                yield f"{_sign(computed)} to {_sign(new())}", ast.BinOp(left, new(), right)
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert() as sign, operand):
            yield f"{_sign(sign)} left out", operand
        case ast.BoolOp(joined, values):
            turned = ast.Or() if isinstance(joined, ast.And) else ast.And()
            yield f"{_sign(joined)} to {_sign(turned)}", ast.BoolOp(turned, values)
        case ast.Constant(value):
            yield from _of_constant(value)
        case ast.If():
            yield "if always", ast.If(ast.Constant(True), node.body, node.orelse)
            yield "if never", ast.If(ast.Constant(False), node.body, node.orelse)
        case ast.IfExp():
            yield "if always", node.body
            yield "if never", node.orelse
        case ast.Call():
            yield from _of_call(node)
        case ast.AugAssign():
            yield "left out", None
            yield "= in place of augmented", ast.Assign([node.target], node.value)
        case ast.Expr(ast.Call()):
            yield "left out", None
        case ast.Assign([ast.Subscript() | ast.Attribute()], _):
            yield "left out", None
        case ast.With() if all(item.optional_vars is None for item in node.items):
            yield "with left out", ast.If(ast.Constant(True), node.body, [])


def _of_constant(value: object) -> Made:
    if isinstance(value, bool):
        yield f"{value} to {not value}", ast.Constant(not value)
    elif isinstance(value, int):
        yield f"{value} to {value + 1}", ast.Constant(value + 1)
        if value:
            yield f"{value} to 0", ast.Constant(0)
    elif isinstance(value, float):
        other = 2 * value if value else 1.0
        yield f"{value} to {other}", ast.Constant(other)


def _of_call(node: ast.Call) -> Made:
    name, function = _called(node), node.func
    if name in EXCHANGED:
        new = EXCHANGED[name]
        renamed: ast.expr = (
            ast.Attribute(function.value, new, ast.Load())
            if isinstance(function, ast.Attribute)
            else ast.Name(new, ast.Load())
        )
        yield f"{name} to {new}", ast.Call(renamed, node.args, node.keywords)
    if name in LEFT_OUT and isinstance(function, ast.Attribute):
        yield f"{name} left out", function.value


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _sign(operator: ast.AST) -> str:
    if isinstance(operator, ast.cmpop):
        return ast.unparse(ast.Compare(ast.Name("a"), [operator], [ast.Name("b")])).split(" ", 1)[1][:-2]
    if isinstance(operator, ast.operator):
        return ast.unparse(ast.BinOp(ast.Name("a"), operator, ast.Name("b"))).split(" ")[1]
    if isinstance(operator, ast.boolop):
        return "and" if isinstance(operator, ast.And) else "or"
    return "-" if isinstance(operator, ast.USub) else "not" if isinstance(operator, ast.Not) else "~"
