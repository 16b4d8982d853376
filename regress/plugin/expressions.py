"""The expressions of ``-k`` and ``-m``, evaluated before tests have full names: which of them could be selected.

The expressions are parsed and evaluated by pytest; names that are not known yet are tried both ways. So a
test is left out only where pytest itself would leave it out, whatever the unknown names turn out to be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

from regress.compare.quantities import QUANTITIES

Decide = Callable[..., bool | None]
"""Function ``(name, **arguments)``: True if a name of an expression matches; None where that is not known."""

_MOST = 10
"""Maximum unknown names of an expression that are tried both ways; with more, the expression may hold."""

_WORDS = ("step", "update", "rank", "micro")
_ENDS = (*(quantity.name for quantity in QUANTITIES), "unplanned")
_NUMBERED = re.compile(rf"({'|'.join(_WORDS)})\d+", re.ASCII)
_DIGITS = "0123456789"


class Evaluated(Protocol):
    """Expression as pytest compiles it."""

    def evaluate(self, matcher: Any, /) -> bool:
        """Evaluate with a matcher of its names."""


class _UnknownName(Exception):  # noqa: N818  # no error: it ends an evaluation at the first name that is not known
    def __init__(self, key: tuple[Any, ...]) -> None:
        self.key = key


def may_hold(expression: Evaluated, decide: Decide) -> bool:
    """Return True if an expression holds for some answers to what ``decide`` leaves open."""

    def search(assumed: dict[tuple[Any, ...], bool]) -> bool:
        if len(assumed) > _MOST:
            return True

        def matcher(name: str, /, **arguments: Any) -> bool:
            known = decide(name, **arguments)
            if known is not None:
                return known
            key = (name, *sorted(arguments.items()))
            if key not in assumed:
                raise _UnknownName(key)
            return assumed[key]

        try:
            return expression.evaluate(matcher)
        except _UnknownName as unknown:
            return any(search({**assumed, unknown.key: answer}) for answer in (True, False))

    return search({})


@dataclass(frozen=True)
class Keywords:
    """Known names of a test function's tests, which ``-k`` searches.

    Attributes:
        function: name of the function, which a test's name continues with ``[id]``.
        shared: predicate of a text: True if it occurs in one of the names that all of its tests share.
        added: names that hooks may add to some of them.
    """

    function: str
    shared: Callable[[str], bool]
    added: frozenset[str] = frozenset()

    def of_test(self, id: str) -> Decide:
        """Decide about the test of an id."""
        name = f"{self.function}[{id}]".lower()
        return lambda text: self._decide(text.lower(), name, unknown=False)

    def of_replay(self, replay: str) -> Decide:
        """Decide about all tests of a replay, whose ids continue ``case/variant`` in a way that is not known yet."""
        name = f"{self.function}[{replay}/".lower()
        return lambda text: self._decide(text.lower(), name, unknown=may_continue(name, text.lower()))

    def _decide(self, text: str, name: str, *, unknown: bool) -> bool | None:
        if text in name or self.shared(text):
            return True
        return None if unknown or any(text in added.lower() for added in self.added) else False


def names_of(expression: str) -> list[str]:
    """Return the names of an expression of ``-k``, in its order."""
    found = re.findall(r"[\w:+.\[\]\\/-]+", expression)
    return [name for name in dict.fromkeys(found) if name not in ("and", "or", "not")]


def misspelt(expression: str, replays: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the names of an expression that occur in no test of some replays, each with the nearest one that does.

    Args:
        replays: ``case/variant``.
    """
    words = {*_WORDS, *_ENDS}
    for replay in replays:
        words |= {replay, *replay.split("/"), *re.split(r"[/-]", replay)}
    for name in names_of(expression):
        text = name.lower()
        if any(text in f"[{replay.lower()}/" for replay in replays) or may_continue("", text):
            continue
        yield name, next(iter(get_close_matches(text, words, n=1)), None)


def may_continue(name: str, text: str) -> bool:
    """Return True if a text could be found where a name that ends with ``/`` is continued by place and quantity.

    The continuation is ``step0/update1/rank0/micro2/quantity]``; the order of the text's parts within it is
    not checked.
    """
    parts = text.removesuffix("]").split("/")
    if len(parts) == 1:
        return _is_within(parts[0])
    if _ends(parts[0]) and _continues(parts[1:]):
        return True
    heads = range(1, len(parts))
    return any(name.endswith("/".join(parts[:count]) + "/") and _continues(parts[count:]) for count in heads)


def _continues(parts: list[str]) -> bool:
    return all(_is_segment(part) for part in parts[:-1]) and _starts(parts[-1])


def _is_segment(part: str) -> bool:
    return part in _ENDS or _NUMBERED.fullmatch(part) is not None


def _starts(part: str) -> bool:
    return any(word.startswith(part) for word in (*_WORDS, *_ENDS)) or _NUMBERED.fullmatch(part) is not None


def _ends(part: str) -> bool:
    return any(end.endswith(part) for end in _ENDS) or _is_numbered_end(part)


def _is_within(part: str) -> bool:
    return any(part in word for word in (*_WORDS, *_ENDS)) or _is_numbered_end(part)


def _is_numbered_end(part: str) -> bool:
    """Return True if a part ends a word with digits behind it, such as ``ank12`` or ``2``."""
    head = part.rstrip(_DIGITS)
    return head != part and any(word.endswith(head) for word in _WORDS)


def may_have_marker(present: Callable[..., bool], added: Iterable[str]) -> Decide:
    """Decide about the markers of ``-m``: those of a function, and those that hooks may add to some of its tests."""
    names = frozenset(added)

    def decide(name: str, /, **arguments: Any) -> bool | None:
        if present(name, **arguments):
            return True
        return None if name in names else False

    return decide
