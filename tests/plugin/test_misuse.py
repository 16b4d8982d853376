"""Calls of the fixture that are not valid, goldens that cannot be trusted, values that must not become golden."""

from __future__ import annotations

from typing import Any

import pytest

TEST = "def test_it(regress):\n    regress.check({arguments})\n"


def says(result: pytest.RunResult, sentence: str) -> None:
    """The test fails with this sentence, and its traceback ends in the test itself."""
    lines = [line for line in result.stdout.lines if line.startswith("E   ")]
    assert len(lines) == 1, lines
    kind, _, rest = lines[0].removeprefix("E   ").strip().partition(": ")
    assert rest == sentence
    assert kind.split(".")[-1] in ("CheckError", "GoldenError", "AssertionError")
    places = [line for line in result.stdout.lines if line.endswith(kind.split(".")[-1]) and ".py:" in line]
    assert all(line.startswith("test_it.py:") for line in places)
    assert places


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            '"x", 1.0, rtol=1e-3',
            "rtol=0.001, atol=0 without a reason: say in why= where this tolerance comes from, or leave it out",
        ),
        (
            '"x", 1.0, atol=2, why=" "',
            "rtol=0, atol=2 without a reason: say in why= where this tolerance comes from, or leave it out",
        ),
        (
            '"x", 1.0, rtol=-1, why="w"',
            "rtol=-1 is not a tolerance: give a finite number that is not negative",
        ),
        (
            '"x", 1.0, atol=float("inf"), why="w"',
            "atol=inf is not a tolerance: give a finite number that is not negative",
        ),
        (
            '"x", 1.0, rtol="1e-3", why="w"',
            "rtol='1e-3' is not a tolerance: give a finite number that is not negative",
        ),
        ('"x", 1.0, why=3', "why=3 is not a reason: give a sentence"),
        ('"", 1.0', "'' is not a name of a value: give a text that is not empty"),
        ("3, 1.0", "3 is not a name of a value: give a text that is not empty"),
        (
            '"x", {1, 2}',
            "value is of type set, but a check holds tensors, arrays, numbers, texts, None, dicts, lists, DataFrames "
            "and Series: convert it",
        ),
        (
            '"x", {"a": [object]}',
            "value['a'][0] is of type type, but a check holds tensors, arrays, numbers, texts, None, dicts, lists, "
            "DataFrames and Series: convert it",
        ),
        (
            '"x", {("a", 1): 2}',
            "value has the key ('a', 1), but keys of a check are texts or integers: rename it",
        ),
        ('"x", {True: 2}', "value has the key True, but keys of a check are texts or integers: rename it"),
        (
            '"x", float("nan")',
            "the new value of 'x' is refused: value is nan at [] (1 of 1 elements are not finite); find what produced "
            "it, or pass nonfinite=True if that is right",
        ),
        (
            '"x", [1.0, float("-inf")]',
            "the new value of 'x' is refused: value[1] is -inf at [] (1 of 1 elements are not finite); find what "
            "produced it, or pass nonfinite=True if that is right",
        ),
    ],
)
def test_a_call_is_refused(alone: Any, arguments: str, sentence: str) -> None:
    alone.write("test_it.py", TEST.format(arguments=arguments))
    says(alone.run("--update-golden"), sentence)
    assert alone.goldens() == {}


def test_one_name_cannot_have_two_values(project: Any) -> None:
    project.write("test_it.py", TEST.format(arguments='"x", 1') + "    regress.check('x', 1)\n")
    sentence = "'x' was checked in this test already, and two values cannot share a golden: give each a name of its own"
    says(project.run("--update-golden"), sentence)


def test_nonfinite_values_become_golden_on_purpose_only(alone: Any) -> None:
    alone.write("test_it.py", TEST.format(arguments='"x", [0.0, float("nan"), float("inf")], nonfinite=True'))
    alone.passes("--update-golden", count=1)
    alone.passes(count=1)
    before = alone.goldens()
    alone.write("test_it.py", TEST.format(arguments='"x", [0.0, float("inf"), float("nan")]'))
    says(
        alone.run(),
        "nonfinite: x value[1]: golden NaN, actual infinity (1 of 1 elements do not match) ("
        "test_it.py::test_it)",
    )
    alone.run("--update-golden").assert_outcomes(failed=1)
    assert alone.goldens() == before


