"""Files that pruning removes, and above all those that it leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from regress.errors import GoldenError
from regress.golden import GoldenStore
from regress.golden.golden_verification import prunable, prune


@pytest.fixture
def store(recorded: Path) -> GoldenStore:
    return GoldenStore(recorded.parent)


@pytest.fixture
def orphans(tmp_path: Path) -> Path:
    return tmp_path / "orphans"


def stored(store: GoldenStore, name: str) -> Path:
    path = store.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def listed(orphans: Path, *names: object) -> None:
    orphans.write_text(json.dumps(names))


def test_nothing_is_touched_where_nothing_is_left(
    store: GoldenStore, orphans: Path, content: Any, make_inputs: Any
) -> None:
    make_inputs(store.root / "young")
    stored(store, "checks/a/x.safetensors")
    before = content(store.root)
    assert prunable(store, orphans) == []
    assert prune(store, orphans) == []
    assert content(store.root) == before
    assert prune(GoldenStore(store.root / "none"), orphans) == []


def test_leftovers(store: GoldenStore, orphans: Path, content: Any) -> None:
    before = content(store.root)
    left = [
        stored(store, name)
        for name in (
            "tiny/.partial-7-manifest.json",
            "tiny/truth/step_000001/.partial-7-x.safetensors",
            "tiny/truth/step_000001/loss.safetensors",
            "checks/a/.partial-7-x.safetensors",
        )
    ]
    mine = stored(store, "tiny/truth/step_000001/notes.txt")
    assert sorted(prunable(store, orphans)) == sorted(left)
    assert sorted(prune(store, orphans)) == sorted(left)
    assert content(store.root) == before | {mine.relative_to(store.root).as_posix(): b"x"}


def test_truth_that_lost_its_manifest_is_left_alone(store: GoldenStore, orphans: Path, content: Any) -> None:
    (store.root / "tiny" / "manifest.json").unlink()
    before = content(store.root)
    assert prune(store, orphans) == []
    assert content(store.root) == before


def test_a_damaged_manifest_stops_pruning(store: GoldenStore, orphans: Path, content: Any) -> None:
    stored(store, "tiny/truth/step_000001/loss.safetensors")
    (store.root / "tiny" / "manifest.json").write_text("{}")
    before = content(store.root)
    with pytest.raises(GoldenError, match=r"manifest\.json is damaged"):
        prune(store, orphans)
    assert content(store.root) == before


def test_orphans_written_since_the_list_stay(store: GoldenStore, orphans: Path) -> None:
    old, new = (stored(store, f"checks/a/{name}.safetensors") for name in ("old", "new"))
    listed(orphans, "checks/a/old.safetensors", "checks/a/new.safetensors", "checks/a/gone.safetensors")
    time = orphans.stat().st_mtime
    os.utime(old, (time - 9, time - 9))
    os.utime(new, (time + 9, time + 9))
    assert prune(store, orphans) == [old]
    assert new.exists()


@pytest.mark.parametrize(
    "names",
    [
        ["../x.safetensors"],
        ["checks/../tiny/manifest.json"],
        ["checks/../tiny/optimizer.safetensors"],
        ["tiny/optimizer.safetensors"],
        ["/etc/x.safetensors"],
        ["checks"],
        ["checks/x.json"],
        ["checks/.x.safetensors"],
        [3],
        [None],
    ],
)
def test_a_list_that_names_anything_else_is_refused(
    store: GoldenStore, orphans: Path, names: Any, content: Any
) -> None:
    before = content(store.root)
    listed(orphans, "checks/a/x.safetensors", *names)
    with pytest.raises(
        GoldenError, match="orphans is not a list of stored checks: run pytest without -k or paths again"
    ):
        prune(store, orphans)
    assert content(store.root) == before


@pytest.mark.parametrize("text", ["", "{", "{}", "3", "[" * 100_000, "\udcff"])
def test_a_damaged_list(store: GoldenStore, orphans: Path, text: str) -> None:
    orphans.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(GoldenError, match=r"orphans (cannot be read|is not a list)"):
        prune(store, orphans)
