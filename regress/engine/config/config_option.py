"""Options: fields of the sections, which say everything about themselves in the place where they stand.

    group_size: Annotated[Size, Flag("group-size")] = 8
    '''completions sampled per prompt'''

Type, bounds, flags and variables are the annotation, the help text is the text beneath. `options` is the table of all.
"""

import ast
import inspect
import math
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache, cached_property, reduce
from itertools import pairwise
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from regress.engine.config.config_messages import Origin, nearest, shortened
from regress.errors import ConfigError

if TYPE_CHECKING:
    from regress.engine.config.config_schema import Config

KeyPath = tuple[str, ...]
Origins = Callable[["KeyPath"], Origin]
"""Returns the origin of the value at a path."""
BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
NAMES: Mapping[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a finite number",
    dict: "a mapping",
    Any: "made of text, finite numbers, booleans, lists and mappings",
}


LIMITS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("of at least", operator.ge),
    "above": ("greater than", operator.gt),
    "most": ("at most", operator.le),
    "below": ("less than", operator.lt),
}


@dataclass(frozen=True)
class Bounds:
    """What a value keeps besides its type; of a list, each of its numbers.

    Attributes:
        length: number of members of a list.
        choices: the texts that an option takes; none: any.
        more: returns further ones, which it takes an import to know.
        others: words for those.
        regex: True for a text that is a regular expression.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    length: int | None = None
    choices: tuple[str, ...] = ()
    more: Callable[[], Iterable[str]] | None = None
    others: str = ""
    regex: bool = False

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits that are set, in words: ``{"of at least": 1}``."""
        return {LIMITS[name][0]: limit for name in LIMITS if (limit := getattr(self, name)) is not None}

    @property
    def texts(self) -> tuple[str, ...]:
        """Return all choices, also those that it takes an import to know."""
        return (*self.choices, *(self.more() if self.more is not None else ()))

    def keep(self, value: Any) -> bool:
        """Return True if a value, or a list's numbers, keep the bounds; of a regular expression see `re`."""
        members = value if isinstance(value, list) else [value]
        limits = ((holds, getattr(self, name)) for name, (_, holds) in LIMITS.items())
        return (
            (not self.choices or value in self.choices or value in self.texts)
            and self.length in (None, len(members))
            and all(limit is None or holds(one, limit) for holds, limit in limits for one in members)
        )


@dataclass(frozen=True)
class Variable:
    """Environment variable without our prefix that sets the option, below one with it."""

    name: str


