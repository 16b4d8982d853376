"""Files are whole or not there, several change all or none, and a process killed at any operation leaves old or new."""

from __future__ import annotations

import ast
import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regress import durable_files
from regress.durable_files import Batch, Stamp, finish, locked, unfinished
from tests.unit.killed import killed_at

PACKAGE = Path(durable_files.__file__).parent


def at_every_operation(folder: Path, work: Callable[[Path], object], check: Callable[[Path], None]) -> None:
    """Do the work in a new folder each time, killed at the first, second, ... operation, until it comes to its end."""
    for number in range(500):
        place = folder / str(number)
        place.mkdir()
        old(place)
        alive = not killed_at(number, lambda: work(place))  # noqa: B023 # called before the next one
        check(place)
        if alive:
            assert number > 1
            return
    raise AssertionError("it does not end")


def old(root: Path) -> None:
    (root / "a").write_bytes(b"old a")
    (root / "below").mkdir()
    (root / "below" / "b").write_bytes(b"old b")
    (root / "gone").mkdir()
    (root / "gone" / "c").write_bytes(b"old c")


OLD = {"a": b"old a", "below/b": b"old b", "gone/c": b"old c"}
NEW = {"a": b"new a", "below/b": b"new b", "far/below/d": b"new d"}


def seen(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.relative_to(root).parts[0].startswith(durable_files.TEMPORARY)
    }


def update(root: Path) -> Batch:
    with locked(root):
        finish(root)
        batch = Batch(root)
        batch.remove(root / "gone" / "c")
        for name, data in NEW.items():
            batch.write(root / name, [data])
        batch.commit()
    return batch


def test_a_write_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    def check(root: Path) -> None:
        assert (root / "a").read_bytes() in (b"old a", b"new a")
        durable_files.write(root / "a", [b"new", b" a"])
        assert (root / "a").read_bytes() == b"new a"

    at_every_operation(tmp_path, lambda root: durable_files.write(root / "a", [b"new", b" a"]), check)


def test_a_batch_that_is_killed_leaves_all_old_files_or_all_new_ones(tmp_path: Path) -> None:
    def check(root: Path) -> None:
        finish(root)
        assert seen(root) in (OLD, NEW)
        assert not unfinished(root)
        update(root)
        assert seen(root) == NEW
        assert not (root / "gone").exists()

    at_every_operation(tmp_path, update, check)


def test_a_recovery_that_is_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    decided = tmp_path / "decided"
    decided.mkdir()
    old(decided)
    moment = 0
    while not (decided / durable_files.UPDATE).exists():  # killed as soon as it is decided
        assert killed_at(moment, lambda: update(decided))
        moment += 1
    for number in range(500):
        root = shutil.copytree(decided, tmp_path / str(number), symlinks=True)
        alive = not killed_at(number, lambda: finish(root))  # noqa: B023 # called before the next one
        finish(root)
        assert seen(root) == NEW
        assert not unfinished(root)
        if alive:
            return
    raise AssertionError("it does not end")


def test_a_folder_that_is_published_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        working = root / ".partial-below"
        working.mkdir()
        (working / "b").write_bytes(b"new b")
        (working / "whole").write_bytes(b"")
        durable_files.publish(working, root / "below")

    def check(root: Path) -> None:
        durable_files.recover(root, "below".__eq__, lambda folder: (folder / "b").is_file())
        assert (root / "below" / "b").read_bytes() == (
            b"new b" if (root / "below" / "whole").exists() else b"old b"
        )
        assert sorted(path.name for path in root.iterdir()) == ["a", "below", "gone"]

    at_every_operation(tmp_path, work, check)


def test_a_folder_that_is_discarded_is_whole_or_gone(tmp_path: Path) -> None:
    def check(root: Path) -> None:
        durable_files.recover(root, "below".__eq__, Path.is_dir)
        assert seen(root) in (OLD, {"a": b"old a", "gone/c": b"old c"})

    at_every_operation(tmp_path, lambda root: durable_files.discard(root / "below"), check)


def test_a_copy_that_is_killed_is_whole_or_not_there(tmp_path: Path) -> None:
    def check(root: Path) -> None:
        if (root / "copy").exists():
            assert (root / "copy" / "b").read_bytes() == b"old b"
        durable_files.recover(root, lambda name: name.endswith("-copy"), Path.is_dir)
        assert sorted(path.name for path in root.iterdir() if path.name != "copy") == ["a", "below", "gone"]

    at_every_operation(tmp_path, lambda root: durable_files.copy(root / "below", root / "copy"), check)


