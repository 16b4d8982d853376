"""A JSON message: the bytes of a body, the object in them, and the types of its fields, as pydantic models.

A field that is ``null`` means what is meant without it; fields that a message does not have are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from regress.service.service_api import ServiceError
from regress.service.wires.app_settings import Limits
from regress.service.wires.wire_protocol import Call, Reply, Wait, shown_name

_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_SEED = 2**2047
"""Bound of seeds: the stream of a completion of the engine has a seed of some hundred bits."""
_LONG = 1024
"""Characters of an address, of the id of a request, and of a text at which completions stop."""
FEW = 64
"""Settings of a loss, and texts or tokens at which completions stop."""
_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
_RULES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than_equal": "must be at least {ge}",
    "int_type": "must be an integer",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_type": "must be an object",
    "string_type": "must be text",
    "string_unicode": "must be text without lone surrogates",
}
"""Rule of a field, by pydantic's type of the error."""


@dataclass(frozen=True)
class Body:
    """Object that a body is; ``problem`` says why it cannot be accepted, although it can be read."""

    values: Mapping[str, Any]
    problem: ServiceError | None = None


def parse_json(body: bytes, limits: Limits, *, numbered: bool = False) -> Body:
    """Return a body that is one JSON object.

    NaN and infinities are not JSON. Some clients send them all the same, and have spent a sequence number then: with
    ``numbered`` they are the `Body.problem` of a body whose number can be read.

    Raises:
        ServiceError: it is not JSON, nested too deeply, or not an object.
    """
    if not body.strip():
        return Body({})
    _check_nesting(body, limits.nesting)
    problems: list[ServiceError] = []

    def constant(name: str) -> float:
        problems.append(ServiceError(f"the body has {name}, which is not JSON; send finite numbers"))
        if not numbered:
            raise problems[0]
        return float(name)

    try:
        hook = _without_null if b"null" in body else None
        values = json.loads(body.decode("utf-8"), parse_constant=constant, object_hook=hook)
    except RecursionError:
        raise ServiceError("the body is nested too deeply; send flat JSON") from None
    except UnicodeDecodeError:
        raise ServiceError("the body is not UTF-8; send JSON in UTF-8") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        cause = error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]
        raise ServiceError(f"the body is not valid JSON ({cause}); send one JSON object") from None
    if not isinstance(values, dict):
        raise ServiceError(f"the body is {_kind(values)}; send one JSON object")
    return Body(values, problems[0] if problems else None)


def _without_null(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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


def refused(where: str, rule: str, value: object, *, code: str = "invalid_request") -> ServiceError:
    """Return the error of a field that breaks a rule."""
    return ServiceError(f"{where} {rule}, not {_kind(value)}", code=code)


def _kind(value: object) -> str:
    if type(value) in _KINDS:
        kind = _KINDS[type(value)]
        return f"{kind} of length {len(value)}" if isinstance(value, (str, list)) else kind
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "an integer of many digits"
    return text if len(text) <= 40 else text[:37] + "..."


class Message(BaseModel):
    """Object of a body. `of` reads it; the `Limits` of a request are the context of its fields."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())

    @classmethod
    def of(cls, values: Mapping[str, Any], limits: Limits, where: str = "") -> Self:
        """Return the message of an object, which is at a place of its body.

        Raises:
            ServiceError: it names the first field that is refused, and the rule.
        """
        try:
            return cls.model_validate(values, context=limits)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)[0], where) from None


class Request(Message):
    """Message that is the whole body of a request."""

    @classmethod
    def handle(cls, call: Call) -> Reply | Wait:
        """Read the message, and answer it."""
        return cls.of(parse_json(call.body, call.limits).values, call.limits)._answer(call)

    def _answer(self, call: Call) -> Reply | Wait:
        raise NotImplementedError


def _refusal(error: ErrorDetails, where: str) -> ServiceError:
    for place in error["loc"]:
        if place != "[key]":
            where += f"[{place}]" if isinstance(place, int) else f".{shown_name(place)}"
    where = where.removeprefix(".") or "the body"
    if error["type"] == "missing":
        return ServiceError(f"{where} is missing")
    code = error["type"] if error["type"] == "too_large" else "invalid_request"
    rule = _RULES[error["type"]].format_map(error.get("ctx", {})) if error["type"] in _RULES else error["msg"]
    return refused(where, rule, error["input"], code=code)


def _rule(sentence: str, kind: str = "rule") -> PydanticCustomError:
    return PydanticCustomError(kind, "{rule}", {"rule": sentence})


def _writable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _rule("must be text without lone surrogates") from None
    return text


def _name(text: str, info: ValidationInfo[Limits]) -> str:
    if len(text) > info.context.text:
        raise _rule(f"must be text of at most {info.context.text} characters")
    if min(text, default=" ") < " ":
        raise _rule("must be text without control characters")
    return _writable(text)


def _long(text: str) -> str:
    if len(text) > _LONG:
        raise _rule(f"must be text of at most {_LONG} characters")
    return _writable(text)


def between(low: int, high: int) -> BeforeValidator:
    """Return the check that a field is an integer within two bounds."""
    bits = high.bit_length()
    rule = f"an integer from {low} to {high}" if bits <= 64 else f"an integer of {bits + 1} bits"

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _rule(f"must be {rule}")
        return value

    return BeforeValidator(check)


def at_most(limit: str | int, kind: type[list[Any] | dict[str, Any]] = list) -> BeforeValidator:
    """Return the check of a list or an object: no more parts than a number, or one of the `Limits`, allows."""

    def check(value: Any, info: ValidationInfo[Limits]) -> Any:
        if not isinstance(value, kind):
            raise _rule(f"must be {_KINDS[kind]}")
        most = limit if isinstance(limit, int) else getattr(info.context, limit)
        if len(value) > most:
            raise _rule(f"must be {_KINDS[kind]} of at most {most} values", "too_large")
        return value

    return BeforeValidator(check)


def _setting(value: Any, info: ValidationInfo[Limits]) -> Any:
    if isinstance(value, str):
        return _name(value, info)
    if isinstance(value, bool) or value is None:
        return value
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _rule("must be a finite number, text, true or false")
    return number


def _stop(value: Any) -> tuple[Sequence[str], Sequence[int]]:
    """Return the texts and the token ids of a text, a list of texts, or a list of token ids."""
    values: list[Any] = value if isinstance(value, list) else [value]
    if len(values) > FEW:
        raise _rule(f"must be a list of at most {FEW} values", "too_large")
    if all(isinstance(one, str) for one in values):
        return [_long(one) for one in values], []
    if values is not value or not all(type(one) is int and 0 <= one < 2**31 for one in values):
        raise _rule("must be text, a list of texts, or a list of token ids")
    return [], values


Text = Annotated[str, AfterValidator(_name)]
LongText = Annotated[str, AfterValidator(_long)]
Count = Annotated[int, between(0, 2**31 - 1)]
Positive = Annotated[int, between(1, 2**31 - 1)]
Real = Annotated[float, Field(ge=0)]
Seed = Annotated[int, between(-_SEED, _SEED - 1)]
Setting = Annotated[Any, AfterValidator(_setting)]
Stop = Annotated[Any, AfterValidator(_stop)]
Numbers = Annotated[list[Any], SkipValidation, at_most("tensor_elements")]
