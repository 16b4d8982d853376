"""Loops over files, options or messages as one test: each value is a subtest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def as_subtests(names: str, values: Iterable[Any], ids: Callable[[Any], str] = str) -> Callable[[Test], Test]:
    """Run the decorated test for each value, as ``pytest.mark.parametrize`` does, in one item.

    Fixtures are made once for all values: tests that write to one of theirs have to be items of their own.

    Args:
        names: argument, or arguments with commas between them, of which a value is a tuple.
        ids: function of a value that returns what its subtest is called.
    """
    given = [name.strip() for name in names.split(",")]

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters
        asked = [one for name, one in parameters.items() if name not in (*given, "subtests")]

        @functools.wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for value in values:
                with subtests.test(ids(value)):
                    arguments = dict(zip(given, value if len(given) > 1 else (value,), strict=True))
                    if "subtests" in parameters:
                        arguments["subtests"] = subtests
                    test(**arguments, **fixtures)

        own = inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*(one.replace(kind=own.kind) for one in asked), own])  # type: ignore[attr-defined]  # pytest reads fixtures from it
        return run

    return decorate
