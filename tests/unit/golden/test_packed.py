"""Truth files that are stored compressed: the same values, the same manifest, and the same refusals."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.errors import GoldenError
from regress.golden import GoldenCase
from regress.golden.commit import commit, leftovers
from regress.golden.journal import prepare, settle
from regress.golden.names import PACKED, truth_files
from regress.golden.store import GoldenStore
from regress.golden.verify import verify

WHERE, QUANTITY = "step_000001", "gradient"
ROWS = np.repeat(np.random.default_rng(0).standard_normal((4, 16)), 100, axis=0)
"""Rows that repeat, as those of a prompt that a group shares."""


@pytest.fixture
def packed(recorded: Path, provenance: Any) -> Path:
    """The compressed file of a case: that of its largest quantity."""
    tensors = {"lm_head.weight": ROWS, "model.norm.weight": None}
    commit(recorded, truth={WHERE: {QUANTITY: tensors}}, provenance=provenance)
    (found,) = recorded.rglob(f"*{PACKED}")
    return found


def values(folder: Path) -> Any:
    return GoldenCase(folder).truth_of(WHERE, QUANTITY)["lm_head.weight"]


def unpacked(path: Path) -> Path:
    """Store a file as it is."""
    plain = path.with_suffix("")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    return plain


def test_only_what_takes_fewer_blocks_so_is_compressed(recorded: Path, packed: Path) -> None:
    assert packed.stat().st_size < ROWS.nbytes / 4
    assert packed.name.startswith(f"{QUANTITY}.")
    others = [path for path in truth_files(recorded) if not path.endswith(PACKED)]
    assert len(others) == 11, "the small ones, which fill one block however they are stored"
    assert (values(recorded) == ROWS).all()
    assert verify(GoldenStore(recorded.parent)) == []


def test_how_it_is_stored_changes_nothing(recorded: Path, packed: Path, provenance: Any) -> None:
    """Recordings of an earlier release are read, and stay as they are while their values do."""
    manifest = (recorded / "manifest.json").read_bytes()
    plain = unpacked(packed)
    assert (values(recorded) == ROWS).all()
    assert verify(GoldenStore(recorded.parent)) == []
    assert commit(recorded, truth={WHERE: {QUANTITY: {"lm_head.weight": ROWS}}}, provenance={}) == []
    assert plain.exists()
    assert not packed.exists()
    assert (recorded / "manifest.json").read_bytes() == manifest
    commit(recorded, truth={WHERE: {QUANTITY: {"lm_head.weight": 2 * ROWS}}}, provenance=provenance)
    assert not plain.exists(), "it belongs to no recording any more"
    assert (values(recorded) == 2 * ROWS).all()


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_recording_again_mends_a_damaged_file_of_either_form(recorded: Path, packed: Path, form: str) -> None:
    damaged = unpacked(packed) if form == "plain" else packed
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(GoldenError, match=damaged.name):
        values(recorded)
    commit(recorded, truth={WHERE: {QUANTITY: {"lm_head.weight": ROWS}}}, provenance={})
    assert (values(recorded) == ROWS).all()
    assert [path.name for path in recorded.rglob(f"{QUANTITY}.*{PACKED}")] == [packed.name]
    assert verify(GoldenStore(recorded.parent)) == []


def test_no_flipped_bit_changes_a_value(recorded: Path, packed: Path) -> None:
    """Some bits of a gzip header mean nothing; every other one is noticed, and none is believed."""
    whole, refused = packed.read_bytes(), 0
    for bit in range(0, 8 * len(whole), 97):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        packed.write_bytes(data)
        try:
            assert (values(recorded) == ROWS).all()
        except GoldenError:
            refused += 1
    assert refused > len(range(0, 8 * len(whole), 97)) * 0.98


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[: len(data) // 2], "no intact compressed file .*cut off"),
        (lambda data: data + b"x", "no intact compressed file .*something follows"),
        (lambda data: data + bytes(2**20), "at most"),
        (lambda data: b"", "cut off"),
        (lambda data: b"no gzip", "no intact compressed file"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-8]), "were recorded"),
        (
            lambda data: gzip.compress(gzip.decompress(data)[:-8] + bytes(8)),
            "does not match its recorded hash",
        ),
    ],
)
def test_damage_is_refused_by_name(recorded: Path, packed: Path, damage: Any, reason: str) -> None:
    packed.write_bytes(damage(packed.read_bytes()))
    with pytest.raises(GoldenError, match=reason) as caught:
        values(recorded)
    assert str(packed) in str(caught.value)
    (finding,) = verify(GoldenStore(recorded.parent))
    assert finding.damage


def test_a_file_that_holds_far_more_is_not_unpacked(recorded: Path, packed: Path) -> None:
    """The recorded size is read, and one byte."""
    most = 4 * ROWS.nbytes // 5
    data = gzip.compress(bytes(50 * ROWS.nbytes))
    assert len(data) < most
    packed.write_bytes(data)
    with pytest.raises(GoldenError, match=r"holds more than the \d+ bytes that were recorded"):
        values(recorded)


def test_leftovers_of_either_form_are_known(recorded: Path, packed: Path) -> None:
    manifest = GoldenCase(recorded).manifest
    assert leftovers(recorded, manifest) == []
    names = {f"{QUANTITY}.0123456789ab.safetensors{end}" for end in ("", PACKED)}
    for name in names:
        (packed.parent / name).touch()
    assert {Path(path).name for path in leftovers(recorded, manifest)} == names


def test_an_update_that_was_broken_off_is_finished(recorded: Path, packed: Path) -> None:
    root, name = recorded.parent, packed.relative_to(recorded.parent).as_posix()
    data = packed.read_bytes()
    packed.unlink()
    prepare(root, {name: data}, {name: None})
    settle(root)
    assert (values(recorded) == ROWS).all()


def test_the_golden_directory_of_this_project_stays_small() -> None:
    """At most 25 MB in blocks of a file system, as everybody who clones it has it."""
    root = Path(__file__).parents[3] / "golden"
    sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
    assert len(sizes) > 1000
    assert sum(-(-size // 4096) * 4096 for size in sizes) < 25e6
