"""Goldens that belong to no test: found after full runs, listed, and left for `regress golden prune`."""

from __future__ import annotations

from typing import Any

import pytest

TWO = """
    import numpy as np

    def test_one(regress):
        regress.check("x", 1.5)
        regress.check("y", 2.5)

    def test_two(regress):
        regress.check("x", 3.5)
"""
WITHOUT_Y = TWO.replace('regress.check("y", 2.5)', "pass")
WITHOUT_TWO = TWO.replace("test_two", "test_three").replace('regress.check("x", 3.5)', "pass")


@pytest.fixture
def recorded(project: Any) -> Any:
    """A project in each mode, whose goldens are those of `TWO`."""
    return record(project)


@pytest.fixture
def recorded_alone(alone: Any) -> Any:
    return record(alone)


def record(project: Any) -> Any:
    project.records(TWO, count=2)
    assert project.orphans() == []
    return project


def names(paths: list[str]) -> list[str]:
    return [path.removeprefix("checks/test_it/").split(".")[0] for path in paths]


def test_a_check_that_its_test_no_longer_asks_for(recorded: Any) -> None:
    before = recorded.goldens()
    recorded.write("test_it.py", WITHOUT_Y)
    result = recorded.passes("--update-golden=all", count=2)
    result.stdout.fnmatch_lines([
        "*orphaned checks*",
        "'y' of test_it.py::test_one: the test passed without asking for it (checks/test_it/test_one-y.*.check)",
        "1 orphaned: remove with regress golden prune",
    ])  # fmt: skip
    assert names(recorded.orphans()) == ["test_one-y"]
    assert recorded.goldens() == before


def test_a_check_whose_test_is_gone(recorded: Any) -> None:
    before = recorded.goldens()
    recorded.write("test_it.py", WITHOUT_TWO)
    result = recorded.passes(count=2)
    result.stdout.fnmatch_lines([
        "'x' of test_it.py::test_two: there is no such test (checks/test_it/test_two-x.*.check)"
    ])  # fmt: skip
    assert names(recorded.orphans()) == ["test_two-x"]
    assert recorded.goldens() == before


def test_prune_removes_what_was_listed_and_nothing_else(recorded_alone: Any) -> None:
    from regress.golden.golden_directory import GoldenStore
    from regress.golden.golden_verification import prune

    recorded_alone.write("test_it.py", WITHOUT_TWO)
    recorded_alone.passes(count=2)
    store = GoldenStore(recorded_alone.folder / "golden")
    gone = prune(store, recorded_alone.folder / ".pytest_cache/v/regress/orphans")
    assert names([path.relative_to(recorded_alone.folder / "golden").as_posix() for path in gone]) == [
        "test_two-x"
    ]
    assert names(sorted(recorded_alone.goldens())) == ["test_one-x", "test_one-y"]
    recorded_alone.passes(count=2).stdout.no_fnmatch_line("*orphan*")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-k", "one"), "-k; tests were deselected"),
        (("-k", "test"), "-k"),
        (("-m", "not slow"), "-m"),
        (("-x",), "-x or --maxfail"),
        (("--maxfail=3",), "-x or --maxfail"),
        (("--lf",), "--lf"),
        (("--sw",), "--sw"),
        (("--deselect=test_it.py::test_three",), "--deselect; tests were deselected"),
        (("--ignore=other",), "--ignore"),
        (("--ignore-glob=*other*",), "--ignore-glob"),
        (("test_it.py",), "paths on the command line"),
        ((".",), "paths on the command line"),
    ],
)
def test_a_narrowed_run_says_why_it_looks_for_none(
    recorded_alone: Any, arguments: tuple[str, ...], reason: str
) -> None:
    recorded_alone.write("test_it.py", WITHOUT_TWO)
    result = recorded_alone.run(*arguments)
    assert result.ret == 0
    result.stdout.fnmatch_lines([f"orphaned checks: not looked for ({reason})"])
    assert recorded_alone.orphans() == []  # as the full run before left it


def test_a_narrowed_run_on_workers_says_why_it_looks_for_none(recorded: Any) -> None:
    recorded.write("test_it.py", WITHOUT_TWO)
    recorded.write("conftest.py", "def pytest_collection_modifyitems(items):\n    items[:] = items[:1]\n")
    result = recorded.passes(count=1)
    result.stdout.fnmatch_lines(["orphaned checks: not looked for (tests were deselected)"])


def test_a_run_in_a_folder_below_looks_for_none(recorded_alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_alone.write("below/test_more.py", "def test_it(regress):\n    regress.check('x', 1)\n")
    recorded_alone.run("--update-golden")
    monkeypatch.chdir(recorded_alone.folder / "below")
    result = recorded_alone.passes(count=1)
    result.stdout.fnmatch_lines(["orphaned checks: not looked for (pytest was called in a folder below *)"])


def test_a_module_that_is_skipped_or_broken_at_collection(recorded: Any) -> None:
    recorded.write("test_it.py", WITHOUT_TWO)
    recorded.write("test_more.py", "import pytest\npytest.importorskip('no_such_module')\n")
    result = recorded.run()
    result.stdout.fnmatch_lines(["orphaned checks: not looked for (test_more.py is skipped at collection)"])
    recorded.write("test_more.py", "import no_such_module\n")
    result = recorded.run("--continue-on-collection-errors")
    result.stdout.fnmatch_lines(["orphaned checks: not looked for (test_more.py is broken at collection*)"])
    assert recorded.orphans() == []


@pytest.mark.parametrize(
    "body",
    ["assert False", "import pytest; pytest.skip()", "import pytest; pytest.xfail()", "raise SystemError"],
)
def test_a_test_that_had_no_chance_to_ask_keeps_its_checks(recorded_alone: Any, body: str) -> None:
    recorded_alone.write("test_it.py", WITHOUT_Y.replace('regress.check("x", 3.5)', body))
    result = recorded_alone.run()
    assert "test_two-x" not in names(recorded_alone.orphans())
    result.stdout.fnmatch_lines(["1 orphaned: remove with regress golden prune"])


def test_a_failing_teardown_keeps_the_checks_of_its_test(recorded_alone: Any) -> None:
    recorded_alone.write(
        "conftest.py",
        "import pytest\n\n@pytest.fixture(autouse=True)\ndef end():\n    yield\n    raise ValueError\n",
    )
    recorded_alone.write("test_it.py", WITHOUT_Y)
    recorded_alone.run().stdout.no_fnmatch_line("*orphaned*")


def test_a_damaged_check_that_no_test_asks_for_is_named(recorded_alone: Any) -> None:
    (path,) = recorded_alone.folder.glob("golden/checks/test_it/test_one-y.*")
    path.write_bytes(path.read_bytes()[:-1])
    recorded_alone.write("test_it.py", WITHOUT_Y)
    result = recorded_alone.passes(count=2)
    result.stdout.fnmatch_lines([f"damaged: {path} is not an intact check (*"])
    assert recorded_alone.orphans() == []


def test_without_a_cache_nothing_can_be_listed(recorded_alone: Any) -> None:
    recorded_alone.write("test_it.py", WITHOUT_TWO)
    result = recorded_alone.passes("-p", "no:cacheprovider", count=2)
    result.stdout.fnmatch_lines(["1 orphaned: not listed for prune, which needs pytest's cache"])


def test_a_run_without_any_check_says_nothing(alone: Any) -> None:
    alone.write("test_it.py", "def test_it():\n    pass\n")
    alone.passes("-k", "it", count=1).stdout.no_fnmatch_line("*orphan*")
