"""Files of every kind of damage, and files made to do harm: one sentence each, and nothing is changed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regress.cli import main
from regress.dump.metrics_file import read_rows
from regress.engine.checkpoint import latest
from regress.errors import DumpError
from tests.unit.doctor.builder import Run

NAMES = (
    *("metrics.jsonl", "curriculum_state.json", "wandb_sync_state.json"),
    *(
        f"checkpoint-4/{name}.json"
        for name in ("manifest", "regress_state", "trainer_state", "config", "curriculum_state")
    ),
    *("checkpoint-4/model.safetensors", "checkpoint-2/regress_state.json", "checkpoint-2/trainer_state.json"),
)
HARMFUL = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "deep and closed": b"[" * 5_000 + b"]" * 5_000,
    "many empty lists": b"[" + b"[]," * 9_000_000 + b"[]]",
    "a number of a million digits": b"1" * 1_000_000,
    "no UTF-8": b"\xff\xfe\x00{",
    "lone surrogates": rb'{"schema_version": 1, "step": "\ud800", "files": {"\udfff": 1}}',
    "commands for the terminal": b'{"\\u001b[2J\\u001b]0;owned\\u0007": "\\u001b[31m", "files": {}}',
    "markup": b'{"[bold red]": "[/]", "files": {"[link=x]": {}}}',
    "infinities": b'{"step": 1e999, "update": NaN, "global_step": -Infinity, "schema_version": 1e999}',
    "booleans for numbers": b'{"step": true, "update": true, "global_step": true, "schema_version": true}',
    "negative numbers": b'{"step": -1, "update": -5, "global_step": -3, "schema_version": 1}',
    "an empty object": b"{}",
    "null": b"null",
    "nothing": b"",
}


@contextmanager
def alarm() -> Iterator[None]:
    """A pipe that somebody waits for ends the test, not the day."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(120)
    yield
    signal.alarm(0)


def doctor(folder: Path, *options: str) -> Result:
    result = CliRunner().invoke(main, ["doctor", str(folder), *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def survives(run: Run) -> None:
    """Examine, repair twice and undo: exit codes and sentences only, and every byte comes back."""
    with alarm():
        _survives(run)


def _survives(run: Run) -> None:
    before = run.files()
    examined = doctor(run.folder, "--json")
    assert examined.exit_code in (0, 1)
    for issue in json.loads(examined.stdout)["issues"]:
        assert issue["message"].isprintable(), "control characters reach the terminal"
    assert doctor(run.folder).exit_code == examined.exit_code
    assert run.files() == before
    repaired = doctor(run.folder, "--auto-fix", "--json")
    assert repaired.exit_code in (0, 1)
    after = run.files()
    again = json.loads(doctor(run.folder, "--auto-fix", "--json").stdout)
    assert again["applied_fixes"] == [], "a second repair found more to do"
    assert run.files() == after
    if json.loads(repaired.stdout)["applied_fixes"]:
        assert doctor(run.folder, "--restore").exit_code == 0
    assert run.files() == before


@pytest.mark.one_in(60)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", HARMFUL.values(), ids=HARMFUL)
def test_harmful_content_is_one_finding(tmp_path: Path, content: bytes, name: str) -> None:
    run = Run(tmp_path / "run")
    (run.folder / name).write_bytes(content)
    survives(run)


@pytest.mark.one_in(28)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "link to a device", "link out", "link in a circle", "folder"])
def test_nothing_is_read_through_what_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    run = Run(tmp_path / "run")
    secret = tmp_path / "secret.json"
    secret.write_text('{"secret": "hunter2"}')
    path = run.folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        targets = {"link to a device": "/dev/zero", "link out": str(secret), "link in a circle": path.name}
        path.symlink_to(targets[kind])
    survives(run)
    assert "hunter2" not in doctor(run.folder, "--diagnose").output
    assert secret.read_text() == '{"secret": "hunter2"}'


@pytest.mark.extended
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_any_damage_is_survived(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run = Run(tmp_path_factory.mktemp("damaged") / "run")
    for name in data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True)):
        path = run.folder / name
        content = bytearray(path.read_bytes())
        kind = data.draw(st.sampled_from(["cut", "flip", "insert", "remove", "replace"]))
        place = len(content) * data.draw(st.integers(0, 999)) // 1000
        if kind == "cut":
            path.write_bytes(content[:place])
        elif kind == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        elif kind == "insert":
            content[place:place] = data.draw(st.binary(min_size=1, max_size=20))
            path.write_bytes(content)
        elif kind == "replace":
            path.write_bytes(data.draw(st.binary(max_size=40)))
        else:
            path.unlink()
    survives(run)


@pytest.mark.parametrize("folder", ["checkpoint-4", "."])
def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path, folder: str) -> None:
    run = Run(tmp_path / "run")
    elsewhere = Run(tmp_path / "elsewhere")
    state = run.checkpoint() / "state"
    state.symlink_to(elsewhere.checkpoint())
    theirs = elsewhere.files()
    result = doctor(run.folder / folder, "--auto-fix", "--json")
    found = {issue["type"] for issue in json.loads(result.stdout)["issues_before"]}
    assert "unsafe_path" in found
    assert elsewhere.files() == theirs


def test_a_pipe_beside_the_checkpoints_moves_none_of_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    (run.folder / "metrics.jsonl").unlink()
    os.mkfifo(run.folder / "metrics.jsonl")
    before = run.files()
    result = json.loads(doctor(run.folder, "--auto-fix", "--json").stdout)
    assert [(issue["type"], issue["severity"]) for issue in result["issues"]] == [("unsafe_path", "high")]
    assert run.files() == before


def test_a_linked_checkpoint_is_told_of(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    moved = run.checkpoint().rename(tmp_path / "checkpoint-4")
    run.checkpoint().symlink_to(moved)
    result = json.loads(doctor(run.folder, "--json").stdout)
    found = {issue["type"]: issue["message"] for issue in result["issues"]}
    assert "checkpoint-4 is a link to" in found["unsafe_path"]
    named = json.loads(doctor(run.checkpoint(), "--json").stdout)
    assert named["checkpoint_path"] == str(moved)


def test_a_resume_waits_for_no_pipe_and_no_bomb(tmp_path: Path) -> None:
    """The resume itself lists checkpoints and reads metrics, after the doctor or without it."""
    run = Run(tmp_path / "run")
    state = run.checkpoint() / "regress_state.json"
    state.unlink()
    os.mkfifo(state)
    with alarm():
        assert str(latest(str(run.folder))) == str(run.checkpoint())
    (run.folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + b"[" * 100_000 + b'\n{"step": 2}\n')
    with pytest.raises(DumpError, match="line 2 is not a row of metrics"):
        read_rows(run.folder / "metrics.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint-4/regress_state.json"])
def test_files_that_are_a_hole_are_not_read(run: Run, name: str) -> None:
    """Without a look at what is stored, the doctor reads 20 GiB of nothing."""
    os.truncate(run.folder / name, 20 << 30)
    with alarm():
        result = doctor(run.folder, "--diagnose")
    assert result.exit_code
    assert "21474836480 bytes, nearly all of them a hole" in " ".join(result.output.split())
