"""Files that claim more than they hold are refused before anything of that size is allocated."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regress.dump.dump_files import Stamp, file_stamp, stamp_of
from regress.dump.dump_reader import read_all
from regress.dump.weight_files import tensors_in
from regress.errors import DumpError, RegressError
from regress.interop.foreign_payloads import read_payload

HUGE = 1 << 33
"""Elements."""


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rewritten(data: bytes, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with other members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return buffer.getvalue()


def expanded() -> bytes:
    return saved({"log_probs": torch.zeros(1).expand(HUGE)})


def expanded_rows() -> bytes:
    return saved({"log_probs": torch.zeros(1, 4).expand(HUGE, 4)})


def short_storage() -> bytes:
    """The storage has fewer bytes than the pickle says."""
    data = saved({"log_probs": torch.zeros(1000)})
    return rewritten(data, lambda name, member: member[:40] if "/data/" in name else member)


def many_views() -> bytes:
    """Each of them fits into the storage."""
    whole = torch.zeros(1000)
    return saved({f"view {i}": whole[i % 7 :] for i in range(500)})


def transposed_views() -> bytes:
    """None of them can be a view of the file."""
    whole = torch.zeros(100, 100)
    return saved({f"view {i}": whole.T for i in range(500)})


def compressed() -> bytes:
    data = saved({"log_probs": torch.zeros(1 << 20)})
    return rewritten(data, lambda _, member: member, zipfile.ZIP_DEFLATED)


def safetensors(header: Any, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def more_than_the_file() -> bytes:
    return safetensors({"w": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 4 * HUGE]}}, bytes(16))


def more_than_its_place() -> bytes:
    return safetensors({"w": {"dtype": "F32", "shape": [HUGE], "data_offsets": [0, 16]}}, bytes(16))


def the_same_place_often() -> bytes:
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    return safetensors({f"w{i}": entry for i in range(1000)}, bytes(16))


def long_header() -> bytes:
    return (1 << 40).to_bytes(8, "little") + b'{"w":{}}' * 100


PT = [expanded, expanded_rows, short_storage, many_views, transposed_views, compressed]
SAFETENSORS = [more_than_the_file, more_than_its_place, the_same_place_often, long_header]
WORDS = {
    "expanded": "elements, but its storage has 1; a tensor that was expanded has to be saved as contiguous()",
    "expanded_rows": "elements, but its storage has 4; a tensor that was expanded",
    "short_storage": "the storage '0' claims 4000 bytes and has 40",
    "many_views": "its tensors have more than 16 times the bytes of the file",
    "transposed_views": "its tensors have more than 16 times the bytes of the file",
    "compressed": "it is compressed, which torch.save never does",
    "more_than_the_file": f"claims the bytes 0:{4 * HUGE} of 16",
    "more_than_its_place": "claims the bytes 0:16 of 16",
    "the_same_place_often": "its tensors need 16000 bytes, but 16 follow the header",
    "long_header": f"it announces a header of {1 << 40} bytes, but the file has",
}


def refused(read: Callable[[Path], Any], path: Path, limit: int = 1 << 22) -> str:
    """The sentence, and that nothing large was allocated for it."""
    tracemalloc.start()
    with pytest.raises(RegressError) as caught:
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < limit
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("bomb", [*PT, *SAFETENSORS], ids=lambda bomb: bomb.__name__)
def test_weights(tmp_path: Path, bomb: Callable[[], bytes]) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(bomb())
    assert WORDS[bomb.__name__] in refused(tensors_in, path)


@pytest.mark.parametrize("bomb", PT, ids=lambda bomb: bomb.__name__)
def test_records(tmp_path: Path, bomb: Callable[[], bytes]) -> None:
    path = tmp_path / "step_000000_rank0_micro0.pt"
    path.write_bytes(bomb())
    for read in (read_all, read_payload):
        assert WORDS[bomb.__name__] in refused(read, path, 1 << 24)


@pytest.mark.parametrize(
    "leaf",
    [
        {"dtype": "float32", "shape": [HUGE], "data": [0.0]},
        {"dtype": "float32", "shape": [HUGE, HUGE], "data": []},
        {"dtype": "float32", "shape": [-1, -1], "data": [0.0]},
        {"dtype": "float32", "shape": [1], "data": [[0.0] * 3]},
        {"dtype": "float32", "shape": [0, 1 << 70], "data": []},
    ],
)
def test_lines(tmp_path: Path, leaf: Any, make_records: Any) -> None:
    """A sealed line whose tensor claims another shape than it has."""
    from regress.dump.formats import FORMATS, jsonl_format

    path = tmp_path / "step_000000_rank0_micro0.jsonl"
    data = b"".join(FORMATS["jsonl"].encode(make_records()[1]))
    tree = json.loads(data)
    del tree["sha256"]
    tree["log_probs"] = leaf
    text = json.dumps(tree, separators=(",", ":")).encode()[:-1]
    path.write_bytes(text + jsonl_format._seal(text))
    refused(read_all, path)


def test_values_of_any_kind_are_those_that_torch_reads(tmp_path: Path) -> None:
    """Strides, offsets, types, parameters, shared storages, metadata of a state dict."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    module = torch.nn.BatchNorm1d(3)
    value = {
        "rows": base[1:3],
        "columns": base[:, 2:],
        "turned": base.T,
        "every other": base[::2, ::3],
        "none": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(base.double()),
        "state": module.state_dict(),
        "small": {
            str(t): torch.ones(3).to(t)
            for t in (
                torch.bfloat16,
                torch.float16,
                torch.float8_e4m3fn,
                torch.uint16,
                torch.bool,
                torch.int8,
            )
        },
        "plain": [1, 2.5, "text", None, True, (3, {"deep": [base]})],
    }
    path = tmp_path / "x.pt"
    torch.save(value, path)
    truth = torch.load(path, weights_only=True)
    found = tensors_in(path)
    assert found.keys() == {
        *("rows", "columns", "turned", "every other", "none", "one", "parameter", "plain.5.1.deep.0"),
        *(f"state.{name}" for name in truth["state"]),
        *(f"small.{name}" for name in truth["small"]),
    }
    for name, array in found.items():
        parts, known = name.split("."), truth
        if name.startswith(("state.", "small.")):
            known = truth[parts[0]][name.partition(".")[2]]
        elif name.startswith("plain"):
            known = truth["plain"][5][1]["deep"][0]
        else:
            known = truth[name]
        assert array.shape == known.shape
        assert np.array_equal(array.astype(np.float64), known.detach().double().numpy()), name
        assert str(known.dtype).removeprefix("torch.") == array.dtype.name


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            torch.zeros(3).to_sparse(),
            "_rebuild_sparse_tensor, which is not a plain value and no dense tensor",
        ),
        (torch.zeros(3, dtype=torch.complex64), "torch.ComplexFloatStorage, which is not a plain value"),
        (Path("x"), "its pickle holds code (pathlib"),
        (np.zeros(3), "its pickle holds code (numpy"),
    ],
)
def test_what_is_no_plain_value(tmp_path: Path, value: Any, words: str) -> None:
    torch.save({"w": value}, tmp_path / "x.pt")
    with pytest.raises(DumpError) as caught:
        tensors_in(tmp_path / "x.pt")
    assert words in str(caught.value)


def test_nested_values_end(tmp_path: Path) -> None:
    """References to the same list, level by level, would be 2 ** 60 values."""
    value: Any = [torch.ones(1)]
    for _ in range(60):
        value = [value, value]
    torch.save(value, tmp_path / "x.pt")
    assert [*tensors_in(tmp_path / "x.pt")] == [".".join(["0"] * 61)]
    deep: Any = [torch.ones(1)]
    for _ in range(60):
        deep = (deep, deep)
    torch.save(deep, tmp_path / "y.pt")
    assert len(tensors_in(tmp_path / "y.pt")) == 1


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    """To hash 20 GiB of nothing takes half a minute."""
    path = tmp_path / "x.bin"
    path.touch()
    os.truncate(path, 20 << 30)
    assert file_stamp(path, 5) == Stamp(20 << 30, "")
    path.write_bytes(b"12345")
    assert file_stamp(path, 5) == file_stamp(path) == stamp_of(b"12345")