@dataclass(frozen=True)
class Flag:
    """Alias of the option among the flags of ``regress train``, with dashes; underscores do as well.

    Attributes:
        metavar: word for its value in help texts; empty: by the type of the option.
        given: value of a flag that is written without one; None: it takes a value.
        optional: True if it may be written with a value all the same.
        of_wandb: True if it means nothing without wandb, so that it switches it on.
    """

    name: str
    metavar: str = ""
    given: str | None = None
    optional: bool = False
    of_wandb: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return every way to write the flag."""
        return tuple(dict.fromkeys((f"--{self.name}", f"--{self.name.replace('-', '_')}")))


Size = Annotated[int, Bounds(least=1)]
Count = Annotated[int, Bounds(least=0)]
Seed = Annotated[int, Bounds(least=0, most=2**32 - 1)]
Positive = Annotated[float, Bounds(above=0)]
NonNegative = Annotated[float, Bounds(least=0)]
Fraction = Annotated[float, Bounds(above=0, most=1)]
Pattern = Annotated[str, Bounds(regex=True)]


def one_of(*texts: str) -> Bounds:
    """Return the bounds of an option that takes one of these texts."""
    return Bounds(choices=texts)


class Entry(NamedTuple):
    """A value (perhaps an interpolation, perhaps a mapping) that a layer gives to a path.

    ``spelled`` is the source text of a scalar, which an option that holds text takes as it is: ``007``, ``yes``.
    """

    path: KeyPath
    value: Any
    origin: Origin
    spelled: str | None = None


class Section:
    """A section of the configuration: a dataclass of options and further sections."""

    def conflicts(self, run: "Config", origin: Origins) -> Iterator[str]:
        """Yield a sentence, with the remedy, for each combination of values that cannot work in the run.

        White space in it counts as one blank.
        """
        yield from ()


@dataclass(frozen=True)
class Option:
    """A key of the configuration that holds a value.

    ``kind`` is ``str``, ``int``, ``float``, ``bool``, ``list``, ``dict`` (a free mapping) or ``Any``; ``item`` the
    kind of the members of a list or mapping; ``notes`` what else stands in the annotation.
    """

    path: KeyPath
    kind: Any
    item: Any = None
    optional: bool = False
    default: Any = None
    notes: tuple[Any, ...] = ()
    section: type = field(default=Section, repr=False)

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def help(self) -> str:
        return _help_texts(self.section)[self.path[-1]]

    @cached_property
    def bounds(self) -> Bounds:
        return next((note for note in self.notes if isinstance(note, Bounds)), Bounds())

    @property
    def rule(self) -> str:
        """Return what a value must be, in words."""
        bounds = self.bounds
        if bounds.choices:
            return ", or ".join(filter(None, (f"one of {', '.join(bounds.choices)}", bounds.others)))
        if bounds.regex:
            return "a regular expression"
        members = f"{bounds.length or ''} {'names' if self.item is str else 'numbers'}".lstrip()
        name = f"a list of {members}" if self.kind is list else NAMES[self.kind]
        limits = " and ".join(f"{words} {limit:.15g}" for words, limit in bounds.limits.items())
        return f"{name} {limits}".rstrip() + (" or null" if self.optional else "")

    def value_in(self, config: "Config") -> Any:
        """Return the value in a configuration."""
        return reduce(getattr, self.path, config)

    def holds_text(self, path: KeyPath) -> bool:
        """Return True if the value at ``path``, the option or an entry of it, is text."""
        return (self.kind if path == self.path else self.item) is str

    def checked(self, value: Any, origin: Origins) -> Any:
        """Return ``value`` in the type of the option; text is converted.

        Raises `ConfigError` naming key, value, origin and rule if it does not fit.
        """
        if self.kind is dict and isinstance(value, dict):
            members = (Option((*self.path, str(name)), self.item) for name in value)
            return {
                m.path[-1]: m.checked(item, origin) for m, item in zip(members, value.values(), strict=True)
            }
        if value is None and self.optional:
            return None
        extra = ""
        try:
            converted = _converted(self.kind, self.item, value)
            if self.bounds.regex:
                re.compile(converted)
            if self.bounds.keep(converted):
                return converted
        except re.error as error:
            extra = f", which it is not: {error}; write special characters with \\"
        except ValueError as misfit:
            extra = str(misfit) if isinstance(misfit, _MisfitError) else ""
        hint = f"; did you mean {nearest(str(value), self.bounds.texts)}?" if self.bounds.choices else "."
        stated = f"{self.key}={shortened(value)} ({origin(self.path)})"
        raise ConfigError(f"{stated} must be {self.rule}{extra}{hint}")


class _MisfitError(ValueError):
    """A value breaks the rule of its option; the text adds what the rule alone does not say."""


def _converted(kind: Any, item: Any, value: Any) -> Any:
    """Return a value in a type, as OmegaConf converts; `ValueError` if it is not possible."""
    match kind, value:
        case (_, list()) if kind is list:
            return [_converted(item, None, member) for member in value]
        case (_, str() | bool()) if kind is bool and str(value).lower() in BOOLEANS:
            return BOOLEANS[str(value).lower()]
        case (_, int()) if kind is bool and value in (0, 1):
            return bool(value)
        case (_, str() | int()) if kind is int and re.fullmatch(r"[+-]?[0-9]{1,18}", str(value)):
            return int(value)
        case (_, str() | int() | float()) if kind is float and not isinstance(value, bool):
            if math.isfinite(number := float(value)):
                return number
        case (_, bool()) if kind is str:
            return str(value).lower()
        case _ if kind is str and not isinstance(value, dict | list | None):
            if "\0" in str(value):
                raise _MisfitError(" without the character NUL, which no path and no variable can hold")
            return str(value)
        case (_, dict()) if kind is Any:
            return {str(name): _converted(Any, None, member) for name, member in value.items()}
        case (_, list()) if kind is Any:
            return [_converted(Any, None, member) for member in value]
        case (_, float()) if kind is Any:
            return _converted(float, None, value)
        case (_, None | str() | bool() | int()) if kind is Any:
            return value
    raise ValueError


def options_of(kind: type, prefix: KeyPath = ()) -> Iterator[Option]:
    """Yield the options of a section and of those below it, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    for spec in fields(kind):
        if is_dataclass(hints[spec.name]):
            yield from options_of(hints[spec.name], (*prefix, spec.name))
        else:
            yield _option((*prefix, spec.name), hints[spec.name], spec, kind)


def _option(path: KeyPath, hint: Any, spec: "Field[Any]", section: type) -> Option:
    notes, optional = _notes_of_metadata(spec.metadata), False
    while get_origin(hint) in (Annotated, Union, UnionType):
        optional = optional or get_origin(hint) is not Annotated
        hint, *more = get_args(hint)
        notes += [note for note in more if note is not type(None)]
    kind, members = get_origin(hint) or hint, get_args(hint)
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    return Option(path, kind, members[-1] if members else None, optional, default, tuple(notes), section)


def _notes_of_metadata(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the bounds of a field of `regress.grpo`, which states them as metadata."""
    found = {"least": metadata.get("minimum"), "choices": metadata.get("choices", ())}
    return [Bounds(**found)] if any(value is not None and value != () for value in found.values()) else []


@cache
def _help_texts(section: type) -> Mapping[str, str]:
    """Return the text beneath each field of a section, or that of its metadata."""
    found = {spec.name: spec.metadata["help"] for spec in fields(section) if "help" in spec.metadata}
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body  # type: ignore[attr-defined]
    for one, below in pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(below, ast.Expr):
            found[ast.unparse(one.target)] = " ".join(ast.literal_eval(below.value).split())
    return found
