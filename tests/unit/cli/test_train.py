"""``regress train`` as people type it: twice into one folder, shorter than configured, in another language."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.unit.cli.conftest import invoke

Command = Callable[..., Result]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("saving", [(), ("trainer.save_steps=1",)], ids=["unsaved", "saved"])
def test_two_runs_never_mix(
    saving: tuple[str, ...], command: Command, small: tuple[str, ...], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / "of_somebody_else").mkdir(parents=True)
    asked = (
        *small,
        *saving,
        f"output_dir={run}",
        "debug.enable_data_dump=true",
        "debug.dump_options.loss=true",
    )
    assert command("train", *asked).exit_code == 0
    before = files(run)
    refused = command("train", *asked, "seed=1")
    assert refused.exit_code == 2
    assert "holds a run already (metrics.jsonl, final" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert ("trainer.resume_from_checkpoint=latest" in refused.stderr) == bool(saving)
    unbuilt = command("train", *asked, "model.path=nowhere", "--overwrite")
    assert unbuilt.exit_code == 2
    assert files(run) == before, "a run that cannot begin replaces nothing"
    replaced = command("train", *small, f"output_dir={run}", "seed=1", "max_steps=1", "--overwrite")
    assert replaced.exit_code == 0, replaced.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {row["segment"] for row in rows} == {0}
    assert max(row["step"] for row in rows) == 1
    assert not [*run.glob("checkpoint-*")]
    assert (run / "of_somebody_else").is_dir()
    assert command("doctor", str(run)).exit_code == 0


def test_a_run_that_goes_on_is_not_replaced(command: Command, small: tuple[str, ...], tmp_path: Path) -> None:
    asked = (*small, f"output_dir={tmp_path / 'run'}", "trainer.save_steps=1")
    latest = "trainer.resume_from_checkpoint=latest"
    assert command("train", *asked).exit_code == 0
    refused = command("train", *asked, latest, "max_steps=2", "--overwrite")
    assert refused.exit_code == 2
    assert "leave one of them away" in refused.stderr
    assert command("train", *asked, latest, "max_steps=2").exit_code == 0


def test_a_finished_run_without_checkpoints_cannot_go_on(
    command: Command, small: tuple[str, ...], tmp_path: Path
) -> None:
    asked = (*small, f"output_dir={tmp_path / 'run'}", "trainer.resume_from_checkpoint=latest")
    assert command("train", *asked).exit_code == 0, "nothing is there yet"
    assert "holds a run already" in command("train", *asked).stderr
    (tmp_path / "run" / "final").rename(tmp_path / "elsewhere")
    assert command("train", *asked).exit_code == 0, "it was killed before its first checkpoint"


@pytest.mark.parametrize(("steps", "rises"), [(0, 0), (1, 0), (3, 2)])
def test_a_short_run_shortens_its_warm_up(
    steps: int, rises: int, command: Command, small: tuple[str, ...], tmp_path: Path
) -> None:
    given = [part for part in small if not part.startswith("max_steps")]
    shown = command("train", "--config-name", "reverse_string", f"max_steps={steps}", "--print-config")
    assert f"optimizer.warmup_steps: {rises}  # shortened from 10 for {steps} updates" in shown.stdout
    assert f"optimizer.warmup_steps=10 is not less than the {steps} optimizer updates" in shown.stderr
    if steps == 0:
        asked = ("--config-name", "reverse_string", *given, "max_steps=0", f"output_dir={tmp_path / 'run'}")
        done = command("train", *asked)
        assert done.exit_code == 0, done.stderr
        assert re.search("note: .* so the learning rate rises over 0", done.stderr)


def test_a_contradiction_of_one_author_is_refused() -> None:
    refused = invoke("train", "optimizer.warmup_steps=10", "max_steps=3", "--print-config")
    assert refused.exit_code == 2
    assert "lower it or raise max_steps" in refused.stderr
    kept = invoke("train", "--config-name", "reverse_string", "--print-config")
    assert "optimizer.warmup_steps: 10  # file" in kept.stdout
    assert kept.stderr == ""


@pytest.mark.parametrize(
    ("locale", "chinese"),
    [
        ({}, False),
        ({"LANG": "C.UTF-8"}, False),
        ({"LANG": "de_DE.UTF-8"}, False),
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "en_US.UTF-8"}, False),
    ],
)
def test_first_lines_are_in_the_language_of_the_locale(
    locale: dict[str, str],
    chinese: bool,
    command: Command,
    small: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LANG", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    for name, text in locale.items():
        monkeypatch.setenv(name, text)
    said = command("train", *small, "max_steps=0", "output_dir=out").stdout
    assert ("🔧 同步长度配置" in said) == chinese
    assert said.isascii() != chinese
    assert "lengths" in said


@pytest.mark.parametrize("flag", ["--wandb_project=mine", "--wandb-run-name=mine", "--force_new_wandb_run"])
def test_a_flag_of_wandb_switches_it_on(flag: str) -> None:
    def trackers(*more: str) -> str:
        said = invoke("train", flag, *more, "--print-config")
        assert said.exit_code == 0, said.stderr
        notes.append(said.stderr)
        return re.search(r"tracking\.trackers: (\S+)", said.stdout)[1]  # type: ignore[index]

    notes: list[str] = []
    assert trackers() == "[wandb]"
    assert re.fullmatch(r"note: --\S+ switched wandb on \(tracking\.trackers=\[wandb\]\).*\n", notes[0])
    assert trackers("--no-wandb") == "[]"
    assert trackers("--wandb") == "[wandb]"
    assert trackers("tracking.trackers=[tensorboard]") == "[tensorboard]"
    assert trackers("--config-name", "experiment_base") == "null", "wandb, where it can be used"
    assert notes[1:] == [""] * 4, "whoever decides is told nothing"
    assert "tracking.trackers: []" in invoke("train", "tracking.project=mine", "--print-config").stdout


def test_wandb_that_cannot_be_used_is_an_error(
    command: Command, small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    refused = command("train", *small, "--wandb_project", "mine", "output_dir=out")
    assert refused.exit_code == 2
    assert re.search(
        "wandb (is not installed .*pip install|has no login .*WANDB_MODE=offline)", refused.stderr
    )
