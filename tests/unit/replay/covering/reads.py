"""Fields of the configuration that each function of the computation reads, found in the source.

Types are followed where they are written: annotations of parameters, attributes and results, and assignments of them.
A property counts as the fields that it reads itself. Of a field that holds one of several texts, the source also says
which of them a function tells apart: those that it compares with, or all where it does anything else with the text.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from regress.grpo import catalogue
from regress.grpo.catalogue import Part

PACKAGE = Path(catalogue.__file__).parents[1]

ROOMS = ("grpo", "engine", "parallel", "layout")
"""Rooms that compute."""

NO_NUMERICS = (
    *("grpo/checks.py", "grpo/catalogue.py", "grpo/recipes.py", "grpo/presets.py", "grpo/commands.py"),
    "grpo/named_metrics.py",
    *("engine/config", "engine/tracking", "engine/checkpoint"),
)
"""Files and folders in them that check, list or keep values, and compute nothing."""

SECTIONS: Mapping[str, str] = {
    **dict.fromkeys(("AlgorithmConfig", "Objective", "ObjectiveFields"), "algorithm"),
    **dict.fromkeys(("BatchingConfig", "BatchPlan"), "batching"),
    **dict.fromkeys(("ParallelConfig", "RankPlan", "Mesh"), "parallel"),
    "OptimizerConfig": "optimizer",
    "ReferenceConfig": "reference",
}
"""Classes that hold values of a section."""

_OF_CONFIG = {
    "algorithm": "AlgorithmConfig",
    "batching": "BatchingConfig",
    "parallel": "ParallelConfig",
    "optimizer": "OptimizerConfig",
    "reference": "ReferenceConfig",
}
_RENAMED = {"parallel.sequence_split": "parallel.cp_split"}

Told = Callable[[str], object]
"""Value that a function takes from a text; it treats texts alike for which the value is the same."""


@dataclass
class _Class:
    """Attributes with the classes of their values, and the methods."""

    attributes: dict[str, str] = field(default_factory=dict)
    methods: dict[str, ast.FunctionDef] = field(default_factory=dict)
    properties: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Function:
    """A function of the computation, and the fields it reads: dotted key -> what it takes from the value."""

    name: str
    fields: Mapping[str, tuple[Told, ...]]

    def classes(self, key: str, values: Iterable[str]) -> list[tuple[str, ...]]:
        """Return values of a field, those together that the function treats alike."""
        found: dict[tuple[object, ...], list[str]] = {}
        for value in values:
            found.setdefault(tuple(told(value) for told in self.fields[key]), []).append(value)
        return [tuple(alike) for alike in found.values()]


class _Source:
    """Classes and functions of the rooms."""

    def __init__(self, root: Path) -> None:
        self.classes: dict[str, _Class] = {
            "Config": _Class(dict(_OF_CONFIG)),
            "AlgorithmConfig": _Class(bases=["Objective"]),
        }
        self.results: dict[str, str] = {}
        self.functions: list[tuple[str, str | None, ast.FunctionDef]] = []
        for path in _files(root):
            where = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
            self._add(where, ast.parse(path.read_text(encoding="utf-8")))
        for name in SECTIONS:
            self.classes.setdefault(name, _Class())
        for _, owner, function in self.functions:
            if owner is not None:
                self._attributes_set_in(owner, function)

    def _add(self, where: str, module: ast.Module) -> None:
        for node in module.body:
            if isinstance(node, ast.FunctionDef):
                self.functions.append((f"{where}.{node.name}", None, node))
                self.results[node.name] = _written(node.returns)
            elif isinstance(node, ast.ClassDef):
                self._add_class(where, node)

    def _add_class(self, where: str, node: ast.ClassDef) -> None:
        found = self.classes.setdefault(node.name, _Class())
        found.bases += [_written(base) for base in node.bases]
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.attributes.setdefault(part.target.id, _written(part.annotation))
            elif isinstance(part, ast.FunctionDef):
                found.methods[part.name] = part
                self.functions.append((f"{where}.{node.name}.{part.name}", node.name, part))
                if any("property" in _written(d) for d in part.decorator_list):
                    found.properties.add(part.name)
                    found.attributes.setdefault(part.name, _written(part.returns))

    def _attributes_set_in(self, owner: str, function: ast.FunctionDef) -> None:
        """Learn the classes of ``self.x = ...``."""
        types = _Types(self, owner, function)
        for target, value in types.assignments():
            if isinstance(target, ast.Attribute) and _written(target.value) == "self":
                kind = types.of(value)
                if kind:
                    self.classes[owner].attributes.setdefault(target.attr, kind)

    def attribute(self, owner: str, name: str) -> str:
        """Return the class of an attribute, looked up in the bases, too; empty if it is not known."""
        found = self.classes.get(owner)
        if found is None:
            return ""
        if name in found.attributes:
            return found.attributes[name]
        return next((kind for base in found.bases if (kind := self.attribute(base, name))), "")

    def property(self, owner: str, name: str) -> tuple[str, ast.FunctionDef] | None:
        """Return a property and the class that has it."""
        found = self.classes.get(owner)
        if found is None:
            return None
        if name in found.properties:
            return owner, found.methods[name]
        return next((there for base in found.bases if (there := self.property(base, name))), None)


class _Types:
    """Classes of the expressions in a function."""

    def __init__(self, source: _Source, owner: str | None, function: ast.FunctionDef) -> None:
        self._source, self._function = source, function
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self._names = {a.arg: _written(a.annotation) for a in every}
        if owner is not None and "self" in self._names:
            self._names["self"] = owner
        for target, value in self.assignments():
            if isinstance(target, ast.Name) and (kind := self.of(value)):
                self._names.setdefault(target.id, kind)

    def assignments(self) -> Iterator[tuple[ast.expr, ast.expr]]:
        """Yield targets and values, tuples part by part."""
        for node in ast.walk(self._function):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                yield node.target, node.value
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value

    def of(self, node: ast.expr) -> str:
        """Return the class of an expression, empty if it is not known."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return self._source.attribute(self.of(node.value), node.attr)
        if isinstance(node, ast.IfExp):
            return self.of(node.body) or self.of(node.orelse)
        if isinstance(node, ast.BoolOp):
            return next((kind for value in node.values if (kind := self.of(value))), "")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "replace" and node.args:
                return self.of(node.args[0])
            known = node.func.id in self._source.classes
            return node.func.id if known else self._source.results.get(node.func.id, "")
        return ""

    def reads(self) -> Iterator[tuple[str, str, Told | None]]:
        """Yield the class and the name of every attribute that is read, and what is taken from it: None for nothing."""
        parents = {child: node for node in ast.walk(self._function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(self._function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield self.of(node.value), node.attr, _taken(node, parents)


def _taken(node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> Told | None:
    """Return what an expression takes from an attribute."""
    parent = parents.get(node)
    if isinstance(parent, ast.Compare):
        return _compared(node, parent)
    if isinstance(parent, ast.FormattedValue) or (isinstance(parent, ast.Call) and _checks_choice(parent)):
        return None  # an error names it
    if isinstance(parent, ast.Subscript) and parent.slice is node:
        return _of_part(parent, parents)
    if isinstance(parent, ast.Attribute) and parent.attr in ("startswith", "endswith"):
        call = parents[parent]
        if isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant):
            name, affix = parent.attr, call.args[0].value
            return lambda value: getattr(value, name)(affix)
    return str


def _compared(node: ast.Attribute, comparison: ast.Compare) -> Told:
    """Return which of the texts that it is compared with a text is."""
    known: set[str] = set()
    for side in (comparison.left, *comparison.comparators):
        parts = side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
        for part in parts:
            if part is node or (isinstance(part, ast.Constant) and not isinstance(part.value, str)):
                continue
            if not isinstance(part, ast.Constant):
                return str
            known.add(str(part.value))
    return lambda value: value if value in known else None


def _of_part(lookup: ast.Subscript, parents: Mapping[ast.AST, ast.AST]) -> Told:
    """Return what is taken from the entry of a text in the catalogue: ``LOSSES[objective.loss].weighs``."""
    parts, taken = getattr(catalogue, _written(lookup.value), None), parents.get(lookup)
    if (
        not isinstance(parts, Mapping)
        or not isinstance(taken, ast.Attribute)
        or not hasattr(Part, taken.attr)
    ):
        return str
    name = taken.attr
    if callable(getattr(Part, name)):
        return str
    return lambda value: getattr(parts[value], name) if value in parts else None


def _checks_choice(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id.startswith("check_")


def _written(node: ast.expr | None) -> str:
    """Return the class that an annotation names: the first of a union."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.partition(" | ")[0]
    return ast.unparse(node).partition(" | ")[0].rpartition(".")[2]


def _files(root: Path) -> Iterator[Path]:
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            inner = path.relative_to(root).as_posix()
            if not any(inner == left or inner.startswith(f"{left}/") for left in NO_NUMERICS):
                yield path


def _fields_of(
    source: _Source, owner: str | None, function: ast.FunctionDef, seen: frozenset[int]
) -> dict[str, tuple[Told, ...]]:
    found: dict[str, tuple[Told, ...]] = {}
    for kind, name, taken in _Types(source, owner, function).reads():
        behind = source.property(kind, name)
        own: Mapping[str, tuple[Told, ...]] = {}
        if behind is not None and id(behind[1]) not in seen:
            own = _fields_of(source, behind[0], behind[1], seen | {id(behind[1])})
        elif kind in SECTIONS and taken is not None:
            key = f"{SECTIONS[kind]}.{name}"
            own = {_RENAMED.get(key, key): (taken,)}
        for key, told in own.items():
            found[key] = (*found.get(key, ()), *told)
    return found


def _checks(function: ast.FunctionDef) -> bool:
    """Return True for a function that only refuses."""
    return function.name.lstrip("_").startswith("check") and _written(function.returns) == "None"


def _belongs_to_values(source: _Source, owner: str | None, function: ast.FunctionDef) -> bool:
    """Return True for a property of the values themselves, which counts where it is read."""
    return owner is not None and owner in SECTIONS and function.name in source.classes[owner].properties


@lru_cache(maxsize=4)
def functions(root: Path = PACKAGE) -> tuple[Function, ...]:
    """Return the functions of the computation that read fields, by the place of their definition."""
    source = _Source(root)
    found = (
        Function(name, _fields_of(source, owner, function, frozenset((id(function),))))
        for name, owner, function in source.functions
        if not _checks(function) and not _belongs_to_values(source, owner, function)
    )
    return tuple(function for function in found if function.fields)
