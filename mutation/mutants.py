"""Mutants: functions of the engine with one change each, found by their source and put into a running process."""

from __future__ import annotations

import ast
import gc
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

from mutation.operators import changes, walk

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """One change of one function.

    Attributes:
        path: file, from the root of the repository.
        function: qualified name of the outermost function, as in ``LossTerms.add``.
        number: of the change among those of the function.
        line: of the changed node in the file.
        operator: name of the change.
        text: source of the changed node.
        source: hash of the function's source; another source is another mutant.
    """

    path: str
    function: str
    number: int
    line: int
    operator: str
    text: str
    source: str

    @property
    def name(self) -> str:
        """Name as in the cache: file, function, number of the change, and hash of the source."""
        return f"{self.path}:{self.function}:{self.number}:{self.source}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: `{self.text}` {self.operator}"


def mutants(paths: Iterable[str]) -> Iterator[Mutant]:
    """Yield all mutants of some files."""
    for path in paths:
        for name, function in _functions(_parsed(path)):
            nodes = list(walk(function))
            source = hashlib.sha256(ast.dump(function).encode()).hexdigest()[:12]
            for number, change in enumerate(changes(function)):
                node = nodes[change.index]
                line, text = getattr(node, "lineno", function.lineno), ast.unparse(node).split("\n")[0]
                yield Mutant(path, name, number, line, change.operator, text, source)


def install(mutant: Mutant) -> int:
    """Change the function in this process, wherever it is used, and return how many functions were changed.

    Raises:
        LookupError: if the file no longer has the function.
    """
    module = import_module(mutant.path.removesuffix(".py").replace("/", "."))
    tree = _parsed(mutant.path)
    function = dict(_functions(tree))[mutant.function]
    change = list(changes(function))[mutant.number]
    _replace(function, list(walk(function))[change.index], change.new)
    changed = _codes(compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec"))
    count = 0
    gc.unfreeze()  # frozen objects are not listed
    for found in gc.get_objects():
        if type(found) is FunctionType and found.__module__ == module.__name__:
            code = found.__code__
            key = (code.co_qualname, code.co_firstlineno)
            if _inside(code, mutant.function) and key in changed:
                found.__code__ = changed[key]
                count += 1
    if not count:
        raise LookupError(f"no function {mutant.function} of {mutant.path} is loaded")
    return count


def _inside(code: CodeType, function: str) -> bool:
    return code.co_qualname == function or code.co_qualname.startswith(f"{function}.<locals>.")


def _parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield outermost functions and methods by qualified name; a name that is defined twice counts as its last."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= dict(_functions(node, f"{prefix}{node.name}."))
    yield from found.items()


def _replace(function: ast.FunctionDef, old: ast.AST, new: ast.AST | None) -> None:
    for parent in ast.walk(function):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(child is old for child in value):
                value[:] = [new if child is old else child for child in value]
                if None in value:
                    value[:] = [ast.Pass() if child is None else child for child in value]
    ast.copy_location(new, old) if new is not None else None


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    found = {(code.co_qualname, code.co_firstlineno): code}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _codes(constant)
    return found
