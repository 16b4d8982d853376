"""Tests of golden cases that a session asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _always(_: str) -> bool:
    return True


@dataclass(frozen=True)
class Wanted:
    """Replays and tests of one test function that could be selected; all of them by default.

    Attributes:
        replay: predicate of a replay's name, ``case/variant``: True if any of its tests could be selected.
        test: predicate of a test id: True if the test could be selected.
        narrowed: True if anything is left out.
    """

    replay: Callable[[str], bool] = _always
    test: Callable[[str], bool] = _always
    narrowed: bool = False

    def __or__(self, other: Wanted) -> Wanted:
        """Return the tests that either selects."""
        if not self.narrowed or not other.narrowed:
            return Wanted()
        return Wanted(
            lambda name: self.replay(name) or other.replay(name),
            lambda id: self.test(id) or other.test(id),
            narrowed=True,
        )

    def __and__(self, other: Wanted) -> Wanted:
        """Return the tests that both select."""
        if not self.narrowed or not other.narrowed:
            return self if self.narrowed else other
        return Wanted(
            lambda name: self.replay(name) and other.replay(name),
            lambda id: self.test(id) and other.test(id),
            narrowed=True,
        )
