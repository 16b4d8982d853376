"""Sessions that do not go as planned: crashed workers, early ends, reruns of what failed, broken collections."""

from __future__ import annotations

from typing import Any

import pytest

MANY = "import os\n" + "".join(f"def test_{i}(regress):\n    regress.check('x', {i}.5)\n" for i in range(6))


def test_a_worker_that_crashes_leaves_all_goldens_as_they_were(alone: Any) -> None:
    alone.write("test_it.py", MANY)
    alone.passes("--update-golden", count=6)
    before = alone.goldens()
    crash = "def test_crash(regress):\n    regress.check('x', 0.5)\n    os._exit(3)\n"
    alone.write("test_it.py", MANY.replace(".5", ".25") + crash)
    result = alone.run("-p", "xdist", "-n2", "--update-golden")
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines([
        "*worker 'gw*' crashed while running 'test_it.py::test_crash'*",
        "regress: no golden was written, because the session was interrupted: run the update again",
        "orphaned checks: not looked for (a worker crashed)",
    ])  # fmt: skip
    result.stdout.no_fnmatch_line("*golden update*")
    assert alone.goldens() == before


def test_the_first_failure_ends_the_run(project: Any) -> None:
    project.write("test_it.py", MANY)
    project.passes("--update-golden", count=6)
    before = project.goldens()
    project.write("test_it.py", MANY.replace(".5", ".25"))
    result = project.run("-x")
    assert result.parseoutcomes()["failed"] < 6  # workers finish what they have begun
    result.stdout.fnmatch_lines(["orphaned checks: not looked for (-x or --maxfail*)"])
    assert project.goldens() == before
    assert project.orphans() == []


def test_an_interrupted_run_looks_for_no_orphans(project: Any) -> None:
    project.write("test_it.py", MANY)
    project.passes("--update-golden", count=6)
    project.write("test_it.py", MANY + "def test_stop():\n    import pytest\n    pytest.exit('enough')\n")
    result = project.run()
    assert result.ret != 0
    result.stdout.fnmatch_lines(["orphaned checks: not looked for (*)"])
    assert project.orphans() == []


def test_only_what_failed_is_updated(project: Any) -> None:
    project.write("test_it.py", MANY)
    project.passes("--update-golden", count=6)
    before = project.goldens()
    project.write("test_it.py", MANY.replace("3.5", "3.25"))
    project.run().assert_outcomes(passed=5, failed=1)
    result = project.passes("--lf", "--update-golden", count=1)
    result.stdout.fnmatch_lines(
        ["*test_it.py::test_3*drift*", "1 written: git diff shows them, git restore takes them back"]
    )
    after = project.goldens()
    assert [name for name in after if after[name] != before[name]] == [n for n in after if "test_3" in n]
    project.passes(count=6)


def test_a_broken_module_hinders_no_other(project: Any) -> None:
    project.write("test_it.py", MANY)
    project.write("test_broken.py", "import no_such_module\n")
    result = project.run("--update-golden", "--continue-on-collection-errors")
    result.assert_outcomes(passed=6, errors=1)
    assert len(project.goldens()) == 6


def test_groups_of_workers_do_not_change_whose_a_golden_is(alone: Any) -> None:
    marked = "import pytest\n" + MANY.replace("def test_1", "@pytest.mark.xdist_group('a')\ndef test_1")
    alone.write("test_it.py", marked)
    alone.write("pytest.ini", "[pytest]\nmarkers =\n    xdist_group: of pytest-xdist\n")
    alone.passes("--update-golden", count=6)
    before = alone.goldens()
    result = alone.passes("-p", "xdist", "-n2", "--dist=loadgroup", "--update-golden", count=6)
    result.stdout.no_fnmatch_line("*orphan*")
    assert alone.goldens() == before


def test_what_a_test_tells_reaches_junit(project: Any) -> None:
    project.write("test_it.py", MANY)
    project.passes("--update-golden", "--junitxml=out.xml", count=6)
    text = (project.folder / "out.xml").read_text()
    assert text.count('name="regress_golden" value="checks/test_it/test_') == 6
    assert text.count('name="regress_update"') == 6


@pytest.mark.parametrize("what", ["test_it.py::test_1", "test_it.py"])
def test_the_command_that_a_failure_names_updates_it(alone: Any, what: str) -> None:
    alone.write("test_it.py", MANY)
    alone.passes("--update-golden", count=6)
    alone.write("test_it.py", MANY.replace("1.5", "1.25"))
    result = alone.run()
    result.stdout.fnmatch_lines(["update: pytest --update-golden test_it.py::test_1"])
    assert alone.run("--update-golden", what).ret == 0
    alone.passes(count=6)
