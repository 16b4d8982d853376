"""Every environment variable that the package reads is described."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "environment.md").read_text()
OF_PROCESSES = ("systems/adapters", "systems/cell_worker.py")
"""Code that only sets variables of the processes that it runs in."""
LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def is_environment(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] == "environ"


def named(node: ast.expr, constants: dict[str, str]) -> list[str]:
    if isinstance(node, ast.Tuple):
        return [name for part in node.elts for name in named(part, constants)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return [constants[node.id]] if isinstance(node, ast.Name) and node.id in constants else []


def read(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module reads from the environment, as literals or by constants of its own."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    constants = {
        target.id: node.value.value
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("environ.get", "getenv")):
            yield from named(node.args[0], constants)
        elif (
            isinstance(node, ast.Subscript) and is_environment(node.value) and isinstance(node.ctx, ast.Load)
        ):
            yield from named(node.slice, constants)
        elif isinstance(node, ast.Compare) and any(map(is_environment, node.comparators)):
            yield from named(node.left, constants)
        elif isinstance(node, LOOPS) and re.search(r"\benviron\b", ast.unparse(node)):
            for loop in [node] if isinstance(node, ast.For) else node.generators:
                yield from named(loop.iter, constants)


def test_every_variable_that_is_read_is_described() -> None:
    found: dict[str, str] = {}
    for path in sorted((ROOT / "regress").rglob("*.py")):
        name = path.relative_to(ROOT / "regress").as_posix()
        if not name.startswith(OF_PROCESSES):
            found |= dict.fromkeys(read(ast.parse(path.read_text())), name)
    assert len(found) > 30
    assert {name: where for name, where in found.items() if f"`{name}`" not in PAGE} == {}
