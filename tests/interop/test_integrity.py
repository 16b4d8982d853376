"""Damage of a dump's bytes: found wherever it lies, also where the dump is compared with itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.dump.chunk_checksums import CHUNK, ChunkSums, damaged_chunk, file_sums, fits
from regress.dump.dump_reader import DumpReader
from tests.fuzz.seeds import CORPUS

RECORDS = sorted(
    path.relative_to(CORPUS / "own_safetensors") for path in (CORPUS / "own_safetensors").glob("*/*")
)


def compare(golden: Path, actual: Path, *options: str) -> tuple[int, str]:
    command = ["compare", str(golden), str(actual), "--engine", "local", *options]
    done = CliRunner().invoke(main, command)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture(params=["own_safetensors", "own_old", "own_pt", "own_jsonl"])
def dump(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A dump of each format, and one of an earlier release without checksums of chunks."""
    return Path(shutil.copytree(CORPUS / request.param, tmp_path / "dump"))


def test_a_whole_dump_is_equal_to_itself(dump: Path) -> None:
    assert compare(dump, dump)[0] == 0


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.parent.name)
def test_one_flipped_bit_in_any_record_is_found_in_a_comparison_with_itself(record: Path, dump: Path) -> None:
    path = next((dump / record.parent).glob("*"))
    flipped(path, path.stat().st_size - 3)  # in the last tensor, or the checksum
    code, said = compare(dump, dump)
    assert code == 2
    assert f"error: {path} " in said


@pytest.mark.parametrize("name", ["own_safetensors", "own_old"])
def test_a_bit_of_a_parameter_is_found_on_either_side_and_left_alone_where_asked(
    name: str, tmp_path: Path
) -> None:
    good, bad = CORPUS / name, Path(shutil.copytree(CORPUS / name, tmp_path / "bad"))
    path = next((bad / "param").glob("*"))
    flipped(path, path.stat().st_size - 90)
    for pair in ((good, bad), (bad, good), (bad, bad)):
        code, said = compare(*pair)
        assert code == 2
        assert "that do not match the size and hash in manifest.json" in said
    assert compare(bad, bad, "--only", "param*")[0] == 2
    code, said = compare(bad, bad, "--no-verify")
    assert code == 0
    assert "the bytes of the files were not verified, as --no-verify asked" in said


def test_the_parts_of_some_tensors_are_their_bytes_and_the_description() -> None:
    reader = DumpReader(CORPUS / "own_safetensors", mapped=True)
    name = next(name for name in reader.names() if name.startswith("optimizer/"))
    size = reader.manifest.files[name].stamp.size
    data = (CORPUS / "own_safetensors" / name).read_bytes()
    record = reader.read(name)
    assert reader.spans(name) == [(0, size)]
    head, (start, stop) = reader.spans(name, ["weight/exp_avg_sq"])
    assert head == (0, 8 + int.from_bytes(data[:8], "little"))
    assert data[start:stop] == record.tensors["weight/exp_avg_sq"].tobytes()


@pytest.mark.parametrize("name", ["nexrl_pt", "nexrl_jsonl"])
def test_files_without_checksums_are_said_once(name: str) -> None:
    said = compare(CORPUS / name, CORPUS / name)[1]
    assert said.count("carry no checksums") == 1


def test_chunks_are_those_of_the_bytes_however_they_pass(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(2 * CHUNK + 5)
    path = tmp_path / "file"
    path.write_bytes(data)
    sums = ChunkSums()
    pieces = [data[:3], data[3 : CHUNK + 7], b"", data[CHUNK + 7 :]]
    assert b"".join(sums.passing(pieces)) == data
    assert sums.text == file_sums(path)
    assert fits(sums.text, len(data))
    assert not fits(sums.text, CHUNK)
    assert damaged_chunk(path, sums.text, len(data)) is None
    flipped(path, CHUNK + 1)
    assert damaged_chunk(path, sums.text, len(data)) == (CHUNK, 2 * CHUNK)
    assert damaged_chunk(path, sums.text, len(data), [(0, 5), (2 * CHUNK, 2 * CHUNK + 1)]) is None
    assert damaged_chunk(path, sums.text, len(data) - 1) == (0, len(data) - 1)


def test_a_manifest_has_the_sums_of_each_file_and_an_old_one_is_read() -> None:
    rows: Any = json.loads((CORPUS / "own_safetensors" / "manifest.json").read_text())["files"]
    for name, row in rows.items():
        assert row["xxh3"] == file_sums(CORPUS / "own_safetensors" / name)
    reader = DumpReader(CORPUS / "own_old", mapped=True)
    for name in reader.names():
        assert reader.spans(name, ["weight"]) == [(0, reader.manifest.files[name].stamp.size)]
        reader.verify(name)
