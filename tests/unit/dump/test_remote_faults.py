"""A store that fails at any moment: one sentence, and nothing that claims to be complete and is not."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest

from regress.dump import DumpReader, Recorder, at, read_trajectories, recording, tap_trajectories
from regress.dump.bitwise_difference import compare_bitwise
from regress.dump.dump_files import TEMPORARY, remove_tree
from regress.dump.dump_inspection import render
from regress.dump.dump_location import location
from regress.dump.dump_manifest import MANIFEST
from regress.dump.object_store import RemotePath
from regress.errors import DumpError

URL = "brittle://runs/one"
STEPS = 2


class NoCredentialsError(Exception):
    """As those of the stores' own libraries, it is no OSError."""


def _record(make_trajectory: Any, overwrite: bool = False) -> None:
    with recording(Recorder(URL, options={"trajectory": True}, overwrite=overwrite)):
        for step in range(STEPS):
            with at(step=step):
                tap_trajectories([make_trajectory(0, tokens=[1, 2, 3, step])])


@pytest.mark.parametrize("moment", ["before", "half", "after"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_writing_fails_at_each_call(brittle: Any, make_trajectory: Any, moment: str, overwrite: bool) -> None:
    def start(fails_at: int | None = None) -> None:
        brittle.fresh()
        if overwrite:
            _record(make_trajectory)
        brittle.expect(fails_at, ConnectionResetError(errno.ECONNRESET, "gone"), moment)

    start()
    _record(make_trajectory, overwrite)
    calls = list(brittle.calls)
    assert len(calls) > 2 * STEPS
    for index, (operation, path) in enumerate(calls):
        start(index)
        with pytest.raises(DumpError, match=r"^brittle://runs/one") as caught:
            _record(make_trajectory, overwrite)
        verb = {"ls": "listed", "info": "read", "rm_file": "removed", "pipe_file": "written"}[operation]
        assert str(caught.value) == (
            f"brittle:/{path} cannot be {verb} (ConnectionResetError: [Errno {errno.ECONNRESET}] gone): "
            "see that the store can be reached and accepts your credentials, then try again"
        )
        first = calls.index(("pipe_file", f"/runs/one/{TEMPORARY}probe"))
        earlier = overwrite and not any(op == "rm_file" for op, _ in calls[: index + (moment == "after")])
        last = moment == "after" and path.endswith(MANIFEST) and operation == "pipe_file"
        if earlier or last:  # the old dump as it was, or the new one as it should be
            assert len(list(DumpReader(URL))) == STEPS
        else:
            with pytest.raises(DumpError, match=r"not a complete dump|does not exist|is damaged"):
                DumpReader(URL)
        left = [name for name in brittle.store if TEMPORARY in name]
        assert len(left) <= (index in (first, first + 1))  # the probe itself, if it could not be removed


def test_a_half_file_is_refused(brittle: Any, make_trajectory: Any) -> None:
    _record(make_trajectory)
    index = brittle.calls.index(("pipe_file", "/runs/one/trajectory/step_000001.safetensors"))
    brittle.fresh(index, TimeoutError("too late"), "half")
    with pytest.raises(
        DumpError, match=r"step_000001\.safetensors cannot be written \(TimeoutError: too late\)"
    ):
        _record(make_trajectory)
    brittle.expect()
    with pytest.raises(DumpError, match=r"step_000001\.safetensors is not an intact safetensors record"):
        read_trajectories(f"{URL}/trajectory")


@pytest.mark.parametrize("use", ["reader", "trajectories", "folder", "file", "diff", "show"])
def test_reading_fails_at_each_call(brittle: Any, make_trajectory: Any, use: str) -> None:
    uses = {
        "reader": lambda: list(DumpReader(URL)),
        "trajectories": lambda: read_trajectories(URL),
        "folder": lambda: read_trajectories(f"{URL}/trajectory"),
        "file": lambda: read_trajectories(f"{URL}/trajectory/step_000000.safetensors"),
        "diff": lambda: compare_bitwise(URL, URL),
        "show": lambda: render(f"{URL}/trajectory/step_000000.safetensors"),
    }
    _record(make_trajectory)
    brittle.expect()
    uses[use]()
    count = len(brittle.calls)
    assert count > 1
    for index in range(count):
        brittle.expect(index, NoCredentialsError("Unable to locate credentials"))
        with pytest.raises(
            DumpError, match=r"^brittle://runs/one.* cannot be (read|listed) \(NoCredentialsError: U"
        ):
            uses[use]()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            PermissionError(errno.EACCES, "Access Denied"),
            "give this process credentials that may do so, or choose",
        ),
        (FileNotFoundError("bucket"), "there is no such bucket or folder; create it, or correct the URL"),
        (FileExistsError("run"), "a file stands where a folder is needed"),
        (NotImplementedError(), "its file system cannot do this; choose another store"),
        (
            NoCredentialsError("none"),
            "see that the store can be reached and accepts your credentials, then try again",
        ),
    ],
)
def test_what_helps(brittle: Any, error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(brittle, "pipe_file", refuse)
    with pytest.raises(DumpError) as caught:
        Recorder(URL, options={"loss": True})
    assert str(caught.value).startswith(f"{URL}/{TEMPORARY}probe cannot be written ({type(error).__name__}: ")
    assert says in str(caught.value)
    assert brittle.store == {}


@pytest.mark.parametrize(
    ("url", "made"),
    [
        ("brittle://bucket", []),
        ("brittle://bucket/run", ["/bucket/run"]),
        ("brittle://bucket/runs/one", ["/bucket/runs/one", "/bucket/runs"]),
    ],
)
def test_buckets_are_never_made(
    brittle: Any, monkeypatch: pytest.MonkeyPatch, url: str, made: list[str]
) -> None:
    """A misspelled bucket is an error; folders below are made where a store has any."""
    asked = []

    def refuse(self: Any, path: str, *args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError(path)

    def refuse_folder(self: Any, path: str, create_parents: bool) -> None:
        asked.append(path)
        assert not create_parents
        raise FileNotFoundError(path)

    monkeypatch.setattr(brittle, "pipe_file", refuse)
    monkeypatch.setattr(brittle, "mkdir", refuse_folder)
    with pytest.raises(DumpError, match="there is no such bucket or folder"):
        Recorder(url, options={"loss": True})
    assert asked == made


def test_what_cannot_be_cleared_away_is_warned_of(brittle: Any, make_trajectory: Any) -> None:
    _record(make_trajectory)
    brittle.expect(0, PermissionError(errno.EACCES, "Access Denied"))
    with pytest.warns(UserWarning, match="brittle://runs/one cannot be removed"):
        remove_tree(location(URL))
    brittle.expect()
    remove_tree(location(URL))
    assert brittle.store == {}
    remove_tree(location(URL))


def test_a_store_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation ends by itself, and names the variable that gives a slow store more time."""
    asked = threading.Event()
    place = location("memory://silent/run")
    assert isinstance(place, RemotePath)
    for method in ("info", "ls", "cat_file", "pipe_file", "rm_file", "rm"):
        monkeypatch.setattr(type(place.files), method, lambda *_, **__: asked.wait())
    monkeypatch.setenv("REGRESS_STORE_TIMEOUT", "0.05")
    operations = {
        "read": lambda: place.exists(),
        "listed": lambda: [*place.iterdir()],
        "written": lambda: place.write_bytes(b"x"),
        "removed": lambda: place.unlink(),
    }
    for verb, operation in operations.items():
        with pytest.raises(
            DumpError, match=rf"cannot be {verb} \(TimeoutError: no answer within .* s\)"
        ) as caught:
            operation()
        assert "REGRESS_STORE_TIMEOUT" in str(caught.value)
    asked.set()
    monkeypatch.setenv("REGRESS_STORE_TIMEOUT", "soon")
    with pytest.raises(DumpError, match="REGRESS_STORE_TIMEOUT='soon' is not a number of seconds"):
        place.exists()
