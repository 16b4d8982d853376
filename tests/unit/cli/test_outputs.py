"""Files that commands are asked for: no special file is replaced, links are followed, ``-`` is standard output."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest

from regress.cli import main
from tests.unit.cli.conftest import Case, invoke, sentence_of, succeeded

SECRET = "hunter2"


def compare(case: Case, *options: str) -> tuple[str, ...]:
    dump = str(case.run / "debug_dump")
    return ("compare", dump, dump, *options)


def is_report(text: str | bytes) -> bool:
    return bool(json.loads(text)["title"])


def test_minus_is_standard_output_alone(case: Case) -> None:
    result = succeeded(invoke(*compare(case, "--json", "-")))
    assert is_report(result.stdout)
    assert "within tolerance" in result.stderr
    assert not Path("-").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("report", "RUN", "--format", "json", "--output", "-"),
        ("report", "RUN", "--output", "/dev/stdout", "--format", "json"),
        ("doctor", "RUN", "--output", "-"),
    ],
)
def test_every_command_writes_to_standard_output(case: Case, command: tuple[str, ...]) -> None:
    result = invoke(*(str(case.run) if word == "RUN" else word for word in command))
    assert result.exit_code in (0, 1)
    assert json.loads(result.stdout)
    assert not Path("-").exists()


def test_the_standard_output_of_a_process_stays_what_it_is(case: Case) -> None:
    with Path("out.txt").open("a+b") as out:
        out.write(b"before\n")
        out.flush()
        words = [sys.executable, "-m", "regress", *compare(case, "--json", "/dev/stdout")]
        subprocess.run(words, stdout=out, stderr=subprocess.DEVNULL, check=True)
    assert stat.S_ISLNK(Path("/dev/stdout").lstat().st_mode)
    first, _, rest = Path("out.txt").read_text().partition("\n")
    assert first == "before"
    assert is_report(rest)


def test_an_open_descriptor_is_written_to(case: Case) -> None:
    with Path("out.txt").open("a+b") as out:
        succeeded(invoke(*compare(case, "--json", f"/dev/fd/{out.fileno()}")))
    assert is_report(Path("out.txt").read_bytes())


def test_a_named_pipe_is_written_to(case: Case) -> None:
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()), daemon=True)
    reader.start()
    succeeded(invoke(*compare(case, "--json", "pipe")))
    reader.join(60)
    assert is_report(read[0])
    assert stat.S_ISFIFO(Path("pipe").lstat().st_mode)


def test_a_named_pipe_that_nobody_reads_and_a_socket_are_refused(case: Case) -> None:
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, kind in (("pipe", stat.S_ISFIFO), ("socket", stat.S_ISSOCK)):
            result = invoke(*compare(case, "--json", name))
            assert result.exit_code == 2
            assert (
                f"error: {name} cannot be written (No such device or address): it is a socket, or"
                in result.stderr
            )
            assert kind(Path(name).lstat().st_mode)


def test_a_device_is_written_to(case: Case) -> None:
    Path("null").symlink_to("/dev/null")
    before = Path("/dev/null").stat()
    succeeded(invoke(*compare(case, "--json", "/dev/null")))
    succeeded(invoke(*compare(case, "--json", "null")))
    full = invoke(*compare(case, "--json", "/dev/full"))
    assert full.exit_code == 2
    assert "/dev/full cannot be written (No space left on device)" in full.stderr
    assert Path("/dev/null").stat().st_ino == before.st_ino
    assert Path("null").is_symlink()


def test_links_are_followed(case: Case) -> None:
    Path("target.json").write_text("old")
    Path("link").symlink_to("target.json")
    Path("dangling").symlink_to("new.json")
    Path("circle").symlink_to("circle")
    for name in ("link", "dangling"):
        succeeded(invoke(*compare(case, "--json", name)))
        assert Path(name).is_symlink()
    assert is_report(Path("target.json").read_text())
    assert is_report(Path("new.json").read_text())
    refused = invoke(*compare(case, "--json", "circle"))
    assert refused.exit_code == 2
    assert "circle cannot be written" in refused.stderr


def test_the_files_of_a_folder_are_written_in_the_same_way(case: Case) -> None:
    Path("out").mkdir()
    Path("out/report.txt").symlink_to("/dev/null")
    Path("out/report.json").symlink_to("kept.json")
    succeeded(invoke(*compare(case, "--report", "out")))
    assert Path("out/report.txt").readlink() == Path("/dev/null")
    assert is_report(Path("out/kept.json").read_text())


def test_a_regular_file_is_replaced_as_a_whole(case: Case) -> None:
    Path("out.json").write_text("old")
    with Path("out.json").open() as earlier:
        succeeded(invoke(*compare(case, "--json", "out.json")))
        assert earlier.read() == "old"
    assert is_report(Path("out.json").read_text())
    assert not list(Path().glob(".partial-*"))


def test_a_store_is_written_to(case: Case) -> None:
    import fsspec

    result = succeeded(
        invoke(*compare(case, "--report", "memory://outputs/x", "--json", "memory://outputs/y.json"))
    )
    assert "written: memory://outputs/x/report.json" in result.stdout
    files = fsspec.filesystem("memory")
    assert is_report(files.cat("/outputs/x/report.json"))
    assert is_report(files.cat("/outputs/y.json"))
    assert not list(Path().glob("memory*"))


@pytest.mark.parametrize("option", ["--report", "--json"])
@pytest.mark.parametrize(
    "url",
    [f"s3://KEY:{SECRET}@bucket/x", f"simplecache::s3://KEY:{SECRET}@bucket/x", f"s3:KEY:{SECRET}@bucket/x"],
)
def test_a_url_with_a_secret_is_refused_before_anything_is_done(case: Case, option: str, url: str) -> None:
    before = sorted(Path().iterdir())
    result = invoke(*compare(case, option, url))
    sentence_of(result)
    assert result.exit_code == 2
    assert SECRET not in result.output
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    "command",
    [
        ("oracle", "RUN", "--keep", "s3://bucket/x"),
        ("golden", "export", "dense", "s3://bucket/x"),
        ("golden", "list", "--golden-dir", "s3://bucket/x"),
        ("replay", "dense", "--keep-dumps", "s3://bucket/x"),
    ],
)
def test_a_folder_that_has_to_be_of_this_machine(case: Case, command: tuple[str, ...]) -> None:
    result = invoke(*(str(case.run / "debug_dump") if word == "RUN" else word for word in command))
    assert sentence_of(result) == (
        "s3://bucket/x is the URL of a store, but a folder of this machine is needed here: give its path"
    )
    assert not list(Path().glob("s3*"))


def test_no_output_is_a_plain_path() -> None:
    """A path that click reads is written by whoever gets it; outputs are written in one place."""
    words = ("report", "output", "json_file", "matrix", "out", "keep", "keep_dumps", "folder")
    plain = [
        f"{path} {one.name}"
        for path, command in commands(main, "regress")
        for one in command.params
        if one.name in words and isinstance(one.type, click.Path)
    ]
    assert not plain


def commands(group: click.Command, path: str) -> list[tuple[str, click.Command]]:
    if not isinstance(group, click.Group):
        return [(path, group)]
    return [found for name, one in group.commands.items() for found in commands(one, f"{path} {name}")]
