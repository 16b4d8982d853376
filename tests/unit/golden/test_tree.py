"""Values taken apart: nothing is lost, nothing is guessed, and different values are different trees."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.errors import CheckError
from regress.golden.stored_checks import StoredCheck
from regress.golden.value_tree import Tree, describe

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def identical(a: Tree, b: Tree) -> bool:
    """Return True if two values would be the same golden."""
    one, other = (StoredCheck("test_x.py::test_it", "x", tree, 0.0, 0.0, "", {}) for tree in (a, b))
    return one.same(other)


class Point(NamedTuple):
    x: float
    y: float


class Word(StrEnum):
    ONE = "one"


class Number(IntEnum):
    ONE = 1


def paths(value: Any) -> dict[str, tuple[str, str]]:
    return Tree.of(value).nodes


def canonical(value: Any) -> Any:
    """Return a form that is equal for equal values: types, structure and bits."""
    if isinstance(value, dict):
        return frozenset(((type(key), key), canonical(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(canonical, value))
    if isinstance(value, float):
        return (float, np.float64(value).tobytes())
    return (type(value), value)


@settings(deadline=None)
@given(values, values)
def test_trees_are_the_same_exactly_if_the_values_are(a: Any, b: Any) -> None:
    assert identical(Tree.of(a), Tree.of(a))
    assert identical(Tree.of(a), Tree.of(b)) == (canonical(a) == canonical(b))


def test_every_leaf_has_its_path() -> None:
    assert paths({"a": [1, {"b": None}], 2: "text"}) == {
        "value": ("dict", ""),
        "value[2]": ("text", "text"),
        "value['a']": ("list", ""),
        "value['a'][0]": ("tensor", ""),
        "value['a'][1]": ("dict", ""),
        "value['a'][1]['b']": ("none", ""),
    }


def test_the_order_of_keys_is_of_no_account() -> None:
    assert [*paths({"b": 1, "a": 2})] == [*paths({"a": 2, "b": 1})]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.zeros((0, 4), np.int16),
        np.array(1.5, np.float32),
        np.array([1.5, np.nan, -np.inf], ml_dtypes.bfloat16),
        np.array([True, False]),
        np.arange(4.0)[::-2],
        np.arange(3, dtype=">f8"),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_arrays_keep_every_bit(array: Any) -> None:
    found = Tree.of(array).tensors["value"]
    assert (found.dtype.newbyteorder("="), found.shape) == (array.dtype.newbyteorder("="), array.shape)
    assert found.astype(array.dtype).tobytes() == array.tobytes()


def test_a_torch_tensor_is_the_same_as_its_array() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_()
    assert identical(Tree.of(tensor), Tree.of(tensor.detach().numpy()))
    half = torch.tensor([1.5, float("nan")], dtype=torch.bfloat16)
    assert identical(Tree.of(half), Tree.of(half.view(torch.int16).numpy().view(ml_dtypes.bfloat16)))


def test_later_changes_of_the_value_do_not_reach_the_tree() -> None:
    array, tensor = np.zeros(2), torch.zeros(2)
    tree = Tree.of([array, tensor])
    array += 1
    tensor += 1
    assert not any(found.any() for found in tree.tensors.values())


def test_numbers_are_tensors_without_dimensions() -> None:
    dtypes = {value: Tree.of(value).tensors["value"].dtype for value in (1.5, 7, True)}
    assert dtypes == {1.5: np.float64, 7: np.int64, True: np.bool_}
    assert identical(Tree.of(1.5), Tree.of(np.float64(1.5)))
    assert not identical(Tree.of(1.5), Tree.of(np.float32(1.5)))
    assert not identical(Tree.of(1), Tree.of(True))
    assert paths(2**63) == {"value": ("integer", "9223372036854775808")}
    assert paths(-(2**63)) == {"value": ("tensor", "")}


def test_subclasses_count_as_what_they_are() -> None:
    assert paths(Point(1.0, 2.0)) == paths([1.0, 2.0]) == paths((1.0, 2.0))
    assert paths(Word.ONE) == paths("one")
    assert identical(Tree.of(Number.ONE), Tree.of(1))
    assert paths({Word.ONE: 1, Number.ONE: 2}) == paths({"one": 1, 1: 2})


def test_a_table_keeps_labels_index_dtypes_and_cells() -> None:
    frame = pd.DataFrame(
        {"a": [1, 2], "b": [0.5, np.nan], "c": ["x", None]}, index=pd.Index([5, 7], name="step")
    )
    assert paths(frame) == {
        "value": ("table", ""),
        "value.columns": ("index", ""),
        "value.columns.names": ("list", ""),
        "value.columns.names[0]": ("none", ""),
        "value.columns[0]": ("column", "str"),
        "value.columns[0][0]": ("text", "a"),
        "value.columns[0][1]": ("text", "b"),
        "value.columns[0][2]": ("text", "c"),
        "value.index": ("index", ""),
        "value.index.names": ("list", ""),
        "value.index.names[0]": ("text", "step"),
        "value.index[0]": ("tensor", ""),
        "value['a']": ("tensor", ""),
        "value['b']": ("tensor", ""),
        "value['c']": ("column", "str"),
        "value['c'][0]": ("text", "x"),
        "value['c'][1]": ("missing", ""),
    }


BASE = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, 1.5, 2.5]})
CHANGES = {
    "cell": BASE.assign(a=[1, 2, 4]),
    "dtype": BASE.assign(a=BASE["a"].astype("int32")),
    "nullable": BASE.assign(a=BASE["a"].astype("Int64")),
    "column": BASE.rename(columns={"a": "A"}),
    "order": BASE[["b", "a"]],
    "index": BASE.set_index(pd.Index([0, 1, 3])),
    "index name": BASE.rename_axis("n"),
    "columns name": BASE.rename_axis("n", axis="columns"),
    "rows": BASE.iloc[:2],
    "extra": BASE.assign(c=0),
    "twin": pd.DataFrame([[1, 0.5], [2, 1.5], [3, 2.5]], columns=["a", "a"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_table_is_another_tree(change: str) -> None:
    assert identical(Tree.of(BASE), Tree.of(BASE.copy()))
    assert not identical(Tree.of(BASE), Tree.of(CHANGES[change]))


SERIES = {
    "int": [1, 2],
    "object": pd.Series([1, "a", None, 2.5], dtype=object),
    "string": pd.Series(["a", None], dtype="string"),
    "Int64": pd.Series([1, None], dtype="Int64"),
    "Float32": pd.Series([1.5, None], dtype="Float32"),
    "boolean": pd.Series([True, None], dtype="boolean"),
    "category": pd.Series(["b", "a", None], dtype="category"),
    "ordered": pd.Series(pd.Categorical(["b", "a"], ordered=True)),
    "datetime": pd.Series(pd.to_datetime(["2026-01-01", None])),
    "zoned": pd.Series(pd.to_datetime(["2026-01-01", "2026-01-02"])).dt.tz_localize("UTC"),
    "timedelta": pd.Series(pd.to_timedelta(["1s", None])),
    "multiindex": pd.Series(
        [1.0, 2.0], index=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["x", "y"])
    ),
    "empty": pd.Series([], dtype="float64"),
}


@pytest.mark.parametrize("name", SERIES)
def test_series_of_every_usual_dtype_can_be_checked(name: str) -> None:
    series = pd.Series(SERIES[name])
    assert identical(Tree.of(series), Tree.of(series.copy()))
    assert not identical(Tree.of(series), Tree.of(series.rename("other")))
    others = [pd.Series(other) for other in SERIES if other != name]
    assert not any(identical(Tree.of(series), Tree.of(other)) for other in others)


@pytest.mark.parametrize("name", sorted(set(SERIES) - {"empty"}))
def test_a_cell_of_any_dtype_that_changes_is_another_tree(name: str) -> None:
    series = pd.Series(SERIES[name])
    assert not identical(Tree.of(series), Tree.of(series.iloc[::-1].set_axis(series.index)))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            {"a": object()},
            "value['a'] is of type object, but a check holds tensors, arrays, numbers, texts, None, dicts, lists, "
            "DataFrames and Series: convert it",
        ),
        (
            [b"bytes"],
            "value[0] is of type bytes, but a check holds tensors, arrays, numbers, texts, None, dicts, lists, "
            "DataFrames and Series: convert it",
        ),
        (
            Enum("Colour", "RED").RED,
            "value is of type Colour, but a check holds tensors, arrays, numbers, texts, None, dicts, lists, "
            "DataFrames and Series: convert it",
        ),
        (
            {1.5: 2},
            "value has the key 1.5, but keys of a check are texts or integers: rename it",
        ),
        (
            pd.Series(pd.period_range("2026", periods=2, freq="D")),
            "value.values is a column of dtype period[D], which a check cannot hold: convert it",
        ),
        (
            {"k" * 999: 1},
            f"value['{'k' * 53}... is a path of 1008 characters, but 1000 are the limit: shorten its keys",
        ),
    ],
    ids=["object", "bytes", "enum", "key", "period", "long"],
)
def test_what_cannot_be_kept_is_refused(value: Any, sentence: str) -> None:
    with pytest.raises(CheckError) as caught:
        Tree.of(value)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([object()]),
        np.array([1j]),
        torch.zeros(2).to_sparse(),
        np.array(["2026"], "M8[D]"),
    ],
    ids=["texts", "objects", "complex", "sparse", "dates"],
)
def test_arrays_without_a_dtype_that_every_format_has_are_refused(value: Any) -> None:
    with pytest.raises(CheckError, match=r"^value\['a'\] cannot be stored: "):
        Tree.of({"a": value})


def test_endless_nesting_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckError, match="nested deeper than 64 levels: flatten it before the check"):
        Tree.of(endless)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("abc", "the text 'abc'"),
        (2**70, "the integer 1180591620717411303424"),
        (None, "None"),
        ([], "a list"),
        ({}, "a dict"),
        (1.5, "a tensor"),
        (pd.Series([1.0]), "a series"),
        (pd.DataFrame(), "a table"),
    ],
)
def test_nodes_in_words(value: Any, words: str) -> None:
    assert describe(Tree.of(value).nodes["value"]) == words


def test_a_number_needs_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from regress.golden.value_tree import Tree; Tree.of({'a': [1.5, None, 'x']});"
        "print(*{'torch', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == ""
