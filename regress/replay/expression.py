"""Selection of variants by name: a list of patterns, or an expression as in pytest's -k."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from regress.errors import ConfigError, meant

_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")
_WORDS = ("and", "or", "not")
Test = Callable[[str], bool]


def select(names: Iterable[str], pattern: str) -> list[str]:
    """Return names that match a comma-separated list of patterns, in order.

    Raises:
        ConfigError: for a pattern that matches none.
    """
    known = list(names)
    patterns = [part.strip() for part in pattern.split(",") if part.strip()] or [pattern]
    for part in patterns:
        if not any(fnmatchcase(name, part) for name in known):
            raise ConfigError(
                f"{_meant(part, known)}{part!r} matches none of {', '.join(known)}; give a name, or a pattern such as "
                "'packed*'"
            )
    return [name for name in known if any(fnmatchcase(name, part) for part in patterns)]


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the name whose parts are the nearest ones, else the nearest names, in words."""
    words = [*known]
    parts = {part for word in words for part in word.split("-")}
    near = [next(iter([p] if p in parts else get_close_matches(p, parts, n=1)), "") for p in name.split("-")]
    whole = "-".join(near)
    return f"did you mean {whole}? " if len(near) > 1 and all(near) and whole != name else meant(name, words)


def choose(names: Iterable[str], text: str) -> list[str]:
    """Return the names that ``text`` matches, in their order.

    ``packed*,dp2`` is a list of patterns, each for a whole name. ``tp2 and not packed`` is an expression; its
    words are the dash-separated parts of a name, or patterns for all of it.

    Raises:
        ConfigError: if it finds nothing, or cannot be read.
    """
    known = list(names)
    tokens = _TOKEN.findall(text)
    if not {"(", ")", *_WORDS} & set(tokens):
        return select(known, text)
    test = _Parser(text, tokens).expression()
    found = [name for name in known if test(name)]
    if not found:
        parts = {part for name in known for part in name.split("-")}
        hints = (meant(word, parts) for word in tokens if word not in {"(", ")", *_WORDS, *parts})
        raise ConfigError(
            f"{next(filter(None, hints), '')}{text!r} matches none of {', '.join(known)}; name parts of their names"
        )
    return found


class _Parser:
    """Parser of expressions: ``or`` binds weaker than ``and``, which binds weaker than ``not``."""

    def __init__(self, text: str, tokens: list[str]) -> None:
        self._text, self._tokens = text, [*tokens, ""]

    def expression(self) -> Test:
        test = self._any()
        if self._tokens[0]:
            raise self._unreadable()
        return test

    def _any(self) -> Test:
        tests = [self._all()]
        while self._next("or"):
            tests.append(self._all())
        return lambda name: any(test(name) for test in tests)

    def _all(self) -> Test:
        tests = [self._not()]
        while self._next("and"):
            tests.append(self._not())
        return lambda name: all(test(name) for test in tests)

    def _not(self) -> Test:
        if self._next("not"):
            test = self._not()
            return lambda name: not test(name)
        if self._next("("):
            test = self._any()
            if not self._next(")"):
                raise self._unreadable()
            return test
        word = self._tokens[0]
        if word in ("", ")", *_WORDS):
            raise self._unreadable()
        self._tokens.pop(0)
        if any(sign in word for sign in "*?["):
            return lambda name: fnmatchcase(name, word)
        return lambda name: f"-{word}-" in f"-{name}-"

    def _next(self, token: str) -> bool:
        if self._tokens[0] != token:
            return False
        self._tokens.pop(0)
        return True

    def _unreadable(self) -> ConfigError:
        where = f"at {self._tokens[0]!r}" if self._tokens[0] else "at its end"
        return ConfigError(
            f"{self._text!r} is no expression ({where}); write such as 'tp2 and not (packed or left)'"
        )
