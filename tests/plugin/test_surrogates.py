"""Lone surrogates in what a worker tells: the tests fail, and the session goes on."""

from __future__ import annotations

import pytest


def test_a_surrogate_of_a_worker_is_no_internal_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "def test_said():\n    raise AssertionError('x\\ud800y')\n\n\ndef test_after():\n    pass\n"
    )
    result = pytester.runpytest_subprocess("-p", "regress.plugin", "-p", "xdist", "-n1")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.no_fnmatch_line("*INTERNALERROR*")
