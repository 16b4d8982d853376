"""Goldens of checks: first recorded, then compared with, then updated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Project  # for annotations only

TWO = """
    import numpy as np

    def test_one(regress):
        regress.check("x", np.arange(4.0))
        regress.check("y", {"a": 1.5, "b": ["text", None, 3]})

    def test_two(regress):
        regress.check("x", np.float32(0.25), rtol=1e-3, why="float32")
"""


def test_nothing_is_written_without_being_asked_for(project: Project) -> None:
    project.write("test_it.py", TWO)
    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "E * AssertionError: no golden yet for 'x' of test_it.py::test_one: look at the value, then run pytest "
            "--update-golden",
            "E * AssertionError: no golden yet for 'x' of test_it.py::test_two: look at the value, then run pytest "
            "--update-golden",
        ]
    )
    assert project.goldens() == {}


def test_recorded_goldens_hold_and_an_update_changes_nothing(project: Project) -> None:
    project.write("test_it.py", TWO)
    result = project.passes("--update-golden", count=2)
    result.stdout.fnmatch_lines(
        [
            "regress: updating what drifted beyond its tolerance in *golden",
            "*golden update*",
            "*golden of*name*status*changed*max change*x tolerance*old*new*",
            "*test_it.py::test_one*x*new*1 of 1*",
            "*test_it.py::test_one*y*new*4 of 4*",
            "*test_it.py::test_two*x*new*1 of 1*",
            "3 written, 0 pending",
        ]
    )
    before = project.goldens()
    assert len(before) == 3
    project.passes(count=2)
    for modes in ("--update-golden", "--update-golden=all", "--update-golden=review"):
        result = project.passes(modes, count=2)
        result.stdout.no_fnmatch_line("*golden update*")
        assert project.goldens() == before
