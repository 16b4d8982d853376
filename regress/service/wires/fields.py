"""Fields of a JSON body: each is read with its type and its bounds, and named in the sentence that refuses it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from regress.service.api import ServiceError
from regress.service.wires.settings import Limits
from regress.service.wires.wire import shown

_REQUIRED: Final[Any] = object()
_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}


def parse_json(body: bytes, limits: Limits, *, numbered: bool = False) -> Fields:
    """Return the fields of a body that is one JSON object.

    NaN and infinities are not JSON. Some clients send them all the same, and have spent a sequence number then: with
    ``numbered`` they are the `Fields.problem` of a body whose number can be read.

    Raises:
        ServiceError: it is not JSON, nested too deeply, or not an object.
    """
    if not body.strip():
        return Fields({}, "")
    _check_nesting(body, limits.nesting)
    problems: list[ServiceError] = []

    def constant(name: str) -> float:
        problems.append(ServiceError(f"the body has {name}, which is not JSON; send finite numbers"))
        if not numbered:
            raise problems[0]
        return float(name)

    try:
        values = json.loads(body.decode("utf-8"), parse_constant=constant)
    except RecursionError:
        raise ServiceError("the body is nested too deeply; send flat JSON") from None
    except UnicodeDecodeError:
        raise ServiceError("the body is not UTF-8; send JSON in UTF-8") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        cause = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]
        raise ServiceError(f"the body is not valid JSON ({cause}); send one JSON object") from None
    if not isinstance(values, dict):
        raise ServiceError(f"the body is {_kind(values)}; send one JSON object")
    return Fields(values, "", problems[0] if problems else None)


class Fields:
    """Object of a JSON body.

    Args:
        values: its values by name.
        where: path of the object in the body, for sentences.
        problem: why the body cannot be accepted, although it can be read.
    """

    def __init__(self, values: Mapping[str, Any], where: str, problem: ServiceError | None = None) -> None:
        self.values = values
        self.where = where
        self.problem = problem

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str, default: Any = _REQUIRED, *, limit: int = 256) -> Any:
        """Return a text of at most ``limit`` characters."""
        value = self._get(name, default)
        if value is default:
            return default
        if not isinstance(value, str):
            self.refuse(name, "must be text", value)
        if len(value) > limit:
            self.refuse(name, f"must be text of at most {limit} characters", value)
        try:
            value.encode()
        except UnicodeEncodeError:
            self.refuse(name, "must be text without lone surrogates", value)
        if any(ord(letter) < 32 for letter in value) and limit <= 256:
            self.refuse(name, "must be text without control characters", value)
        return value

    def integer(self, name: str, default: Any = _REQUIRED, *, low: int = 0, high: int = 2**31 - 1) -> Any:
        """Return an integer between two bounds."""
        value = self._get(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            wide = high.bit_length() > 64
            self.refuse(
                name,
                f"must be an integer of {high.bit_length() + 1} bits"
                if wide
                else f"must be an integer from {low} to {high}",
                value,
            )
        return value

    def number(self, name: str, default: Any = _REQUIRED, *, low: float = -math.inf) -> Any:
        """Return a finite number."""
        value = self._get(name, default)
        if value is default:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, "must be a number", value)
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value) or value < low:
            self.refuse(
                name, "must be a finite number" + ("" if low == -math.inf else f" from {low:g}"), value
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false", value)
        return bool(value)

    def part(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return an object inside this one."""
        value = self._get(name, default)
        if value is default:
            return default
        if not isinstance(value, dict):
            self.refuse(name, "must be an object", value)
        return Fields(value, self.named(name), self.problem)

    def items(self, name: str, default: Any = _REQUIRED, *, limit: int) -> Any:
        """Return a list of at most ``limit`` values."""
        value = self._get(name, default)
        if value is default:
            return default
        if not isinstance(value, list):
            self.refuse(name, "must be a list", value)
        if len(value) > limit:
            self.refuse(name, f"must be a list of at most {limit} values", value, code="too_large")
        return value

    def parts(self, name: str, *, limit: int) -> list[Fields]:
        """Return a list of objects."""
        found = []
        for index, value in enumerate(self.items(name, limit=limit)):
            if not isinstance(value, dict):
                self.refuse(f"{name}[{index}]", "must be an object", value)
            found.append(Fields(value, self.named(f"{name}[{index}]")))
        return found

    def named(self, name: str) -> str:
        """Return the path of a field in the body."""
        return f"{self.where}.{name}" if self.where else name

    def refuse(self, name: str, rule: str, value: object, *, code: str = "invalid_request") -> NoReturn:
        """Raise the error of a field that breaks a rule."""
        raise ServiceError(f"{self.named(shown_name(name))} {rule}, not {_kind(value)}", code=code)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ServiceError(f"{self.named(name)} is missing")
            return default
        return value


def shown_name(name: str) -> str:
    """Return a client's own name as it may stand in a sentence."""
    return name if name.isascii() and name.isprintable() and len(name) <= 80 else shown(name)


def _kind(value: object) -> str:
    if type(value) in _KINDS:
        kind = _KINDS[type(value)]
        return f"{kind} of length {len(value)}" if isinstance(value, (str, list)) else kind
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "an integer of many digits"
    return text if len(text) <= 40 else text[:37] + "..."


def _check_nesting(body: bytes, limit: int) -> None:
    """Refuse deep nesting before any object is made."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    depth = 0
    for piece in _TEXT_OR_BRACKET.finditer(body):
        token = piece.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > limit:
                raise ServiceError(f"the body is nested more than {limit} deep; send flat JSON")
        elif token in (b"]", b"}"):
            depth -= 1