@pytest.mark.parametrize("old", ["", "0.0"])
def test_a_function_that_gives_other_values_each_time_is_refused(project: Any, old: str) -> None:
    if old:
        project.write("test_it.py", TEST.format(arguments=f'"x", {old}'))
        project.passes("--update-golden", count=1)
    before = project.goldens()
    project.write(
        "test_it.py", "drawn = iter(range(1, 9))\n" + TEST.format(arguments='"x", lambda: next(drawn) / 2')
    )
    says(
        project.run("--update-golden"),
        "the new value of 'x' is refused: two runs of its function differ (drift, value, by 0.5); seed what is random "
        "in it, or give a tolerance and its reason",
    )
    assert project.goldens() == before


def test_a_function_may_vary_within_its_tolerance(alone: Any) -> None:
    call = '"x", lambda: 1 + next(drawn) / 1000, rtol=0.1, why="noise"'
    alone.write("test_it.py", "drawn = iter(range(9))\n" + TEST.format(arguments=call))
    alone.passes("--update-golden", count=1)
    alone.passes(count=1)


def test_the_fixture_inside_given_is_refused(project: Any) -> None:
    project.write(
        "test_it.py",
        """
        from hypothesis import given, settings, HealthCheck, strategies as st

        @given(st.integers())
        @settings(suppress_health_check=list(HealthCheck))
        def test_it(regress, number):
            regress.check("x", number)
        """,
    )
    result = project.run("--update-golden")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([
        "E *CheckError: test_it asks for the fixture 'regress' inside @given, but a golden belongs to one value and "
        "not to every example: check a fixed example in a test of its own"
    ])  # fmt: skip
    assert project.goldens() == {}


@pytest.mark.parametrize(
    "damage", ["cut off", "changed", "emptied", "of another test", "of no check", "a folder"]
)
def test_a_damaged_golden_is_named_and_never_used(alone: Any, damage: str) -> None:
    other = "\n\ndef test_other(regress):\n    regress.check('x', 2.5)\n"
    alone.write("test_it.py", TEST.format(arguments='"x", 1.5') + other)
    alone.passes("--update-golden", count=2)
    (path,) = alone.folder.glob("golden/checks/test_it/test_it-x.*")
    (another,) = alone.folder.glob("golden/checks/test_it/test_other-x.*")
    data = path.read_bytes()
    clause = {
        "cut off": "is not an intact check (its content does not match its checksum)",
        "changed": "is not an intact check (its content does not match its checksum)",
        "emptied": "is not an intact check (its content does not match its checksum)",
        "of another test": "holds 'x' of test_it.py::test_other, which belongs elsewhere",
        "of no check": "is not an intact check (its content does not match its checksum)",
        "a folder": "cannot be read (it is a folder, not a file)",
    }[damage]
    remedy = "restore it from version control, or record it again with pytest --update-golden=all"
    if damage == "a folder":
        remedy = "check its permissions"
    _damage(path, another, data, damage)
    for arguments in ((), ("--update-golden",)):
        result = alone.run(*arguments)
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines([f"E *GoldenError: {path} {clause}: {remedy}"])
    if damage != "a folder":
        alone.passes("--update-golden=all", count=2)
        assert path.read_bytes() == data


def _damage(path: Any, another: Any, data: bytes, damage: str) -> None:
    from regress.dump.coordinates import Coordinates
    from regress.dump.formats import FORMATS
    from regress.dump.record import Record

    if damage == "a folder":
        path.unlink()
        path.mkdir()
        return
    record = Record.of("loss", Coordinates(0), {"loss": 1.0})
    path.write_bytes({
        "cut off": data[:-3],
        "changed": data[:-1] + bytes([data[-1] ^ 1]),
        "emptied": b"",
        "of another test": another.read_bytes(),
        "of no check": b"".join(FORMATS["safetensors"].encode(record)),
    }[damage])  # fmt: skip


def test_assert_close_has_the_same_rules(alone: Any) -> None:
    alone.write(
        "test_it.py",
        """
        import numpy as np

        def test_it(regress):
            regress.assert_close({"a": [1.0, 2]}, {"a": (1.0, 2)})
            regress.assert_close(np.float32([1, 2]), np.float32([1, 2.001]), rtol=1e-3, why="measured")
            regress.assert_close(np.float32([1, 2]), np.float64([1, 2]))
        """,
    )
    says(alone.run(), "dtype: assert_close value: golden float64, actual float32 (test_it.py::test_it)")
    assert alone.goldens() == {}
