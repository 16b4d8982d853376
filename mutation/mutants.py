"""Mutants: functions of the engine with one change each, found by their source and put into a running process."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mutation.operators import CHECKS, changes, walk

ROOT = Path(__file__).parents[1]
STRICT = "strict"
"""Argument of ``zip`` that only refuses lengths."""


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
        last: line of its end.
    """

    path: str
    function: str
    number: int
    line: int
    operator: str
    text: str
    source: str
    last: int = 0

    def reached(self, lines: Collection[int]) -> bool:
        """Tell whether code that ran these lines of the file ran the changed node."""
        return any(line in lines for line in range(self.line, max(self.line, self.last) + 1))

    @property
    def name(self) -> str:
        """Name as in the cache: file, function, number of the change, and hash of the source."""
        return f"{self.path}:{self.function}:{self.number}:{self.source}"

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}: `{self.text}` {self.operator}"

    @property
    def is_of_a_check(self) -> bool:
        """True if it is in a check of arguments, or leaves one out, which is not numerics."""
        if self.text.startswith(f"{STRICT}="):
            return True
        checks = self.function.rpartition(".")[2].lstrip("_").startswith(CHECKS)
        return checks or (self.operator == "left out" and self.text.lstrip("_").startswith(CHECKS))

    def put_into(self, function: ast.FunctionDef) -> None:
        """Make the change in the tree of the function."""
        change = list(changes(function))[self.number]
        _replace(function, list(walk(function))[change.index], change.new)


@dataclass(frozen=True)
class Planted(Mutant):
    """Change written by hand: the control of the tool.

    Attributes:
        old: source of an expression of the function; empty: the function stays as it is.
        new: source of the expression in its place.
    """

    old: str = ""
    new: str = ""

    def put_into(self, function: ast.FunctionDef) -> None:
        """Make the change in the tree of the function."""
        found = [node for node in ast.walk(function) if isinstance(node, ast.expr)]
        if self.old:
            wanted = next(node for node in found if ast.unparse(node) == self.old)
            _replace(function, wanted, ast.parse(self.new, mode="eval").body)


def unchanged(mutant: Mutant) -> Planted:
    """Return the control of a mutant: the same function, compiled again as it is and put into force the same way."""
    return Planted(mutant.path, mutant.function, -1, mutant.line, "unchanged", "", mutant.source, mutant.last)


def mutants(paths: Iterable[str]) -> Iterator[Mutant]:
    """Yield all mutants of some files."""
    for path in paths:
        for name, function in functions_of(parsed(path)):
            nodes = list(walk(function))
            strict = {
                id(word.value)
                for word in ast.walk(function)
                if isinstance(word, ast.keyword) and word.arg == STRICT
            }
            source = hashlib.sha256(ast.dump(function).encode()).hexdigest()[:12]
            for number, change in enumerate(changes(function)):
                node = nodes[change.index]
                line, text = getattr(node, "lineno", function.lineno), ast.unparse(node).split("\n")[0]
                text = f"{STRICT}={text}" if id(node) in strict else text
                last = getattr(node, "end_lineno", line) if isinstance(node, ast.expr) else line
                yield Mutant(path, name, number, line, change.operator, text, source, last)


def parsed(path: str) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield outermost functions and methods by qualified name; a name that is defined twice counts as its last."""
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= dict(functions_of(node, f"{prefix}{node.name}."))
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