def test_a_batch_tells_what_it_wrote_and_leaves_equal_files_alone(tmp_path: Path) -> None:
    old(tmp_path)
    (tmp_path / "a").write_bytes(b"new a")
    (tmp_path / "below" / "b").chmod(0o640)
    before = (tmp_path / "a").stat()
    assert update(tmp_path).written == [tmp_path / "below" / "b", tmp_path / "far" / "below" / "d"]
    after = (tmp_path / "a").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert stat.S_IMODE((tmp_path / "below" / "b").stat().st_mode) == 0o640
    assert update(tmp_path).written == []


def test_a_batch_takes_over_another_and_the_last_change_counts(tmp_path: Path) -> None:
    first, second = Batch(tmp_path), Batch(tmp_path)
    assert first.write(tmp_path / "a", [b"1"]) == Stamp.of(b"1")
    first.write(tmp_path / "b", [b"1"])
    second.remove(tmp_path / "a")
    second.write(tmp_path / "b", [b"2"])
    first.add(second)
    first.commit()
    assert seen(tmp_path) == {"b": b"2"}


@pytest.mark.parametrize(
    ("target", "code"),
    [("below", errno.EISDIR), ("a/d", errno.ENOTDIR), ("link/d", errno.EXDEV)],
    ids=["folder", "below-a-file", "outside"],
)
def test_a_blocked_file_refuses_the_whole_batch(tmp_path: Path, target: str, code: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    old(root)
    (root / "link").symlink_to(tmp_path)
    batch = Batch(root)
    batch.write(root / "a", [b"new a"])
    batch.write(root / target, [b"new"])
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        batch.commit()
    assert caught.value.filename == str(root / target)
    assert seen(root) == OLD
    assert not unfinished(root)


@pytest.mark.parametrize("rows", ['[["../out", "0"]]', '[["a", "../a"]]', "[1]", "no"])
def test_a_list_that_no_batch_wrote_moves_nothing(tmp_path: Path, rows: str) -> None:
    root = tmp_path / "root"
    (root / durable_files.UPDATE).mkdir(parents=True)
    (root / durable_files.UPDATE / "0").write_bytes(b"bad")
    (root / durable_files.UPDATE / "files.json").write_text(rows)
    with pytest.raises(OSError, match=r"it is not a list of an update.*files\.json"):
        finish(root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


def test_a_named_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a device, a named pipe or a socket"):
        durable_files.write(tmp_path / "pipe", [b"data"])
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_permissions_are_kept_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o600)
    durable_files.write(path, [b"new"], keep_mode=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_process_waits_for_the_lock_or_is_told(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from regress.durable_files import locked\n"
        "with locked(Path(sys.argv[1]), wait=False): pass"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with locked(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "BlockingIOError" in done.stderr
    assert subprocess.run(command, timeout=60).returncode == 0


ELSEWHERE = {
    "golden": "a transaction of its own, with a journal and undo",
    "replay": "a folder that is locked as long as its process lives, and an export into a folder of the user's",
    "doctor/checkpoint_repair.py": "what stands in the way is moved aside whole, and back",
}


def test_nobody_else_writes_under_a_temporary_name_or_locks_a_file(subtests: pytest.Subtests) -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name == "durable_files.py" or any(
            name == room or name.startswith(f"{room}/") for room in ELSEWHERE
        ):
            continue
        with subtests.test(name):
            assert not list(own_ways(ast.parse(path.read_text())))


def own_ways(tree: ast.Module) -> Any:
    """Yield the lines that rename a path, make a temporary file, or lock one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & {"fcntl", "mkstemp", "NamedTemporaryFile"}:
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, owner = node.func.attr, getattr(node.func.value, "id", None)
            renamed = owner == "os" or (len(node.args) == 1 and not node.keywords)
            if called in ("fsync", "mkstemp") or (called in ("rename", "replace", "renames") and renamed):
                yield node.lineno


def test_it_imports_nothing_of_ours() -> None:
    nodes = ast.walk(ast.parse(Path(durable_files.__file__).read_text()))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if module is None or module.startswith("regress")]


def test_half_a_file_of_a_writer_that_is_gone_goes(tmp_path: Path) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    left = [
        tmp_path / f".partial-{int(gone.stdout)}-state.json",  # goes
        tmp_path / f".partial-{os.getpid()}-state.json",  # its writer runs
        tmp_path / f".partial-{int(gone.stdout)}-notes.json",  # somebody else's
    ]
    for path in left:
        path.write_text("{")
    durable_files.recover(tmp_path, "state.json".__eq__, Path.is_dir)
    assert [path.exists() for path in left] == [False, True, True]
