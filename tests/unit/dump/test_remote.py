"""A dump in a store is that of a folder, byte for byte, and guarded by the same rules."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from regress.cli import main
from regress.dump import (
    DumpReader,
    Recorder,
    at,
    read,
    read_trajectories,
    recording,
    tap,
    tap_trajectories,
)
from regress.dump.bitwise_difference import compare_bitwise
from regress.dump.dump_files import TEMPORARY
from regress.dump.dump_inspection import directory_rows, render
from regress.dump.dump_manifest import MANIFEST, Provenance
from regress.dump.formats import FORMATS
from regress.errors import DumpError, RankError

URL = "memory://runs/one"
TYPES = ("loss", "forward_data", "param", "gradient")
ALL = dict.fromkeys((*TYPES, "trajectory"), True)

Values = dict[tuple[str, int, int | None], list[float]]


def _record(place: str | Path, values: Values, **options: Any) -> None:
    with recording(Recorder(place, options=ALL, **options)):
        for (type, step, micro), numbers in values.items():
            with at(step=step, rank=0, micro=micro):
                tap(type, x=np.array(numbers), y=np.array(numbers, np.float32), meta={"n": len(numbers)})


SMALL: Values = {("loss", step, micro): [step, 0.1] for step in range(3) for micro in range(2)}


@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(TYPES), st.integers(0, 3), st.none() | st.integers(0, 2)),
        st.lists(st.floats(width=32), max_size=5),
        max_size=8,
    ),
    st.sampled_from(sorted(FORMATS)),
)
def test_the_same_bytes_as_in_a_folder(values: Values, format: str) -> None:
    MemoryFileSystem.store.clear()
    provenance = Provenance()
    with TemporaryDirectory() as name:
        folder = Path(name)
        _record(folder, values, format=format, provenance=provenance)
        _record(URL, values, format=format, provenance=provenance)
        here = {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
        there = {f.removeprefix("/runs/one/"): m.getvalue() for f, m in list(MemoryFileSystem.store.items())}
        assert there == here
        if values:
            assert compare_bitwise(name, URL).differences == []
    assert DumpReader(URL).names() == [path.removeprefix("/runs/one/") for path in _ordered()]
    MemoryFileSystem.store.clear()


def _ordered() -> list[str]:
    order = {path: index for index, path in enumerate(DumpReader(URL).names())}
    found = [path for path in MemoryFileSystem.store if not path.endswith(MANIFEST)]
    return sorted(found, key=lambda path: order[path.removeprefix("/runs/one/")])


def test_refused_mixing_and_overwriting(memory: dict[str, Any]) -> None:
    _record(URL, SMALL)
    MemoryFileSystem().pipe_file("/runs/one/notes.txt", b"mine")
    with pytest.raises(DumpError, match=rf"{URL} already holds a dump \(loss/step_000000_rank0_micro0\.saf"):
        _record(URL, SMALL)
    MemoryFileSystem().rm_file(f"/runs/one/{MANIFEST}")
    with pytest.raises(DumpError, match=r"already holds a dump .*runs must not mix"):
        _record(URL, SMALL)
    _record(URL, {("param", 0, None): [1.0]}, overwrite=True, format="pt")
    assert DumpReader(URL).names() == ["param/step_000000_rank0.pt"]
    assert sorted(memory) == [
        f"/runs/one/{name}" for name in (MANIFEST, "notes.txt", "param/step_000000_rank0.pt")
    ]


def test_an_interrupted_run_stays_one(memory: dict[str, Any], make_trajectory: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        _interrupted(make_trajectory)
    assert sorted(memory) == [f"/runs/one/trajectory/step_00000{n}.safetensors" for n in range(2)]
    with pytest.raises(DumpError, match=f"{URL} is not a complete dump: it has no {MANIFEST}"):
        DumpReader(URL)
    with pytest.raises(DumpError, match=f"was interrupted: record again, or give {URL}/trajectory"):
        read_trajectories(URL)
    assert list(read_trajectories(f"{URL}/trajectory")) == [0, 1]
    with pytest.raises(DumpError, match="memory://runs/none does not exist: give the folder of a dump"):
        DumpReader("memory://runs/none")


def _interrupted(make_trajectory: Any) -> None:
    with recording(Recorder(URL, options=ALL)):
        for step in range(3):
            with at(step=step):
                if step == 2:
                    raise ZeroDivisionError
                tap_trajectories([make_trajectory(0)])


def test_each_way_to_name_trajectories(brittle: Any, make_trajectory: Any, format_name: str) -> None:
    url = "brittle://runs/one"
    with recording(Recorder(url, options=ALL, format=format_name)):
        for step in range(3):
            with at(step=step):
                tap_trajectories([make_trajectory(0, tokens=[1, 2, 3, step])], meta={"k": step})
    file = f"{url}/trajectory/step_000001.{format_name}"
    for path, steps in ((url, 3), (f"{url}/trajectory/", 3), (file, 1)):
        brittle.expect()
        found = read_trajectories(path, format_name)
        assert len(found) == steps
        assert str(found[1].path) == file
        assert found[1].trajectories[0].tokens == [1, 2, 3, 1]
        assert found[1].meta == {"k": 1}
        assert _downloads(brittle) == {1}
    assert read(file).step == 1
    for name in [name for name in brittle.store if name.endswith(MANIFEST)]:
        del brittle.store[name]
    assert list(read_trajectories(f"{url}/trajectory")) == [0, 1, 2]
    with pytest.raises(DumpError, match=rf"{url}/trajectory/step_000009\.pt does not exist"):
        read_trajectories(f"{url}/trajectory/step_000009.pt")


def _downloads(brittle: Any) -> set[int]:
    """Return the download counts that occurred among the files."""
    return set(Counter(path for operation, path in brittle.calls if operation == "cat_file").values())


def test_each_file_goes_up_once_with_the_manifest_last_and_comes_down_once(brittle: Any) -> None:
    url = "brittle://runs/one"
    _record(url, SMALL)
    uploads = [path for operation, path in brittle.calls if operation == "pipe_file"]
    assert len(uploads) == len({*uploads}) == len(SMALL) + 2
    assert uploads[0].endswith(f"{TEMPORARY}probe")
    assert uploads[-1] == f"/runs/one/{MANIFEST}"
    assert len(brittle.store) == len(SMALL) + 1
    brittle.expect()
    assert len(list(DumpReader(url))) == len(SMALL)
    assert _downloads(brittle) == {1}
    assert len([path for operation, path in brittle.calls if operation == "ls"]) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "exchange", "remove", "add", "manifest"])
def test_damage_is_refused(memory: dict[str, Any], damage: str, format_name: str) -> None:
    _record(URL, SMALL, format=format_name)
    store = MemoryFileSystem()
    first, second = (f"/runs/one/loss/step_000000_rank0_micro{n}.{format_name}" for n in range(2))
    data = bytearray(memory[first].getvalue())
    if damage == "flip":
        data[len(data) // 2] ^= 8
    rule = "do not match the size and hash in manifest.json; it was cut off or changed"
    if damage == "manifest":
        first, data, rule = (
            f"/runs/one/{MANIFEST}",
            memory[f"/runs/one/{MANIFEST}"].getvalue()[:-9],
            "is damaged",
        )
    elif damage == "add":
        first, rule = first.replace("000000", "000007"), "has additional 1 record file"
    elif damage == "remove":
        store.rm_file(first)
        rule = "lacks 1 record file"
    if damage != "remove":
        data = data[:-5] if damage == "cut" else memory[second].getvalue() if damage == "exchange" else data
        store.pipe_file(first, bytes(data))
    with pytest.raises(DumpError, match=rule) as caught:
        list(DumpReader(URL))
    assert str(caught.value).startswith(URL)


def test_several_threads_record_into_one_store(memory: dict[str, Any]) -> None:
    ranks = 4
    failures = _in_threads(ranks, lambda rank, gather: _rank(URL, rank, gather))
    assert failures == [None] * ranks
    reader = DumpReader(URL)
    assert {record.rank for record in reader} == {*range(ranks)}
    assert {float(record.tensors["loss"]) for record in reader} == {
        10.0 * r + s for r in range(ranks) for s in range(3)
    }
    failures = _in_threads(ranks, lambda rank, gather: _rank(URL, rank, gather))
    assert all("already holds a dump" in str(failure) for failure in failures)


def _rank(url: str, rank: int, gather: Callable[[Any], list[Any]]) -> None:
    with recording(Recorder(url, options=ALL, rank=rank, gather=gather)):
        for step in range(3):
            with at(step=step, rank=rank):
                tap("loss", loss=10.0 * rank + step)


def _in_threads(
    ranks: int, work: Callable[[int, Callable[[Any], list[Any]]], None]
) -> list[DumpError | None]:
    barrier = threading.Barrier(ranks, timeout=60)
    board: list[Any] = [None] * ranks
    failures: list[DumpError | None] = [None] * ranks

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            board[rank] = value
            barrier.wait()
            found = list(board)
            barrier.wait()
            return found

        try:
            work(rank, gather)
        except DumpError as error:
            failures[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with a store that processes share."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import shelf

    shelf.register()
    return shelf


@pytest.mark.parametrize("protocol", ["shelf", "file"])
def test_ranks_of_a_pool_record_into_one_store(shelf: Any, tmp_path: Path, protocol: str) -> None:
    from regress.replay.replay_pool import shared_pool

    url, pool = f"{protocol}://{tmp_path}/run", shared_pool()
    pool.run(shelf.record, {"url": url, "steps": 2}, 3)
    whole = DumpReader(url)
    assert {float(record.tensors["loss"]) for record in whole} == {0, 1, 10, 11, 20, 21}
    assert compare_bitwise(url, tmp_path / "run").differences == []
    with pytest.raises(RankError):
        pool.run(shelf.record, {"url": f"{url}-2", "steps": 2, "fails": 1}, 3)
    with pytest.raises(DumpError, match="is not a complete dump"):
        DumpReader(f"{url}-2")
    assert not list(tmp_path.rglob(f"{TEMPORARY}*"))


def test_commands(memory: dict[str, Any], tmp_path: Path) -> None:
    provenance = Provenance()
    _record(tmp_path / "here", SMALL, provenance=provenance)
    _record(URL, SMALL, provenance=provenance)
    run = CliRunner().invoke
    same = run(main, ["dump", "diff", str(tmp_path / "here"), URL])
    assert (same.exit_code, same.stdout) == (0, "bit-identical: 6 records, 12 tensors\n")
    same = run(main, ["dump", "diff", URL, (tmp_path / "here").as_uri()])
    assert same.exit_code == 0
    _record(URL, {**SMALL, ("loss", 1, 1): [1.0, 0.2]}, overwrite=True)
    other = run(main, ["dump", "diff", str(tmp_path / "here"), URL])
    assert other.exit_code == 1
    assert other.stdout.startswith("loss/step_000001_rank0_micro1.safetensors: x: 1 of 2 elements differ")
    missing = run(main, ["dump", "diff", URL, "s3://bucket/run"])
    assert missing.exit_code == 2
    assert missing.stderr.splitlines()[-1].startswith("error: s3://bucket/run cannot be opened (Install s3fs")
    shown = run(main, ["dump", "show", URL])
    assert shown.exit_code == 0
    assert "complete: 6 safetensors files as listed in manifest.json" in shown.output
    assert run(main, ["dump", "show", f"{URL}/loss/step_000000_rank0_micro0.safetensors"]).exit_code == 0
    assert run(main, ["dump", "show", "memory://none"]).exit_code == 2


def test_tables_are_those_of_a_folder(memory: dict[str, Any], tmp_path: Path) -> None:
    provenance = Provenance()
    for place in (tmp_path, URL):
        _record(place, {**SMALL, ("param", 2, None): [1.0, 2.0]}, provenance=provenance)
    assert directory_rows(URL) == directory_rows(tmp_path)
    assert directory_rows(f"{URL}/loss") == directory_rows(tmp_path / "loss")
    assert _text(f"{URL}/loss") == _text(tmp_path / "loss")


def _text(path: str | Path) -> str:
    console = Console(file=StringIO(), width=200)
    with console.capture() as capture:
        console.print(render(path))
    return capture.get()
