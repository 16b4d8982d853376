"""The same record out as in, bit for bit, in every format; and files that other tools can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from regress.dump.coordinates import Coordinates
from regress.dump.dump_reader import detect_format, read
from regress.dump.formats import FORMATS, format_named
from regress.dump.numpy_arrays import DTYPES, canonical_nans, is_float
from regress.dump.record import RESERVED, Record
from regress.dump.record_types import RECORD_TYPES
from regress.dump.trajectory import Trajectory, from_record, to_record
from regress.errors import DumpError

names = st.text('abz.0_/ é中"\\{}', min_size=1, max_size=8).filter(
    lambda n: n.isprintable() and n not in RESERVED
)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
metadata = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
indices = st.none() | st.integers(0, 3)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any element type, any shape, any bits."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = int(np.prod(shape)) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype.name == "bool":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


@st.composite
def records(draw: st.DrawFn) -> Record:
    type = draw(
        st.sampled_from(
            [record_type.name for record_type in RECORD_TYPES if record_type.name != "trajectory"]
        )
    )
    where = Coordinates(draw(st.integers(-1, 2_000_000)), *(draw(indices) for _ in range(5)))
    tensors = draw(st.dictionaries(names, arrays(), max_size=3))
    if type == "loss":
        tensors["loss"] = np.array(draw(st.floats(width=32)), np.float32)
    return Record.of(type, where, tensors, draw(st.dictionaries(st.text(max_size=4), metadata, max_size=3)))


@pytest.mark.parametrize("format", sorted(FORMATS))
@settings(max_examples=30, deadline=None)
@given(record=records())
def test_round_trip(format: str, content: Any, record: Record) -> None:
    encoded = b"".join(FORMATS[format].encode(record))
    assert detect_format(encoded) is FORMATS[format]
    (again,) = FORMATS[format].decode(encoded)
    for name, array in record.tensors.items():
        if format == "jsonl" or (format == "pt" and name == "loss"):
            record.tensors[name] = canonical_nans(array)
    assert content(again) == content(record)
    assert again.checksum() == record.checksum()


@pytest.mark.parametrize("format", sorted(FORMATS))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_trajectories_round_trip(format: str, content: Any, data: st.DataObject) -> None:
    dtype = DTYPES[data.draw(st.sampled_from(["float64", "float32", "float16", "bfloat16"]))]
    trajectories = [
        _random_trajectory(data.draw, index, dtype) for index in range(data.draw(st.integers(1, 3)))
    ]
    record = to_record(trajectories, 7, {"mode": "val"})
    (again,) = FORMATS[format].decode(b"".join(FORMATS[format].encode(record)))
    assert content(again) == content(record)
    for left, right in zip(from_record(again), trajectories, strict=True):
        ours, theirs = dict(vars(left)), dict(vars(right))
        a, b = ours.pop("log_probs"), theirs.pop("log_probs")
        assert json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and a.tobytes() == b.tobytes())


def _random_trajectory(draw: Any, run_id: int, dtype: np.dtype[Any]) -> Trajectory:
    prompt, sampled = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    size = prompt + sampled
    values = draw(st.lists(st.floats(-60, 0, width=16), min_size=size, max_size=size))
    return Trajectory(
        group_id=draw(st.text(max_size=3)),
        run_id=run_id,
        tokens=draw(st.lists(st.integers(0, 2**40), min_size=size, max_size=size)),
        loss_mask=[0] * prompt + draw(st.lists(st.integers(0, 1), min_size=sampled, max_size=sampled)),
        reward=draw(st.floats(allow_nan=False, allow_infinity=False)),
        prompt_length=prompt,
        is_val=draw(st.booleans()),
        log_probs=np.array(values, np.float64).astype(dtype) if draw(st.booleans()) else None,
        finish_reason=draw(st.sampled_from([None, "stop", "length"])),
        rewards=draw(st.dictionaries(st.text(max_size=2), st.floats(-9, 9), max_size=2)),
        task_id=draw(st.none() | st.text(max_size=2) | st.integers(0, 9)),
        prompt=draw(st.none() | st.text(max_size=4)),
        response=draw(st.none() | st.text(max_size=4)),
        temperature=draw(st.none() | st.floats(0, 2)),
        extra=draw(st.dictionaries(st.sampled_from(["uid", "score", "advantage"]), scalars, max_size=2)),
    )


@pytest.mark.parametrize(
    "dtype", [name for name in DTYPES if is_float(DTYPES[name]) and DTYPES[name].itemsize < 4]
)
def test_text_keeps_every_value_of_the_short_floats(dtype: str, content: Any) -> None:
    bits = np.arange(256 ** DTYPES[dtype].itemsize, dtype=np.uint32)
    array = canonical_nans(bits.astype(f"u{DTYPES[dtype].itemsize}").view(DTYPES[dtype]))
    record = Record.of("activations", Coordinates(0), {"x": array})
    (again,) = FORMATS["jsonl"].decode(b"".join(FORMATS["jsonl"].encode(record)))
    assert content(again) == content(record)


def test_text_is_strict_json(make_records: Any) -> None:
    record = make_records()[1]
    record.tensors["log_probs"][0, :3] = [np.nan, np.inf, -np.inf]
    record.meta["scale"] = float("nan")
    text = b"".join(FORMATS["jsonl"].encode(record)).decode("ascii")
    assert text.endswith("}\n")
    assert text.count("\n") == 1

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    tree = json.loads(text, parse_constant=refuse)
    assert tree["log_probs"]["data"][:3] == ["NaN", "Infinity", "-Infinity"]
    assert {key: tree["log_probs"][key] for key in ("dtype", "shape")} == {
        "dtype": "float32",
        "shape": [3, 5],
    }


def test_library_reads_our_safetensors(tmp_path: Path, write_record: Any) -> None:
    tensors = {name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in DTYPES.items()}
    path = write_record(tmp_path, Record.of("activations", Coordinates(0), tensors), "safetensors")
    loaded = load_file(path)
    for name in DTYPES:
        assert loaded[name].dtype == getattr(torch, name)
        assert torch.equal(loaded[name].double(), torch.tensor(tensors[name].astype(float)))
    header = json.loads(path.read_bytes()[8:].split(b"]}}")[0] + b"]}}")
    for name, dtype in DTYPES.items():  # aligned, for readers that map the file
        assert header[name]["data_offsets"][0] % dtype.itemsize == 0
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["regress"])["type"] == "activations"


def test_pt_has_the_keys_of_nexrl(tmp_path: Path, make_records: Any, write_record: Any) -> None:
    trajectory, forward, loss, param = (
        torch.load(write_record(tmp_path, record, "pt"), weights_only=True) for record in make_records()
    )
    assert trajectory["step"] == trajectory["num_trajectories"] == 3
    first = trajectory["trajectories"][0]
    assert first["tokens"] == [5, 6, 7, 8]
    assert first["loss_mask"] == [0, 0, 1, 1]
    assert (first["reward"], first["is_val"]) == (0.1, False)
    fields = first["extra_fields"]
    assert (fields["group_id"], fields["uid"], fields["run_id"], fields["score"]) == ("g0", "g0", 0, 0.1)
    assert fields["logprobs"] == [0.0, 0.0, float(np.float32(-0.3)), float(np.float32(-1.7))]
    assert (fields["prompt"], fields["response"], fields["finish_reason"]) == ("ab", "cd", "stop")

    assert (forward["step"], forward["rank"], forward["micro_idx"]) == (3, 0, 2)
    assert forward["log_probs"].dtype == torch.float32
    assert forward["log_probs_shape"] == [3, 5]
    assert forward["input_ids"].dtype == torch.int64

    assert loss["loss"] == float(np.float32(0.3))
    assert loss["metrics"] == {"ratio": 1.0}

    assert param["param_name"] == "a.weight"
    assert param["param"] is param["params"]["a.weight"] or torch.equal(
        param["param"], param["params"]["a.weight"]
    )
    assert (param["shape"], param["dtype"]) == ([4, 3], "torch.float64")
    for key in ("norm", "mean", "std"):
        assert param[key] == pytest.approx(getattr(param["param"], key)().item(), rel=1e-12)


def test_several_parameters_have_no_single_one() -> None:
    record = Record.of("gradient", Coordinates(0), {"a": np.zeros(2), "b": np.ones(2)})
    (again,) = FORMATS["pt"].decode(b"".join(FORMATS["pt"].encode(record)))
    payload = torch.load(_file(record), weights_only=True)
    assert sorted(payload) == ["gradients", "regress", "step"]
    assert list(again.tensors) == ["a", "b"]


def _file(record: Record) -> Any:
    import io

    return io.BytesIO(b"".join(FORMATS["pt"].encode(record)))


@pytest.mark.parametrize("format", ["safetensors", "jsonl"])
def test_reading_needs_no_torch(tmp_path: Path, write_record: Any, format: str) -> None:
    record = Record.of("activations", Coordinates(0), {"x": torch.randn(3).bfloat16()})
    path = write_record(tmp_path, record, format)
    code = (
        "import sys; from regress.dump import read; r = read(sys.argv[1]);"
        "assert r.tensors['x'].dtype.name == 'bfloat16'; assert 'torch' not in sys.modules;"
        "print(r.checksum())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == record.checksum()


def test_unknown_format_lists_the_names() -> None:
    with pytest.raises(
        DumpError, match="dump format 'pkl' does not exist: choose one of safetensors, pt, jsonl"
    ):
        format_named("pkl")


def test_newer_schema_is_refused(
    tmp_path: Path, make_records: Any, write_record: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("regress.dump.record.SCHEMA_VERSION", 2)
    path = write_record(tmp_path, make_records()[1], "safetensors")
    monkeypatch.undo()
    with pytest.raises(DumpError, match="it has schema version 2, this release reads version 1"):
        read(path)
