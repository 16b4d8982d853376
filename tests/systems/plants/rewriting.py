"""A function of a released package with another line in its source, wherever it was imported to."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any


@contextmanager
def rewritten(function: Callable[..., Any], changes: Mapping[str, str]) -> Iterator[None]:
    """Run a function's source with other text in it, inside; everybody who holds the function sees the change.

    Args:
        function: of Python; decorators stay.
        changes: text that its source has exactly once -> what takes its place.

    Raises:
        LookupError: if the source has the text not once, as another release may.
    """
    inner = _innermost(function)
    source = textwrap.dedent(inspect.getsource(inner))
    for before, after in changes.items():
        if source.count(before) != 1:
            raise LookupError(f"{inner.__qualname__} has {source.count(before)} times, not once: {before}")
        source = source.replace(before, after)
    own = inner.__code__
    inner.__code__ = _compiled(source, own)
    try:
        yield
    finally:
        inner.__code__ = own


def _innermost(function: Callable[..., Any]) -> Any:
    """Return what decorators wrap, also those that do not tell."""
    found: Any = inspect.unwrap(function)
    held = [cell.cell_contents for cell in found.__closure__ or ()]
    functions = [one for one in held if inspect.isfunction(one)]
    return _innermost(functions[0]) if found.__name__ == "wrapped_fn" and functions else found


def _compiled(source: str, own: CodeType) -> CodeType:
    """Return the code of a function's source, with the free variables of the own one."""
    tree = ast.parse(source)
    definition: Any = tree.body[0]
    definition.decorator_list = []
    outside: Any = ast.parse(f"def outside({', '.join(own.co_freevars)}): pass").body[0]
    outside.body = [definition]
    tree.body = [outside]
    whole = compile(ast.fix_missing_locations(tree), own.co_filename, "exec")
    (maker,) = (code for code in whole.co_consts if isinstance(code, CodeType))
    found = next(
        code for code in maker.co_consts if isinstance(code, CodeType) and code.co_name == own.co_name
    )
    if found.co_freevars != own.co_freevars:
        raise LookupError(f"{own.co_qualname} would have the free variables {found.co_freevars}")
    return found
