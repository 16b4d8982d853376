"""Calculator that parses arithmetic itself: nothing a model writes is ever evaluated as a program.

sum     = product (("+" | "-") product)*
product = signed (("*" | "/") signed)*
signed  = ("+" | "-") signed | power
power   = atom ["**" signed]
atom    = digits ["." digits] | "(" sum ")"
"""

from __future__ import annotations

import re
from fractions import Fraction

from regress.errors import TaskError

MAX_LENGTH = 200
MAX_DEPTH = 32
MAX_EXPONENT = 64
MAX_BITS = 128
"""Largest size of a numerator or denominator."""
DECIMALS = 6
ALPHABET = "0123456789+-*/(). "

_TOKEN = re.compile(r"\s*(\*\*|[-+*/()]|[0-9]+(?:\.[0-9]+)?)", re.ASCII)


class ToolError(TaskError):
    """A tool cannot do what a model asks of it."""


def calculate(text: str) -> str:
    """Return the value of an arithmetic expression: an integer, or a decimal number rounded to six places.

    Raises:
        ToolError: for anything outside the grammar, a division by zero, and anything too long, too deep or too large.
    """
    value = _Parser(_tokens(text)).whole()
    if value.denominator == 1:
        return str(value.numerator)
    scaled = round(value * 10**DECIMALS)
    sign, digits = "-" * (scaled < 0), str(abs(scaled)).zfill(DECIMALS + 1)
    return f"{sign}{digits[:-DECIMALS]}.{digits[-DECIMALS:]}".rstrip("0").rstrip(".")


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_LENGTH:
        raise ToolError(f"the expression has {len(text)} characters, more than {MAX_LENGTH}; shorten it")
    text, place, found = text.rstrip(), 0, []
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ToolError(
                f"{text[place:].lstrip()[:1]!r} is not a part of an expression; use numbers, + - * / ** ( )"
            )
        found.append(match[1])
        place = match.end()
    return found


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._next() is not None:
            raise ToolError(f"{self._next()!r} is unexpected; write one expression")
        return value

    def _next(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self, *expected: str) -> str | None:
        token = self._next()
        if token not in expected:
            return None
        self._place += 1
        return token

    def _sum(self) -> Fraction:
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            other = self._product()
            value = _checked(value + other if sign == "+" else value - other)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while (sign := self._take("*", "/")) is not None:
            other = self._signed()
            if sign == "/" and other == 0:
                raise ToolError("the expression divides by zero; correct the divisor")
            value = _checked(value * other if sign == "*" else value / other)
        return value

    def _signed(self) -> Fraction:
        with _Deeper(self):
            sign = self._take("+", "-")
            if sign is None:
                return self._power()
            value = self._signed()
            return -value if sign == "-" else value

    def _power(self) -> Fraction:
        base = self._atom()
        if self._take("**") is None:
            return base
        exponent = self._signed()
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
            raise ToolError(f"the exponent is not a whole number up to {MAX_EXPONENT}; lower it")
        if base == 0 and exponent < 0:
            raise ToolError("the expression divides by zero; correct the exponent")
        if _bits(base) * abs(int(exponent)) > MAX_BITS + abs(int(exponent)):
            raise _too_large()
        return _checked(base ** int(exponent))

    def _atom(self) -> Fraction:
        with _Deeper(self):
            if self._take("(") is not None:
                value = self._sum()
                if self._take(")") is None:
                    raise ToolError("a bracket is not closed; close it")
                return value
        token = self._next()
        if token is None or not token[0].isdigit():
            raise ToolError(f"a number is missing before {token or 'the end'!r}; complete the expression")
        self._place += 1
        return _checked(Fraction(token))

    def deeper(self, by: int) -> None:
        self._depth += by
        if self._depth > 2 * MAX_DEPTH:
            raise ToolError(
                f"the expression is nested more than {MAX_DEPTH} deep; take brackets or signs away"
            )


class _Deeper:
    """One level of nesting."""

    def __init__(self, parser: _Parser) -> None:
        self._parser = parser

    def __enter__(self) -> None:
        self._parser.deeper(1)

    def __exit__(self, *_: object) -> None:
        self._parser.deeper(-1)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _checked(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise _too_large()
    return value


def _too_large() -> ToolError:
    return ToolError(f"a number has more than {MAX_BITS} bits; use smaller ones")
