"""Documents by their schema: a right one passes, and a wrong type in any field is named."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest

from regress.json_schema import Count, Finite, Hash, Least, Name, conform


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Point:
    x: float
    colour: Colour | None = None


class Row(TypedDict):
    name: Name
    size: Count
    sha256: NotRequired[Hash]


class Document(TypedDict):
    kind: Literal["a", "b"]
    ratio: Finite
    rows: dict[str, Row]
    pairs: list[tuple[str | int, int]]
    least: Annotated[int, Least(-1)] | None
    point: NotRequired[Point]
    free: Any


def right() -> dict[str, Any]:
    rows = {"x": {"name": "n", "size": 3, "sha256": "0" * 64, "later": 1}}
    return {"kind": "a", "ratio": 1, "rows": rows, "pairs": [["g", 1], [2, 3]], "least": None, "free": [None]}


def test_a_right_document_is_itself() -> None:
    value = right()
    assert conform(value, Document, "it") is value
    assert conform(value | {"point": {"x": float("nan"), "colour": "red"}, "least": -1}, Document, "it")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("kind",), "c", "it.kind is 'c', not 'a' or 'b'"),
        (("ratio",), float("inf"), "it.ratio is inf, not a finite number"),
        (("ratio",), True, "it.ratio is True, not a number"),
        (("rows",), [], "it.rows is a list, not an object"),
        (("rows", "x", "size"), -1, "it.rows['x'].size is -1, not at least 0"),
        (("rows", "x", "size"), 2**63, "it.rows['x'].size is 9223372036854775808, not at most"),
        (("rows", "x", "size"), 1.0, "it.rows['x'].size is 1.0, not an integer"),
        (("least",), -2, "it.least is -2, not at least -1"),
        (("least",), "one", "it.least is 'one', not an integer or null"),
        (("rows", "x", "name"), "\x1b[2J", "not a printable name"),
        (("rows", "x", "name"), "\ud800", "not a text without lone surrogates"),
        (("rows", "x", "name"), "a" * 1001, "not a text of at most 1000 characters"),
        (("rows", "x", "sha256"), "0" * 63, "not a SHA-256"),
        (("pairs", 0), ["g"], "it.pairs[0] is a list, not a list of 2"),
        (("pairs", 0, 1), "1", "it.pairs[0][1] is '1', not an integer"),
        (("least",), -2, "it.least is -2"),
        (("point",), {"x": 1, "colour": "blue"}, "it.point.colour"),
    ],
)
def test_a_wrong_one_is_named(path: tuple[Any, ...], value: Any, words: str) -> None:
    document = right() | {"point": {"x": 1.0, "colour": None}}
    holder: Any = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(ValueError, match=r"^it") as caught:
        conform(document, Document, "it")
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("field", ["kind", "ratio", "rows", "pairs", "least", "free"])
def test_what_is_missing_is_named(field: str) -> None:
    document = right()
    del document[field]
    with pytest.raises(ValueError, match=f"it lacks '{field}'"):
        conform(document, Document, "it")
