"""Stored checks: a file each, the same value again, and nothing but what was written."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.dump.numpy_arrays import DTYPES
from regress.durable_files import write
from regress.errors import GoldenError
from regress.golden.stored_checks import StoredCheck, check_path, is_check, read_check, stored_checks
from regress.golden.value_tree import Tree

VALUE = {"a": np.arange(3.0), "b": ["text", None, 2**70, float("nan")]}
LARGE = {**VALUE, "large": np.arange(513.0)}
ids = st.text(min_size=1, max_size=12)


def make(value: Any = VALUE, **changes: Any) -> StoredCheck:
    tree = Tree.of(value)
    check = StoredCheck("tests/test_x.py::test_it[1]", "loss", tree, 1e-3, 0.0, "measured", {"versions": {}})
    return replace(check, **changes)


def stored(root: Path, check: StoredCheck) -> StoredCheck:
    write(root / check.file, [check.encode()])
    found = read_check(root, check.path)
    assert found is not None
    return found


@pytest.mark.parametrize("value", [VALUE, LARGE], ids=["text", "record"])
def test_a_check_reads_as_it_was_written(value: Any, tmp_path: Path) -> None:
    check = make(value)
    found = stored(tmp_path, check)
    assert found.same(check)
    assert found.provenance == check.provenance
    assert [*found.value.nodes] == [*check.value.nodes]


@pytest.mark.parametrize(
    "changes",
    [{"rtol": 2e-3}, {"atol": 1.0}, {"why": "other"}, {"value": 3}, {"value": {**VALUE, "a": -0.0}}],
    ids=str,
)
def test_what_counts_as_another_check(changes: dict[str, Any]) -> None:
    assert not make().same(make(**changes))
    assert make().same(make(provenance={"versions": {"torch": "9"}}))


def test_negative_zero_and_zero_are_other_bytes() -> None:
    assert not make(0.0).same(make(-0.0))


def test_the_bytes_depend_on_nothing_else() -> None:
    shuffled = {"b": VALUE["b"], "a": VALUE["a"]}
    assert make().encode() == make(shuffled).encode()


def test_where_there_is_no_file_there_is_no_check(tmp_path: Path) -> None:
    assert read_check(tmp_path, make().path) is None
    assert stored_checks(tmp_path) == []


def test_paths_say_whose_they_are() -> None:
    path = check_path("tests/unit/test_loss.py::TestKl::test_it[a/b-1]", "mean ratio")
    assert path.rpartition(".")[0] == "checks/tests_unit_test_loss/TestKl_test_it_a_b-1-mean_ratio"


@settings(deadline=None)
@given(ids, ids, ids, ids)
def test_other_tests_and_names_have_other_files_on_any_file_system(a: str, b: str, c: str, d: str) -> None:
    same = (a, b) == (c, d)
    assert (check_path(a, b).lower() == check_path(c, d).lower()) == same


@settings(deadline=None)
@given(st.text(max_size=300), st.text(min_size=1, max_size=300))
def test_every_path_is_one_that_file_systems_and_the_store_accept(test: str, name: str) -> None:
    path = f"{check_path(test, name)}.safetensors"
    assert is_check(path)
    assert path.isascii()
    assert max(map(len, path.split("/"))) < 160
    assert len(path.split("/")) == 3


def test_borders_between_test_and_name_count() -> None:
    assert check_path("a", "bc") != check_path("ab", "c")
    assert check_path("t.py::x", "y") != check_path("t.py::x-y", "")


@settings(deadline=None)
@given(st.data())
def test_a_damaged_file_is_named_and_never_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("golden")
    check = make(data.draw(st.sampled_from([VALUE, LARGE]), "value"))
    stored(root, check)
    path = root / check.file
    whole = path.read_bytes()
    if data.draw(st.booleans(), "cut off"):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        where, flip = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
        path.write_bytes(whole[:where] + bytes([whole[where] ^ flip]) + whole[where + 1 :])
    found, said = None, ""
    try:
        found = read_check(root, check.path)
    except GoldenError as error:
        said = str(error)
    if found is not None:
        assert found.same(check)  # a blank of the header's padding became another blank
        return
    assert said.startswith(str(path))
    assert said.endswith(
        "restore it from version control, or record it again with pytest --update-golden=all"
    )


class Killed(BaseException):
    """No handler of ours catches it, as none catches a kill."""


def test_a_write_killed_at_any_operation_leaves_the_old_value_or_the_new(tmp_path: Path) -> None:
    old, new = make(), make({"a": np.arange(5.0)})
    states = []
    for number in range(100):
        root = tmp_path / str(number)
        stored(root, old)
        asked: list[str] = []

        def operation(name: str, real: Any, asked: list[str] = asked, last: int = number) -> Any:
            def replacement(*arguments: Any) -> Any:
                asked.append(name)
                if len(asked) > last:
                    raise Killed
                return real(*arguments)

            return replacement

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            for owner, name in ((os, "write"), (os, "fsync"), (Path, "replace"), (Path, "unlink")):
                patch.setattr(owner, name, operation(name, getattr(owner, name)))
            write(root / new.file, [new.encode()])
        found = read_check(root, old.path)
        assert found is not None
        assert found.same(old) or found.same(new), f"neither after {asked[-1]}"
        states.append(found.same(new))
        if len(asked) <= number:
            break
    assert states == sorted(states)
    assert {True, False} == set(states)


def test_only_checks_are_listed(tmp_path: Path) -> None:
    check = make()
    stored(tmp_path, check)
    (tmp_path / check.path).with_name(".partial-1-x.safetensors").write_bytes(b"")
    (tmp_path / check.path).with_name("notes.md").write_bytes(b"")
    assert stored_checks(tmp_path) == [f"{check.path}.check"]


def test_a_small_value_is_text_that_a_reader_understands() -> None:
    check = make({"kl": np.float32([[0.1, 2], [3, 4e-9]]), "said": "yes"})
    *lines, last = check.encode().decode().splitlines()
    assert (check.file[-6:], last[:7]) == (".check", "sha256 ")
    assert lines == [
        "regress check 1",
        'test "tests/test_x.py::test_it[1]"',
        'name "loss"',
        "rtol 0.001",
        "atol 0.0",
        'why "measured"',
        'provenance {"versions":{}}',
        '["value","dict",""]',
        '["value[\'kl\']","float32",[2,2]]',
        "0.1 2.0",
        "3.0 4e-09",
        '["value[\'said\']","text","yes"]',
    ]


@settings(deadline=None)
@given(st.data())
def test_every_small_tensor_reads_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A number that decimal does not hold, such as a NaN with a payload, makes the check a record."""
    root = tmp_path_factory.mktemp("golden")
    dtype = DTYPES[data.draw(st.sampled_from(sorted(DTYPES)), "dtype")]
    shape = data.draw(st.sampled_from([(), (0,), (3,), (0, 2), (2, 0), (2, 3), (2, 2, 3)]), "shape")
    size = int(np.prod(shape)) * dtype.itemsize
    values = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size), "bytes"), dtype)
    if dtype.kind == "b":
        values = np.frombuffer(bytes(byte & 1 for byte in values.tobytes()), bool)
    found = stored(root, make(values.reshape(shape))).value.tensors["value"]
    assert (found.dtype, found.shape, found.tobytes()) == (dtype, shape, values.tobytes())
    assert make(np.array([0.5, -0.0, np.inf])).file.endswith(".check")


def test_a_check_in_two_files_is_refused(tmp_path: Path) -> None:
    """Two branches changed it, one to a value that is text and one to a record."""
    for value in (VALUE, LARGE):
        write(tmp_path / make(value).file, [make(value).encode()])
    with pytest.raises(GoldenError, match=r"are the same check: keep one"):
        read_check(tmp_path, make().path)
