"""Goldens of checks: first recorded, then compared with, then updated."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

TWO = """
    import numpy as np

    def test_one(regress):
        regress.check("x", np.arange(4.0))
        regress.check("y", {"a": 1.5, "b": ["text", None, 3]})

    def test_two(regress):
        regress.check("x", np.float32(0.25), rtol=1e-3, why="float32")
"""
SIDES = """
def test_it(regress):
    regress.check("x", {{{}}}, rtol=0.1, why="coarse")
"""
NEW = "E * AssertionError: no golden yet for 'x' of test_it.py::{}: look at the value, then run pytest --update-golden"


@pytest.fixture
def recorded(alone: Any) -> Any:
    """A project whose goldens are those of `TWO`."""
    alone.records(TWO, count=2)
    return alone


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """Slugs of the goldens that are new or other bytes, without their hash."""
    names = (name for name in after if after[name] != before.get(name))
    return sorted(name.split("/")[-1].split(".")[0] for name in names)


def test_nothing_is_written_without_being_asked_for(project: Any) -> None:
    project.write("test_it.py", TWO)
    result = project.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random([
        NEW.format("test_one"),
        NEW.format("test_two"),
        "*regress: x*",
        "value: float64 [[]4], 0 to 3, mean 1.5",
        "value: float32 0.25",
    ])  # fmt: skip
    assert project.goldens() == {}


def test_recorded_goldens_hold_and_an_update_changes_nothing(project: Any) -> None:
    project.write("test_it.py", TWO)
    result = project.passes("--update-golden", count=2)
    result.stdout.fnmatch_lines([
        "regress: updating what drifted beyond its tolerance in *golden",
        "*golden update*",
        "golden of *name *status *changed *new",
        "test_it.py::test_one *x *new *1 of 1 *float64 [[]4], 0 to 3, mean 1.5",
        "test_it.py::test_one *y *new *4 of 4 *4 values",
        "test_it.py::test_two *x *new *1 of 1 *float32 0.25",
        "3 written: git diff shows them, git restore takes them back",
    ])  # fmt: skip
    before = project.goldens()
    assert len(before) == 3
    result = project.passes("--update-golden=all", count=2)
    result.stdout.no_fnmatch_line("*golden update*")
    result.stdout.fnmatch_lines(["regress: no golden had to be written"])
    assert project.goldens() == before


def test_other_modes_change_nothing_either(recorded: Any) -> None:
    before = recorded.goldens()
    recorded.passes(count=2)
    for modes in ("--update-golden", "--update-golden=drifted"):
        recorded.passes(modes, count=2).stdout.no_fnmatch_line("*golden update*")
        assert recorded.goldens() == before


def test_the_bytes_do_not_depend_on_the_workers(alone: Any) -> None:
    names = [f"test_{number}" for number in range(8)]
    body = "".join(
        f"def {n}(regress):\n    regress.check('x', np.sin(np.arange({i}.0)))\n" for i, n in enumerate(names)
    )
    alone.write("test_it.py", f"import numpy as np\n{body}")
    found = []
    for arguments in ((), ("-p", "xdist", "-n0"), ("-p", "xdist", "-n2"), ("-p", "xdist", "-n4")):
        alone.passes(*arguments, "--update-golden", count=8)
        found.append(alone.goldens())
        shutil.rmtree(alone.folder / "golden")
    assert all(other == found[0] for other in found)
    assert len(found[0]) == 8


def test_only_what_drifted_beyond_its_tolerance_is_rewritten(project: Any) -> None:
    project.write("test_it.py", TWO)
    project.passes("--update-golden", count=2)
    before = project.goldens()
    # the tensor of test_two moves by 0.4 tolerances, that of test_one by more than nothing
    project.write("test_it.py", TWO.replace("arange(4.0)", "arange(4.0) + 0.5").replace("0.25", "0.2501"))
    result = project.passes("--update-golden", count=2)
    result.stdout.fnmatch_lines(
        [
            "*test_it.py::test_one*x*drift*1 of 1*0.5 *- *0 *0.5",
            "1 written: git diff shows them, git restore takes them back",
        ]
    )
    assert changed(before, project.goldens()) == ["test_one-x"]


def test_all_rewrites_what_differs_in_any_byte(recorded: Any) -> None:
    before = recorded.goldens()
    recorded.write("test_it.py", TWO.replace("0.25", "0.2501"))
    recorded.passes("--update-golden", count=2)
    assert recorded.goldens() == before
    result = recorded.passes("--update-golden=all", count=2)
    result.stdout.fnmatch_lines([
        "regress: updating all that differs in *",
        "*test_it.py::test_two*x*within tolerance*1 of 1*0.0001*0.4*0.25*0.2501*",
    ])  # fmt: skip
    assert changed(before, recorded.goldens()) == ["test_two-x"]


def test_all_rewrites_another_reason_too(recorded: Any) -> None:
    before = recorded.goldens()
    recorded.write("test_it.py", TWO.replace('why="float32"', 'why="rounding of float32"'))
    recorded.passes("--update-golden", count=2)
    assert recorded.goldens() == before
    result = recorded.passes("--update-golden=all", count=2)
    result.stdout.fnmatch_lines(["*test_it.py::test_two*x*rewritten*0 of 1*"])
    assert changed(before, recorded.goldens()) == ["test_two-x"]


def test_an_update_honours_a_selection(project: Any) -> None:
    project.write("test_it.py", TWO)
    project.passes("--update-golden", count=2)
    before = project.goldens()
    project.write("test_it.py", TWO.replace("arange(4.0)", "ones(4)").replace("0.25", "7"))
    project.run("--update-golden", "-k", "two").assert_outcomes(passed=1)
    assert changed(before, project.goldens()) == ["test_two-x"]


def test_the_table_shows_the_old_and_the_new_value_where_they_differ_most(recorded: Any) -> None:
    recorded.write(
        "test_it.py", TWO.replace("0.25", "0.75").replace('"a": 1.5, "b": ["text", ', '"b": ["word", ')
    )
    result = recorded.passes("--update-golden", count=2)
    result.stdout.fnmatch_lines([
        "*test_it.py::test_one*y*missing, drift*2 of 4*0 *-*",
        "*test_it.py::test_two*x*drift*1 of 1*0.5*2e+03*0.25*0.75*",
    ])  # fmt: skip


def test_the_table_tells_the_change_beside_what_is_missing(alone: Any) -> None:
    alone.write("test_it.py", SIDES.format('"a": 1.0, "b": 2.0'))
    alone.passes("--update-golden", count=1)
    alone.write("test_it.py", SIDES.format('"b": 2.5'))
    result = alone.passes("--update-golden", count=1)
    result.stdout.fnmatch_lines(["test_it.py::test_it *x *missing, drift *2 of 2 *0.5 *2.5 *2 *2.5"])


def test_every_id_and_name_has_its_own_golden(alone: Any) -> None:
    alone.write(
        "test_it.py",
        """
        import pytest

        @pytest.mark.parametrize("text", ["a/b", "a b", "a_b", "A_B", "é", "x" * 400, "x" * 401, "../up", "a::b", ""])
        def test_it(regress, text):
            regress.check("value", text)
            regress.check(text + ".", text + "other")
            regress.check(text.upper() + "..", len(text))
        """,
    )
    alone.passes("--update-golden", count=10)
    assert len({name.lower() for name in alone.goldens()}) == 30
    alone.passes(count=10)


def test_goldens_of_classes_and_of_folders_are_apart(alone: Any) -> None:
    source = """
        class TestA:
            def test_it(self, regress):
                regress.check("x", __name__ + "A")

        class TestB:
            def test_it(self, regress):
                regress.check("x", __name__ + "B")
    """
    alone.write("pytest.ini", "[pytest]\naddopts = --import-mode=importlib\n")
    alone.write("one/test_it.py", source)
    alone.write("one_test_it.py", source)
    alone.write("two/test_it.py", source)
    alone.passes("--update-golden", count=4)
    assert len(alone.goldens()) == 4
    alone.passes(count=4)
