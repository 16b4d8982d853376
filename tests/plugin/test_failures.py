"""Message of a failing check: the verdict first, its place, and the next steps."""

from __future__ import annotations

import re
from typing import Any

SOURCE = """
    import numpy as np

    def test_it(regress):
        value = np.linspace(1, 2, 5, dtype=np.float32)
        regress.check("mean ratio", {"ratio": value, "kl": 0.25}, rtol=1e-3, why="float32 sums")
"""
CHANGED = SOURCE.replace('"kl": 0.25', '"kl": 0.26').replace("(1, 2, 5", "(1, 2.5, 5")


def test_a_failure_in_full(project: Any) -> None:
    project.write("test_it.py", SOURCE)
    project.passes("--update-golden", count=1)
    project.write("test_it.py", CHANGED)
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        '>*regress.check("mean ratio", {"ratio": value, "kl": 0.26}, rtol=1e-3, why="float32 sums")',
        "E * AssertionError: drift: mean ratio value[[]'ratio']: element [[]4]: golden 2, actual 2.5, 250 x tolerance "
        "(test_it.py::test_it)",
        "test_it.py:5: AssertionError",
        "*regress: mean ratio*",
        "drift: mean ratio value[[]'ratio'] at test_it.py::test_it",
        "  worst *element [[]4]",
        "  golden *2",
        "  actual *2.5",
        "  error *0.5, * ulp: 250 x tolerance of 0.002",
        "  relative *0.25 of the scale 2, * in the Euclidean norm",
        "  elements *4 of 5 beyond the tolerance",
        "  tolerance *float32 sums",
        "1 more tensor of this test failed:",
        "  drift: mean ratio value[[]'kl']: golden 0.25, actual 0.26, 40 x tolerance",
        "reproduce: pytest test_it.py::test_it",
        "update: pytest --update-golden test_it.py::test_it",
    ])  # fmt: skip


def test_the_traceback_holds_nothing_of_ours(alone: Any) -> None:
    alone.write("test_it.py", SOURCE)
    alone.passes("--update-golden", count=1)
    alone.write("test_it.py", CHANGED)
    result = alone.run()
    result.stdout.no_fnmatch_line("*fixture.py*")
    result = alone.run("--tb=native")
    assert "regress.check" in result.stdout.str()


def test_the_summary_of_a_ci_run_has_the_verdict_on_one_line(alone: Any, monkeypatch: Any) -> None:
    alone.write("test_it.py", SOURCE)
    alone.passes("--update-golden", count=1)
    alone.write("test_it.py", CHANGED)
    monkeypatch.setenv("CI", "true")
    result = alone.run()
    result.stdout.fnmatch_lines([
        "FAILED test_it.py::test_it - AssertionError: drift: mean ratio value[[]'ratio']: *",
        "=* 1 failed*in *",
    ], consecutive=True)  # fmt: skip


def test_another_environment_is_told_with_the_failure_and_fails_nothing_itself(alone: Any) -> None:
    recorded = """
        import pytest
        import regress.golden.golden_provenance as provenance

        @pytest.fixture(autouse=True)
        def _other(monkeypatch):
            found = provenance.package_versions() | {"torch": "9.9"}
            monkeypatch.setattr(provenance, "package_versions", lambda: found)
    """
    alone.write("conftest.py", recorded)
    alone.write("test_it.py", SOURCE)
    alone.passes("--update-golden", count=1)
    alone.write("conftest.py", "")
    alone.passes(count=1)
    alone.write("test_it.py", CHANGED)
    (line,) = [line for line in alone.run().stdout.lines if line.startswith("environment: ")]
    assert re.fullmatch(r"environment: recorded with torch 9\.9, now \S+", line)


def test_ids_with_blanks_are_quoted_in_commands(alone: Any) -> None:
    source = """
        import pytest

        @pytest.mark.parametrize("text", ["a b"])
        def test_it(regress, text):
            regress.check("x", text + EXTRA)
    """
    alone.write("test_it.py", source.replace("EXTRA", "'c'"))
    alone.passes("--update-golden", count=1)
    alone.write("test_it.py", source.replace("EXTRA", "'d'"))
    alone.run().stdout.fnmatch_lines(["update: pytest --update-golden 'test_it.py::test_it[[]a b]'"])
