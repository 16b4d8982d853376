"""A damaged or malicious file is refused with a sentence, never read as something else, never executed."""

from __future__ import annotations

import io
import json
import pickle
import random
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from regress.dump.dump_reader import read, read_all
from regress.dump.formats import FORMATS
from regress.errors import DumpError

KINDS = range(4)  # the records of the fixture: trajectory, forward_data, loss, param


@pytest.fixture
def sound(request: pytest.FixtureRequest, make_records: Any, format_name: str) -> bytes:
    return b"".join(FORMATS[format_name].encode(make_records()[request.param]))


@pytest.mark.parametrize("sound", KINDS, indirect=True)
def test_truncation(tmp_path: Path, sound: bytes, format_name: str) -> None:
    path = tmp_path / f"step_000003.{format_name}"
    for tenth in range(10):
        path.write_bytes(sound[: len(sound) * tenth // 10])
        with pytest.raises(DumpError, match=r"step_000003.*(cut off|copy it again)"):
            read_all(path)
    for cut in (1, 2, 22, 100):
        path.write_bytes(sound[:-cut])
        if format_name == "jsonl" and cut == 1:  # the final line feed carries nothing
            assert read(path).step == 3
            continue
        with pytest.raises(DumpError, match="step_000003"):
            read_all(path)


@pytest.mark.parametrize("sound", KINDS, indirect=True)
def test_single_bit_flips(tmp_path: Path, sound: bytes, format_name: str, content: Any) -> None:
    path = tmp_path / f"record.{format_name}"
    path.write_bytes(sound)
    truth = content(read(path))
    rng = random.Random(1)
    survivors = 0
    for bit in rng.sample(range(8 * len(sound)), 200):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            record = read(path)
        except DumpError as error:
            assert str(path) in str(error)  # noqa: PT017 - no error is right as well, if nothing changed
        else:
            survivors += 1
            assert content(record) == truth
    assert survivors == 0 or (format_name == "jsonl" and survivors == 1)  # its last line feed


@pytest.mark.parametrize("sound", KINDS, indirect=True)
def test_flips_of_every_mark(tmp_path: Path, sound: bytes, format_name: str, content: Any) -> None:
    """The bytes that tell our files from those of others: none may turn one into the other."""
    path = tmp_path / f"record.{format_name}"
    path.write_bytes(sound)
    truth = content(read(path))
    spots = {
        at + i
        for mark in (b"regress", b"sha256", b"PK")
        for at in _find(sound, mark)
        for i in range(len(mark))
    }
    for spot in sorted(spots):
        for bit in (0, 5):
            damaged = bytearray(sound)
            damaged[spot] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                record = read(path)
            except DumpError:
                continue
            assert content(record) == truth


def _find(data: bytes, mark: bytes) -> list[int]:
    return [i for i in range(len(data)) if data.startswith(mark, i)]


@pytest.mark.parametrize("sound", [1], indirect=True)
def test_exchanged_value(tmp_path: Path, sound: bytes, format_name: str) -> None:
    """Someone edits a number and forgets the checksum."""
    edited = sound.replace(b'"tokens":9', b'"tokens":8').replace(b'\\"tokens\\":9', b'\\"tokens\\":8')
    edited = edited if format_name != "pt" else sound.replace(b"log_probs_shape", b"log_probs_shapE")
    assert edited != sound
    path = tmp_path / "record"
    path.write_bytes(edited)
    with pytest.raises(DumpError, match="does not match its checksum"):
        read(path)


@pytest.mark.parametrize("format", ["pt", "jsonl"])
def test_content_is_checked_even_where_the_text_is_sealed(
    tmp_path: Path, make_records: Any, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that mixes up two records makes a file whose own seal is right."""
    monkeypatch.setattr("regress.dump.record.Record.checksum", lambda self: "0" * 64)
    data = b"".join(FORMATS[format].encode(make_records()[1]))
    monkeypatch.undo()
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(DumpError, match="its content does not match its checksum"):
        read(tmp_path / "x")


def test_flips_in_the_archives_of_others(tmp_path: Path, make_records: Any, content: Any) -> None:
    """NexRL's files have no checksum of their own, but the archive has one for each member."""
    saved = io.BytesIO()
    item = {"tokens": [1, 2], "loss_mask": [0, 1], "reward": 0.5, "extra_fields": {"uid": "u", "run_id": 0}}
    torch.save({"step": 0, "num_trajectories": 1, "trajectories": [item]}, saved)
    sound, path = saved.getvalue(), tmp_path / "x.pt"
    path.write_bytes(sound)
    truth = content(read(path))
    start = sound.index(b"num_trajectories") - 50
    for spot in range(start, start + 300):
        damaged = bytearray(sound)
        damaged[spot] ^= 4
        path.write_bytes(damaged)
        try:
            assert content(read(path)) == truth
        except DumpError:
            continue


def test_huge_declared_sizes_allocate_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for size in (2**24, 2**40, 2**60):
        path.write_bytes(size.to_bytes(8, "little") + b'{"a":{}}' * 100)
        tracemalloc.start()
        with pytest.raises(DumpError, match=r"x\.safetensors"):
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


def test_huge_declared_tensor(tmp_path: Path, make_records: Any) -> None:
    data = b"".join(FORMATS["safetensors"].encode(make_records()[1]))
    path = tmp_path / "x.safetensors"
    path.write_bytes(data.replace(b'"shape":[3,5]', b'"shape":[9,9]').replace(b"[3,5]", b"[9,9]"))
    with pytest.raises(DumpError, match=r"x\.safetensors is not an intact safetensors record"):
        read(path)


class Bomb:
    """Object that runs code when it is unpickled, as a stranger's pickle may hold."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def _bombs(marker: Path) -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.save({"step": 0, "num_trajectories": 0, "trajectories": [Bomb(marker)]}, saved)
    old = io.BytesIO()
    torch.save({"step": 0, "trajectories": [Bomb(marker)]}, old, _use_new_zipfile_serialization=False)
    return {
        "saved": saved.getvalue(),
        "old": old.getvalue(),
        "pickle5": pickle.dumps(Bomb(marker), 5),
        "pickle2": pickle.dumps(Bomb(marker), 2),
        "pickle0": pickle.dumps(Bomb(marker), 0),
    }


@pytest.mark.parametrize("kind", ["saved", "old", "pickle5", "pickle2", "pickle0"])
@pytest.mark.parametrize("name", ["step_000000.pt", "step_000000.safetensors", "step_000000.jsonl", "x.pkl"])
def test_malicious_pickle_is_not_executed(
    tmp_path: Path, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # users set this to load old checkpoints
    marker, path = tmp_path / "marker", tmp_path / name
    path.write_bytes(_bombs(marker)[kind])
    rule = "no dump format" if kind == "pickle0" else "was not executed"
    with pytest.raises(DumpError, match=rule) as caught:
        read_all(path)
    assert str(path) in str(caught.value)
    assert not marker.exists()
    if kind == "saved":
        assert "holds code (pathlib.Path.touch)" in str(caught.value) or "holds code (" in str(caught.value)


def test_bombs_would_explode(tmp_path: Path) -> None:
    """The marker of the test above does appear when a pickle is executed."""
    pickle.loads(_bombs(tmp_path / "marker")["pickle2"])
    assert (tmp_path / "marker").exists()


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 2**22)
    with pytest.raises(DumpError, match="it is compressed"):
        read(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"\n",
        b'{"step": 0}',
        b'{"regress": {}}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"PK\x03\x04",
        b"PK\x05\x06" + b"\0" * 18,
        b"\x80\x04.",
        b"hello, world",
        (2).to_bytes(8, "little") + b"{}",
        (16).to_bytes(8, "little") + b'{"__metadata__":',
        json.dumps({"__metadata__": {"regress": "[]"}}).encode().join([(39).to_bytes(8, "little"), b""]),
        b"\xff\xfe" * 50,
    ],
)
def test_rubbish(tmp_path: Path, data: bytes) -> None:
    for name in ("x.pt", "x.jsonl", "x.safetensors"):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(DumpError, match=r"x\."):
            read(path)


def test_plain_torch_files_are_no_records(tmp_path: Path) -> None:
    for value in (torch.zeros(3), {"weight": torch.zeros(3)}, [1, 2]):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(DumpError, match="is not a record"):
            read(tmp_path / "x.pt")


def test_missing_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="does not exist: check the path"):
        read(tmp_path / "none.pt")
    with pytest.raises(DumpError, match="cannot be read"):
        read(tmp_path)
