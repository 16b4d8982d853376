"""Checkpoints in a store: examined as those on this machine, and never changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console

from regress.doctor import examined_checkpoint
from regress.doctor.examination import before_resume
from regress.doctor.examined_checkpoint import fetch
from regress.dump.dump_location import Location, location
from regress.engine.config import load_config
from regress.errors import CheckpointError
from tests.unit.doctor.builder import CONFIG, Run

Doctor = Callable[..., Result]
URL = "memory://bucket/runs/one"


def below(place: Location, name: str) -> Location:
    for part in name.split("/"):
        place = place / part
    return place


@pytest.fixture
def stored(run: Run) -> Iterator[Callable[[], None]]:
    """Upload the run as it is now."""

    def upload() -> None:
        for path in run.folder.rglob("*"):
            if path.is_file():
                name = path.relative_to(run.folder).as_posix()
                below(location(URL), name).write_bytes(path.read_bytes())

    upload()
    yield upload
    place = location(URL)
    assert not isinstance(place, Path)
    place.rmtree()


def content() -> dict[str, bytes]:
    files = location(URL).files  # type: ignore[union-attr]
    return {name: files.cat_file(name) for name in files.find("/bucket/runs/one")}


@pytest.mark.parametrize("named", [URL, f"{URL}/checkpoint-4"])
def test_a_healthy_run_in_a_store_is_healthy(
    stored: Callable[[], None], doctor: Doctor, named: str, tmp_path: Path
) -> None:
    found = doctor(named, "--output", tmp_path / "report.json")
    assert (found.exit_code, found.stderr) == (0, "")
    assert f"examined {URL}/checkpoint-4 (step 4, " in found.stdout
    assert "regress-doctor-" not in found.stdout + (tmp_path / "report.json").read_text()


@pytest.mark.parametrize(
    ("name", "finds"),
    [("model.safetensors", "corrupted_model_weights"), ("regress_state.json", "corrupted_checkpoint_file")],
)
def test_damage_is_found_and_left(
    run: Run, stored: Callable[[], None], doctor: Doctor, name: str, finds: str
) -> None:
    path = run.checkpoint() / name
    path.write_bytes(path.read_bytes()[:-8])
    stored()
    before = content()
    found = doctor(URL)
    assert found.exit_code == 1
    assert finds in found.stdout
    assert "--auto-fix" not in found.stdout, "nothing is offered that would be refused"
    assert content() == before


@pytest.mark.parametrize("verb", ["--auto-fix", "--clean-only", "--create-fresh", "--backup", "--restore"])
def test_nothing_is_changed_in_a_store(stored: Callable[[], None], doctor: Doctor, verb: str) -> None:
    before = content()
    refused = doctor(URL, verb)
    assert refused.exit_code == 2
    assert refused.stderr == (
        f"error: {verb} changes files, and {URL} lies in a store, where the doctor changes nothing; copy the run to "
        "this machine, name the copy, and upload it again\n"
    )
    assert content() == before


def test_a_resume_from_a_store_is_examined_first(run: Run, stored: Callable[[], None]) -> None:
    with open(os.devnull, "w") as quiet:  # noqa: PTH123
        console = Console(file=quiet)
        for asked in ("latest", f"{URL}/checkpoint-4"):
            wanted = [*CONFIG, f"output_dir={run.folder}", f"trainer.checkpoint_dir={URL}"]
            wanted.append(f"trainer.resume_from_checkpoint={asked}")
            before_resume(load_config(None, None, wanted, environ={}).config, console)
            other = load_config(None, None, [*wanted, "seed=7"], environ={}).config
            with pytest.raises(CheckpointError, match=f"seed.*see regress doctor {URL}"):
                before_resume(other, console)


def test_before_a_resume_only_headers_of_large_files_are_copied(
    run: Run, stored: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(examined_checkpoint, "SMALL", 0)
    root, checkpoint, others = fetch(URL, tmp_path / "copy", whole=False)
    assert (checkpoint, others) == ("checkpoint-4", ("checkpoint-2",))
    copied, original = root / "checkpoint-4/model.safetensors", run.checkpoint() / "model.safetensors"
    whole, found = original.read_bytes(), copied.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    assert found[:start] == whole[:start]
    assert found[start:] == bytes(len(whole) - start) != whole[start:]
