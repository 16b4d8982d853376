"""The recorder's directory: fresh, refused or overwritten; failures of the disk."""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.dump import DumpReader, Recorder, at, read, recording, tap
from regress.dump import dump_files as files_module
from regress.dump.background_writer import Writer
from regress.dump.dump_files import TEMPORARY, write_atomically
from regress.dump.dump_manifest import MANIFEST
from regress.dump.formats import FORMATS
from regress.errors import DumpError

LOSS = {"loss": True}


def _dump(folder: Path, steps: int = 1, **options: Any) -> None:
    with recording(Recorder(folder, options=LOSS, **options)):
        for step in range(steps):
            with at(step=step):
                tap("loss", loss=float(step))


def test_refuses_a_directory_in_use(tmp_path: Path) -> None:
    _dump(tmp_path)
    with pytest.raises(DumpError, match=r"already holds a dump .*runs must not mix.*ask for overwriting"):
        _dump(tmp_path)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(DumpError, match=r"already holds a dump \(loss/step_000000\.safetensors\)"):
        _dump(tmp_path, format="pt")


def test_overwriting_removes_only_the_dump(tmp_path: Path) -> None:
    _dump(tmp_path, steps=3)
    (tmp_path / "checkpoints").mkdir()
    keep = [
        tmp_path / "notes.txt",
        tmp_path / "loss" / "notes.txt",
        tmp_path / "checkpoints" / "step_000010.pt",
    ]
    for path in keep:
        path.write_text("mine")
    (tmp_path / "loss" / f"{TEMPORARY}1-step_000009.pt").write_text("left by a killed run")
    _dump(tmp_path, steps=1, overwrite=True, format="jsonl")
    assert len(list(DumpReader(tmp_path))) == 1
    left = {path.name for path in tmp_path.rglob("*.*")}
    assert left == {"notes.txt", MANIFEST, "step_000000.jsonl", "step_000010.pt"}
    assert [path.read_text() for path in keep] == ["mine"] * 3


def test_folders_are_known(tmp_path: Path, make_records: Any) -> None:
    with recording(Recorder(tmp_path, options=LOSS)) as recorder:
        recorder.put(make_records()[0], folder="val")
        with pytest.raises(DumpError, match="a dump has no folder 'valid': choose one of trajectory, "):
            recorder.put(make_records()[0], folder="valid")
    assert DumpReader(tmp_path).names() == ["val/step_000003.safetensors"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "pkl"}, "dump format 'pkl' does not exist"),
        ({"options": {"losses": True}}, "did you mean loss"),
        ({"every_n_steps": 0}, "dump_every_n_steps is 0"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(DumpError, match=reason):
        Recorder(tmp_path / "new", **{"options": LOSS, **options})
    assert not (tmp_path / "new").exists()


def test_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DumpError, match=r"cannot be written .*a file stands where a folder is needed"):
            Recorder(folder, options=LOSS)


_READ_ONLY = """
import os, sys
from regress.dump import Recorder
from regress.dump.dump_manifest import Provenance
from regress.errors import DumpError
provenance = Provenance()
if os.getuid() == 0:
    os.setuid(65534)
try:
    Recorder(sys.argv[1], options={"loss": True}, provenance=provenance)
except DumpError as error:
    print(error)
"""


def test_read_only_directory() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o555)
        command = [sys.executable, "-c", _READ_ONLY, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"{folder} cannot be written (Permission denied): choose a dump directory" in done.stdout
        assert list(Path(folder).iterdir()) == []


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free space"), (errno.EROFS, "read-only"), (errno.EIO, "")]
)
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str) -> None:
    room = 2500
    real_write = os.write

    def write(handle: int, data: Any) -> int:
        nonlocal room
        if room < len(data):
            raise OSError(code, os.strerror(code))
        room -= len(data)
        return real_write(handle, data)

    monkeypatch.setattr(files_module.os, "write", write)
    with pytest.raises(DumpError, match=r"step_\d+\.safetensors cannot be written .*" + remedy) as caught:
        _run_slowly(tmp_path, 50)
    assert os.strerror(code) in str(caught.value)
    whole = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert 0 < len(whole) < 49
    assert [read(path).step for path in whole] == list(range(len(whole)))


