"""Bytes and JSON that anybody may have written."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regress.untrusted_files import DEPTH, TwiceError, parse_json, read_bytes

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_json_is_read_as_it_was_written(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 50_000 + "]" * 50_000, "nested"),
        ('{"a":' * (DEPTH + 1) + "1" + "}" * (DEPTH + 1), "nested deeper than 200 levels"),
        ("[" + "[]," * 10_000_000 + "[]]", "more values than memory"),
        ("9" * 5000, "9+... has more than 64 bits"),
        ("NaN", "bare NaN is not JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        (b'"\xff"', "not UTF-8"),
        ("{", "Expecting property name"),
    ],
    ids=["deep", "deep-objects", "many", "long", "nan", "twice", "bytes", "cut"],
)
def test_what_is_refused(text: str | bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 300


def test_brackets_in_texts_are_no_nesting() -> None:
    value = ["[" * 1000, '{"' * 1000, *([] for _ in range(DEPTH + 50))]
    assert parse_json(json.dumps(value)) == value


def test_wide_integers_and_bare_constants_where_they_are_asked_for() -> None:
    assert parse_json(str(10**400), wide=True) == 10**400
    assert parse_json("-Infinity", finite=False) == float("-inf")


def test_a_key_that_is_there_twice_is_known() -> None:
    with pytest.raises(TwiceError) as caught:
        parse_json('{"x": {"\\u202e": 1, "\\u202e": 2}}')
    assert caught.value.key == "\u202e"
    assert str(caught.value).isprintable()


def _bind() -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("it")


@pytest.mark.parametrize("kind", ["fifo", "loop", "zero", "folder", "socket"])
def test_what_is_no_file_is_not_waited_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "it"
    monkeypatch.chdir(tmp_path)
    {
        "fifo": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path),
        "zero": lambda: path.symlink_to("/dev/zero"),
        "folder": lambda: path.mkdir(),
        "socket": _bind,
    }[kind]()
    with pytest.raises(OSError, match=r"it is a|Too many levels|No such device"):
        read_bytes(path)


def test_a_hole_and_a_file_beyond_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, 10) == b"0123456789"
    with pytest.raises(OSError, match="it has 10 bytes, more than any file of its kind"):
        read_bytes(path, 9)
    os.truncate(path, 20 << 30)
    with pytest.raises(OSError, match="nearly all of them a hole"):
        read_bytes(path)
