"""Mapped files: the same records, nothing copied, damage of structure found, memory given back."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from regress.compare.metrics.compiled_measures import measure_compiled
from regress.compare.metrics.striped_measures import largest, measure
from regress.dump import DumpReader, Recorder, at, recording, tap
from regress.dump.mapped_arrays import Region, map_file, release
from regress.dump.numpy_arrays import DTYPES, is_float
from regress.errors import DumpError


def record(folder: str | Path, format: str = "safetensors") -> None:
    """A dump with tensors of all element types, empty and 0-d ones among them."""
    with recording(Recorder(folder, options={"activations": True, "loss": True}, format=format)), at(step=0):
        tap("loss", loss=0.5)
        tensors = {name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in DTYPES.items()}
        tap("activations", **tensors, empty=np.zeros((0, 4), np.float32))


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    record(tmp_path / "dump")
    return tmp_path / "dump"


def in_memory() -> int:
    """Bytes of mapped files that are in this process's memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssFile:")[1].split()[0]) * 1024


def test_mapped_records_are_the_same(dump: Path) -> None:
    for plain, mapped in zip(DumpReader(dump), DumpReader(dump, mapped=True), strict=True):
        assert mapped.checksum() == plain.checksum()
        assert mapped.where == plain.where
        for name, array in mapped.tensors.items():
            assert array.dtype == plain.tensors[name].dtype
            assert not array.flags.writeable
            assert not array.flags.owndata


@pytest.mark.parametrize("format", ["pt", "jsonl"])
def test_other_formats_are_read_as_before(tmp_path: Path, format: str) -> None:
    record(tmp_path, format)
    for plain, mapped in zip(DumpReader(tmp_path), DumpReader(tmp_path, mapped=True), strict=True):
        assert mapped.checksum() == plain.checksum()
        assert all(array.flags.writeable for array in mapped.tensors.values())


@pytest.mark.usefixtures("memory")
def test_a_store_is_read_as_before() -> None:
    record("memory://dump")
    assert [r.type for r in DumpReader("memory://dump", mapped=True)] == ["activations", "loss"]
    DumpReader("memory://dump").verify("loss/step_000000.safetensors")


def test_sizes_and_headers_are_verified(dump: Path) -> None:
    (file,) = (dump / "activations").iterdir()
    data, name = file.read_bytes(), f"activations/{file.name}"
    file.write_bytes(data[:-1])
    with pytest.raises(
        DumpError, match=rf"has {len(data) - 1} bytes, but manifest.json tells of {len(data)};"
    ):
        DumpReader(dump, mapped=True).read(name)
    for old, new in [
        (b'"float64"', b'"float16"'),
        (b'"F64"', b'"F16"'),
        (b'"regress"', b'"regresx"'),
        (b"[", b"{"),
    ]:
        assert old in data
        file.write_bytes(data.replace(old, new, 1))
        with pytest.raises(DumpError, match="is not an intact safetensors record"):
            DumpReader(dump, mapped=True).read(name)


def test_damaged_values_are_found_when_asked_for(dump: Path) -> None:
    reader = DumpReader(dump, mapped=True)
    for name in reader.names():
        reader.verify(name)
    (file,) = (dump / "activations").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    name = f"activations/{file.name}"
    reader.read(name)  # the header is as it was
    with pytest.raises(DumpError, match=r"do not match the size and hash in manifest\.json"):
        reader.verify(name)
    file.unlink()
    with pytest.raises(DumpError, match=r"cannot be read \(No such file or directory\)"):
        reader.verify(name)


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if is_float(dtype)])
def test_a_region_of_any_file(tmp_path: Path, dtype: str) -> None:
    values = np.arange(12).astype(DTYPES[dtype]).reshape(3, 4)
    path = tmp_path / "raw"
    path.write_bytes(b"header" + values.tobytes() + b"more")
    assert Region(path, 6, DTYPES[dtype], (3, 4)).open().tobytes() == values.tobytes()
    with pytest.raises(DumpError, match="but a tensor should lie in 11:"):
        Region(path, 11, DTYPES[dtype], (3, 4)).open()
    with pytest.raises(DumpError, match="cannot be read"):
        Region(tmp_path / "none", 0, DTYPES[dtype], (1,)).open()
    (tmp_path / "empty").touch()
    assert Region(tmp_path / "empty", 0, DTYPES[dtype], (0, 3)).open().shape == (0, 3)


def test_memory_is_given_back(tmp_path: Path) -> None:
    path, size = tmp_path / "large", 64 << 20
    with path.open("wb") as file:
        file.truncate(size)
    data = map_file(path)
    before = in_memory()
    assert not data.any()
    assert in_memory() - before > size / 2
    release(data[1000:-1000])
    assert in_memory() - before < size / 8
    assert not data.any()  # and is there again
    own = np.ones(5)
    release(own)
    assert own.sum() == 5


def test_a_comparison_holds_little_of_its_files(tmp_path: Path) -> None:
    """Both files are larger than what measuring them may leave in memory."""
    size = 48 << 20
    sides = []
    for name in ("actual", "golden"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
        sides.append(Region(tmp_path / name, 0, np.dtype(ml_dtypes.bfloat16), (3, size // 6)).open())
    measure_compiled(sides[0][0, :9], sides[1][0, :9], 0.0, False, None)  # loads what stays
    before = in_memory()
    assert measure(*sides).count == size // 2
    assert largest(sides[0]) == 0.0
    assert in_memory() - before < 16 << 20
