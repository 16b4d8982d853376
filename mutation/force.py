"""Mutants in force: put into the functions of this process, wherever they are used, and taken back."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType, ModuleType

from mutation.mutants import Mutant, functions_of, parsed

STARTED = "_mutant_started"
"""Global of a module, a list of one element that the mutated function sets when it runs."""

_remembered: dict[str, list[FunctionType]] = {}
"""Functions of each module, by its name, as `remember` found them."""


@dataclass(frozen=True)
class Force:
    """Mutant that is in force.

    Attributes:
        codes: of its function, and of those inside it.
        flag: set once the function has run.
        functions: those that run it.
    """

    codes: tuple[CodeType, ...]
    flag: list[bool]
    functions: int

    @property
    def started(self) -> bool:
        """True once the mutated function has run."""
        return self.flag[0]

    def raised(self, error: BaseException) -> bool:
        """Tell whether an error, or one that it came from, passed through the mutated function."""
        seen: set[int] = set()
        found: list[BaseException | None] = [error]
        while found:
            one = found.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            trace = one.__traceback__
            while trace is not None:
                if any(trace.tb_frame.f_code is code for code in self.codes):
                    return True
                trace = trace.tb_next
            found += [one.__cause__, one.__context__]
        return False


def remember(paths: Iterable[str]) -> None:
    """Find the functions of some files once, for all processes that are forked from this one."""
    modules = {_module(path).__name__ for path in paths}
    for name in modules:
        _remembered[name] = []
    for function in _functions():
        if function.__module__ in modules:
            _remembered[function.__module__].append(function)


@contextmanager
def in_force(mutant: Mutant) -> Iterator[Force]:
    """Change the function of a mutant in this process, wherever it is used, until the end of the context.

    Raises:
        LookupError: if the file no longer has the function, or no such function is loaded.
    """
    module = _module(mutant.path)
    changed, flag = _compiled(mutant, module), [False]
    module.__dict__[STARTED] = flag
    before: list[tuple[FunctionType, CodeType]] = []
    found = _remembered.get(module.__name__)
    try:
        for function in _functions() if found is None else found:
            if type(function) is FunctionType and function.__module__ == module.__name__:
                code = function.__code__
                new = changed.get((code.co_qualname, code.co_firstlineno))
                if new is not None and _inside(code, mutant.function):
                    function.__code__ = new
                    before.append((function, code))
        if not before:
            raise LookupError(f"no function {mutant.function} of {mutant.path} is loaded")
        codes = tuple(code for code in changed.values() if _inside(code, mutant.function))
        yield Force(codes, flag, len(before))
    finally:
        for function, code in before:
            function.__code__ = code
        del module.__dict__[STARTED]


def _module(path: str) -> ModuleType:
    return import_module(path.removesuffix(".py").replace("/", "."))


def _functions() -> Iterator[FunctionType]:
    gc.unfreeze()  # frozen objects are not listed
    for found in gc.get_objects():
        if type(found) is FunctionType:
            yield found


def _compiled(mutant: Mutant, module: ModuleType) -> dict[tuple[str, int], CodeType]:
    """Return the codes of the module with the mutant, whose function says that it runs."""
    tree = parsed(mutant.path)
    functions = dict(functions_of(tree))
    if mutant.function not in functions:
        raise LookupError(f"{mutant.path} has no function {mutant.function}")
    function = functions[mutant.function]
    mutant.put_into(function)
    says = ast.parse(f"{STARTED}[0] = True").body[0]
    for node in ast.walk(says):
        ast.copy_location(node, function.body[0])
    documented = ast.get_docstring(function) is not None
    function.body.insert(1 if documented else 0, says)
    return _codes(compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec"))


def _inside(code: CodeType, function: str) -> bool:
    return code.co_qualname == function or code.co_qualname.startswith(f"{function}.<locals>.")


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    found = {(code.co_qualname, code.co_firstlineno): code}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _codes(constant)
    return found