def _run_slowly(folder: Path, steps: int) -> None:
    with recording(Recorder(folder, options=LOSS)) as recorder:
        for step in range(steps):
            with at(step=step):
                tap("loss", loss=float(step), x=np.zeros(50))
            _settle(recorder)


def _settle(recorder: Recorder) -> None:
    """Wait until the writer is idle, so that the failure shows at the very next tap."""
    writer = recorder._writer
    with writer._changed:
        writer._changed.wait_for(lambda: writer._pending == 0 and not writer._queue)


def test_failure_shows_at_the_next_tap_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, options=LOSS)
    monkeypatch.setattr(files_module.os, "fsync", _fail)
    rule = r"step_000000\.safetensors cannot be written"
    with pytest.raises(DumpError, match=rule), recording(recorder):
        _fail_twice(recorder, rule)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _fail_twice(recorder: Recorder, rule: str) -> None:
    with at(step=0):
        tap("loss", loss=1.0)
    _settle(recorder)
    with at(step=1), pytest.raises(DumpError, match=rule):
        tap("loss", loss=1.0)


def _fail(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_failure_does_not_hide_why_the_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module.os, "fsync", _fail)
    with pytest.raises(ZeroDivisionError) as caught, recording(Recorder(tmp_path, options=LOSS)) as recorder:
        _stop(recorder)
    assert "No space left on device" in caught.value.__notes__[0]


def _stop(recorder: Recorder) -> None:
    with at(step=0):
        tap("loss", loss=1.0)
        with at(micro=0):
            tap("loss", loss=1.0)
        _settle(recorder)
        raise ZeroDivisionError


def test_real_limit_on_file_size(tmp_path: Path) -> None:
    """The kernel itself refuses: no monkeypatch between us and the error."""
    code = (
        "import resource, sys, numpy as np\n"
        "from regress.dump import Recorder, recording, at, tap\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "with recording(Recorder(sys.argv[1], options={'loss': True})):\n"
        "    for step in range(3):\n"
        "        with at(step=step): tap('loss', x=np.zeros(100 * (1 + 5 * step)))\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "a limit on file sizes is in force" in done.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["step_000000.safetensors"]
    assert read(tmp_path / "loss" / "step_000000.safetensors").step == 0


def test_failed_replacement_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomically(path, [b"old"])
    monkeypatch.setattr(files_module.os, "fsync", _fail)
    with pytest.raises(DumpError, match="free space there"):
        write_atomically(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(files_module.os, "write", lambda handle, data: real_write(handle, data[:3]))
    stamp = write_atomically(tmp_path / "x", [b"0123456789", b"ab"])
    assert (tmp_path / "x").read_bytes() == b"0123456789ab"
    assert stamp.size == 12


def test_writer_keeps_to_its_budget(
    tmp_path: Path, make_records: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    real_replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda *args: (gate.wait(10), real_replace(*args))[1])
    record = make_records()[1]
    writer = Writer(FORMATS["safetensors"], budget=int(2.5 * record.nbytes))
    for index in range(2):
        writer.put(tmp_path / f"{index}.safetensors", record)
    third = threading.Thread(target=writer.put, args=(tmp_path / "2.safetensors", record))
    third.start()
    third.join(0.2)
    assert third.is_alive()  # it waits for room
    gate.set()
    third.join(10)
    writer.close()
    assert len(list(tmp_path.iterdir())) == len(writer.stamps) == 3


def test_whatever_breaks_in_the_writer_reaches_the_caller(tmp_path: Path, make_records: Any) -> None:
    def encode(record: Any) -> Any:
        raise RecursionError("surprise")

    writer = Writer(dataclasses.replace(FORMATS["pt"], encode=encode))
    writer.put(tmp_path / "x.pt", make_records()[1])
    with pytest.raises(DumpError, match=r"x\.pt cannot be written as pt: RecursionError\('surprise'\)"):
        writer.close()
    assert list(tmp_path.iterdir()) == []
