"""Which tests of this package run by default; the root conftest.py decides it."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
TESTS = """
    import pytest

    @pytest.mark.extended
    def test_more(): pass

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("number", range(3))
    def test_many(number): pass
"""
MARKERS = (
    "[pytest]\nmarkers =\n    extended: more\n    systems: systems\n    faults: faults\n    one_in(n): one"
)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ((), 2),
        (("--extended",), 4),
        (("-m", "extended"), 2),
        (("test_it.py::test_more",), 1),
        (("test_it.py::test_many[1]", "test_it.py::test_many[2]"), 2),
        (("test_it.py::test_many",), 2),
    ],
    ids=["default", "all", "extended", "function", "ids", "part of an id"],
)
def test_an_extended_test_runs_if_it_is_asked_for(
    arguments: tuple[str, ...], passed: int, pytester: pytest.Pytester
) -> None:
    """By marker, by option, or by its whole id, as a failure prints it."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makefile(".ini", pytest=MARKERS)
    pytester.makepyfile(test_it=TESTS)
    pytester.runpytest_inprocess("-p", "regress.plugin", *arguments).assert_outcomes(passed=passed)
