"""Shapes of JSON documents, stated as types: `TypedDict` for objects, `list`, `dict`, `Literal`, unions and bounds.

    class Stamp(TypedDict):
        size: Annotated[int, Least(0)]
        sha256: Annotated[str, Matches("[0-9a-f]{64}", "a SHA-256")]

    stamp = conform(json, Stamp, "the stamp")

The same classes are what mypy knows of a document, and a dataclass is the object of its fields, of which those with a
default may be missing: earlier releases had not written them. An integer is not a bool,
a float may be an integer and is finite if it is `Finite`, and a text is one that can be encoded. Objects may have
further keys, which later releases write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from regress.printable_text import printable

T = TypeVar("T")
Check = Callable[[Any, str], None]

_SHOWN = 60
_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    NoneType: "null",
    dict: "an object",
    list: "a list",
}


@dataclass(frozen=True)
class Least:
    """Least value of a number."""

    value: float


@dataclass(frozen=True)
class Most:
    """Greatest value of a number, or most characters of a text."""

    value: float


@dataclass(frozen=True)
class Matches:
    """Form of a text: a regular expression for all of it, and words for it."""

    pattern: str
    words: str


@dataclass(frozen=True)
class IsFinite:
    """Bound of a number: neither NaN nor infinite."""


@dataclass(frozen=True)
class Named:
    """Form of a text that names something: printable, and not empty."""


Count = Annotated[int, Least(0), Most(2**63 - 1)]
"""A number of things, bytes or elements."""
Name = Annotated[str, Named(), Most(1000)]
"""Name of something."""
Finite = Annotated[float, IsFinite()]
"""A number that is neither NaN nor infinite."""
Hash = Annotated[str, Matches("[0-9a-f]{64}", "a SHA-256")]


def conform(value: Any, kind: type[T] | Any, where: str) -> T:
    """Return a value of a JSON document as what it is.

    Args:
        kind: a type that this module knows, such as a `TypedDict`.
        where: the value in words, with which the sentence about a wrong one begins.

    Raises:
        ValueError: with a clause: ``files['a'].size is 'x', not an integer``.
    """
    _check_of(cast("Hashable", kind))(value, where)
    return cast("T", value)


@lru_cache(maxsize=512)
def _check_of(kind: Any) -> Check:
    """Return the function that raises for what is not of a kind."""
    if kind is Any:
        return lambda value, where: None
    if is_typeddict(kind) or is_dataclass(kind):
        return _object(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bounded(_check_of(arguments[0]), arguments[1:])
    if origin in (Union, UnionType):
        return _union(arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin in (list, Sequence):
        return _list(_check_of(arguments[0]))
    if origin is tuple and arguments[-1] is Ellipsis:
        return _list(_check_of(arguments[0]))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _literal(tuple(one.value for one in kind))
    if origin is tuple:
        return _tuple([_check_of(one) for one in arguments])
    if origin in (dict, Mapping):
        return _mapping(_check_of(arguments[1]), _check_of(arguments[0]))
    return _plain({Mapping: dict}.get(kind, kind))


def _plain(kind: Any) -> Check:
    kinds = (int, float) if kind is float else (kind,)

    def check(value: Any, where: str) -> None:
        if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
            refuse(value, where, _WORDS[kind])
        if kind is str and not value.isascii():
            _refuse_surrogates(value, where)

    return check


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _refuse_surrogates(value: str, where: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(value, where, "a text without lone surrogates")


def _object(kind: Any) -> Check:
    hints = get_type_hints(kind, include_extras=True)
    checks = {name: _check_of(_inner(hint)) for name, hint in hints.items()}
    must = {name for name, hint in hints.items() if get_origin(hint) is Required}
    may = {name for name, hint in hints.items() if get_origin(hint) is NotRequired}
    if is_dataclass(kind):
        may |= {spec.name for spec in fields(kind) if _has_default(spec)}
    total = getattr(kind, "__total__", True)
    required = hints.keys() - may if total else must  # annotations are texts, so the class itself cannot tell

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            refuse(value, where, "an object")
        for name, found in checks.items():
            if name in value:
                found(value[name], f"{where}.{name}")
            elif name in required:
                raise ValueError(f"{where} lacks {name!r}")

    return check


def _has_default(spec: Field[Any]) -> bool:
    return spec.default is not MISSING or spec.default_factory is not MISSING


def _inner(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) in (NotRequired, Required) else hint


def _bounded(check: Check, bounds: tuple[Any, ...]) -> Check:
    def checked(value: Any, where: str) -> None:
        check(value, where)
        for bound in bounds:
            _refuse_beyond(value, bound, where)

    return checked


def _refuse_beyond(value: Any, bound: Any, where: str) -> None:
    match bound:
        case Least(least) if value is not None and value < least:
            refuse(value, where, f"at least {least:g}")
        case Most(most) if isinstance(value, str) and len(value) > most:
            refuse(value, where, f"a text of at most {most:g} characters")
        case Most(most) if isinstance(value, int | float) and value > most:
            refuse(value, where, f"at most {most:g}")
        case Matches(pattern, words) if isinstance(value, str) and not re.fullmatch(pattern, value, re.ASCII):
            refuse(value, where, words)
        case IsFinite() if isinstance(value, int | float) and not _finite(value):
            refuse(value, where, "a finite number")
        case Named() if isinstance(value, str) and not (value and value.isprintable()):
            refuse(value, where, "a printable name")


def _union(kinds: tuple[Any, ...]) -> Check:
    checks = [_check_of(kind) for kind in kinds]
    plain = [_unbounded(kind) for kind in kinds]
    words = " or ".join(_WORDS.get(kind, str(kind)) for kind in plain)

    def check(value: Any, where: str) -> None:
        first: ValueError | None = None
        for one, kind in zip(checks, plain, strict=True):
            try:
                return one(value, where)
            except ValueError as error:
                if type(value) is kind:  # it has the kind, and something in it or its size is wrong
                    first = error
        if first is not None:
            raise first
        return refuse(value, where, words)

    return check


def _unbounded(kind: Any) -> Any:
    """Return the plain type of a value, without what stands in it and without its bounds."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return get_origin(kind) or kind


def _literal(allowed: tuple[Any, ...]) -> Check:
    words = " or ".join(map(repr, allowed))

    def check(value: Any, where: str) -> None:
        if isinstance(value, bool) or not any(
            isinstance(value, type(one)) and value == one for one in allowed
        ):
            refuse(value, where, words)

    return check


def _list(check: Check) -> Check:
    def checked(value: Any, where: str) -> None:
        if not isinstance(value, list | tuple):
            refuse(value, where, "a list")
        for index, item in enumerate(value):
            check(item, f"{where}[{index}]")

    return checked


def _tuple(checks: list[Check]) -> Check:
    def checked(value: Any, where: str) -> None:
        if not isinstance(value, list | tuple) or len(value) != len(checks):
            refuse(value, where, f"a list of {len(checks)}")
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            check(item, f"{where}[{index}]")

    return checked


def _mapping(check: Check, key: Check) -> Check:
    def checked(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            refuse(value, where, "an object")
        for name, item in value.items():
            key(name, f"a key of {where}")
            check(item, f"{where}[{name!r}]")

    return checked


def refuse(value: Any, where: str, words: str) -> None:
    """Raise `ValueError` saying that a value is not what `words` say."""
    shown = repr(value) if not isinstance(value, dict | list) else _WORDS[type(value)]
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        shown = "an integer of more than 64 bits"
    shown = printable(shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}...")
    raise ValueError(f"{printable(where[:200])} is {shown}, not {words}")
