"""Locations that a path or a URL names, and refused URLs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from regress.dump import DumpReader, Recorder, read, read_trajectories
from regress.dump.dump_location import children, is_remote, local_path, location
from regress.dump.dump_manifest import Provenance
from regress.errors import DumpError


def test_paths_and_file_urls_are_paths() -> None:
    for path in ("runs/3", "/runs/3", Path("runs/3")):
        assert location(path) == Path(path)
    for url in ("file:///runs/3", "local:///runs/3"):
        assert location(url) == local_path(url) == Path("/runs/3")
        assert not is_remote(url)
    assert is_remote("s3://bucket/runs/3")


@pytest.mark.parametrize("url", ["memory://bucket/a/b.pt", "memory:///bucket/a/b.pt"])
def test_a_url_has_the_parts_of_a_path(memory: Any, url: str) -> None:
    path = location(url)
    assert not isinstance(path, Path)
    assert (path.name, path.stem, path.suffix) == ("b.pt", "b", ".pt")
    assert path.parent.name == "a"
    assert path.parent / "b.pt" == path
    assert (path.parent / "b.pt").path == path.path == "/bucket/a/b.pt"
    assert path.parent.parent.parent == path.parent.parent == location(url[: url.index("/a/")] + "/")
    assert path.absolute() is location(path) is path
    assert str(path) == url


def test_what_lies_in_a_url_folder(memory: Any) -> None:
    folder = location("memory://run")
    assert children(folder) == []
    assert [folder.exists(), folder.is_dir(), folder.is_file()] == [False] * 3
    for name in ("b", "a"):
        (folder / "sub" / name).write_bytes(b"123")
    (sub,) = children(folder)
    assert sub == folder / "sub"
    assert sub.is_dir()
    assert [path.name for path in children(sub)] == ["a", "b"]
    assert [path.is_file() for path in children(sub)] == [True, True]
    assert (sub / "a").is_file()
    assert not (sub / "a").is_dir()
    (sub / "a").unlink()
    assert children(sub) == [sub / "b"]


def test_marks_of_empty_folders_are_no_files(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consoles of stores put an object with the folder's own name into it, which listings tell."""
    found = [
        {"name": "/run/", "type": "file", "size": 0},
        {"name": "/run/sub/", "type": "directory", "size": 0},
    ]
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda self, path, detail: found)
    folder = location("memory://run")
    assert children(folder) == [folder / "sub"]
    assert children(folder)[0].is_dir()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file://host/runs", "file://host/runs names a machine .*give three slashes"),
        (
            "s3://bucket/run",
            r"s3://bucket/run cannot be opened \(Install s3fs .*No module named 's3fs'\): install",
        ),
        (
            "gs://bucket/run",
            r"cannot be opened \(Please install gcsfs .*\): install the package that the protocol gs",
        ),
        (
            "s4://bucket/run",
            r"cannot be opened \(ValueError: Protocol not known: s4\): correct the protocol s4",
        ),
        (
            "memory://",
            "memory:// names no place in the store: add a bucket or a folder, such as memory://run",
        ),
        ("simplecache::memory://run", "chains several file systems, but a dump lies in one: give the URL"),
        (
            "ftp://me:secret@host/run",
            r"ftp://\*\*\*@host/run holds a password or a signature, which manifests and logs would repeat",
        ),
    ],
)
def test_what_a_url_cannot_be(url: str, says: str) -> None:
    for use in (
        lambda: location(url),
        lambda: Recorder(url, options={"loss": True}),
        lambda: DumpReader(url),
        lambda: read(url),
        lambda: read_trajectories(url),
    ):
        with pytest.raises(DumpError, match=says) as caught:
            use()
        assert "secret" not in str(caught.value)


def test_a_url_that_pathlib_took_a_slash_of() -> None:
    with pytest.raises(DumpError, match=r"s3:/bucket/run was a URL before .*: give the URL as text"):
        Recorder(Path("s3://bucket/run"), options={"loss": True}, provenance=Provenance())
    assert location(Path("c:/run")) == Path("c:/run")


def test_folders_of_this_machine_cost_no_fsspec() -> None:
    code = (
        "import json, sys; from regress.dump.dump_reader import DumpReader; "
        "from regress.dump.dump_location import location; "
        "location('runs'); location('file:///runs'); print(json.dumps('fsspec' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
