"""The command: what it examines, its verbs, reports and exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console

from regress.doctor import examination as examination
from regress.doctor.check_context import CheckContext, Next, gathered
from regress.doctor.checks.tracker_check import check_wandb
from regress.doctor.doctor_finding import RULES, Severity
from regress.doctor.examination import before_resume
from regress.doctor.examined_checkpoint import checkpoints
from regress.engine.checkpoint import latest
from regress.engine.config import load_config
from regress.errors import CheckpointError
from tests.unit.doctor.broken import BROKEN
from tests.unit.doctor.builder import CONFIG, RUN_ID, Run
from tests.unit.killed import killed_at

Doctor = Callable[..., Result]


def types(result: Result) -> list[str]:
    return [issue["type"] for issue in json.loads(result.stdout)["issues"]]


def tear(run: Run, name: str = "curriculum_state.json") -> None:
    (run.folder / name).write_text("{")


def test_the_newest_checkpoint_of_a_run_is_examined(run: Run, doctor: Doctor) -> None:
    for arguments in ([run.folder], ["--project-root", run.folder], ["--project-root", run.folder.parent]):
        assert json.loads(doctor(*arguments, "--json").stdout)["checkpoint_path"] == str(run.checkpoint())
    report = json.loads(doctor("--checkpoint", run.checkpoint(2), "--json").stdout)
    assert (report["checkpoint_path"], report["step"], report["update"]) == (str(run.checkpoint(2)), 2, 4)


def test_the_output_dir_of_the_next_run_is_examined(run: Run, doctor: Doctor) -> None:
    for told in ([f"output_dir={run.folder}"], ["--output-dir", run.folder]):
        result = doctor(*told, *CONFIG, "--json")
        assert json.loads(result.stdout)["output_dir"] == str(run.folder)
        assert json.loads(result.stdout)["unchecked"] == []


def test_a_checkpoint_of_an_earlier_release_is_healthy(run: Run, doctor: Doctor) -> None:
    run.change("checkpoint-4/regress_state.json", lambda tree: tree.update(schema_version=1), seal=True)
    assert types(doctor(run.folder, "--json")) == []


def test_it_chooses_as_a_resume_does(run: Run) -> None:
    """Newer is what a later segment wrote, even if it is at an earlier step."""
    run.change("checkpoint-2/regress_state.json", lambda tree: tree.update(segment=1), seal=True)
    assert checkpoints(run.folder)[0] == Path(str(latest(str(run.folder)))).name == "checkpoint-2"
    (run.checkpoint(2) / "manifest.json").unlink()
    assert checkpoints(run.folder)[0] == Path(str(latest(str(run.folder)))).name == "checkpoint-4"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "CHECKPOINT nowhere cannot be looked at (No such file or directory)"),
        (["run/metrics.jsonl"], "is a file, but a checkpoint is a folder"),
        (["empty"], "is neither a checkpoint nor the output directory of a run"),
        (["run", "run/checkpoint-2"], "are 2 paths; name one checkpoint or output directory"),
        (["memory://nothing/run"], "is neither a checkpoint nor the directory of a run"),
        (["--project-root", "empty"], "holds no run"),
        (["run", "--restore"], "holds no backup; regress doctor --backup makes one"),
        (["run", "--backup", "--auto-fix"], "--auto-fix and --backup exclude one another"),
        (["run", "--output", "nowhere/report.json"], "--output nowhere/report.json cannot be written"),
    ],
)
def test_what_cannot_be_examined_is_one_sentence(
    run: Run, doctor: Doctor, arguments: list[str], says: str
) -> None:
    (run.folder.parent / "empty").mkdir()
    result = doctor(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line


def test_two_runs_are_not_guessed_between(run: Run, doctor: Doctor) -> None:
    Run(run.folder.parent / "other")
    result = doctor()
    assert result.exit_code == 2
    assert "holds 2 runs" in result.stderr
    assert "name the one to examine: regress doctor PATH" in result.stderr


def test_exit_codes_tell_the_severity(run: Run, doctor: Doctor) -> None:
    assert doctor(run.folder).exit_code == 0
    run.write_json("wandb_sync_state.json", run.tracking(150))
    assert doctor(run.folder).exit_code == 0, "a finding of low severity is not a failure"
    tear(run)
    assert doctor(run.folder).exit_code == 1
    assert doctor(run.folder, "--report-only").exit_code == 1
    assert doctor(run.folder, "--auto-fix").exit_code == 0, "nothing is left"


def test_nothing_is_changed_unless_it_is_asked_for(run: Run, doctor: Doctor) -> None:
    """Reports differ in what they tell: the plan of a repair, or what proves the findings."""
    tear(run)
    before = run.files()
    plain = doctor(run.folder).stdout
    bare = doctor(run.folder, "--report-only").stdout
    run.write_json("wandb_sync_state.json", run.tracking(150))
    detail = doctor(run.folder, "--diagnose").stdout
    previews = [
        doctor(run.folder, verb, "--dry-run") for verb in ("--auto-fix", "--create-fresh", "--backup")
    ]
    (run.folder / "wandb_sync_state.json").write_text(json.dumps(run.tracking(4), indent=1))
    assert run.files() == before
    assert not (run.folder / ".regress-doctor").exists()
    assert "repair: put" in " ".join(plain.split()) or "repair: write" in " ".join(plain.split())
    assert "repair:" not in bare
    assert "offset: 146" in detail
    assert "WandB=150, Trainer=4, offset 146" in " ".join(detail.split())
    assert [preview.exit_code for preview in previews] == [1, 0, 0]


def test_reports_for_machines_hold_everything(run: Run, doctor: Doctor) -> None:
    tear(run)
    result = doctor(run.folder, "--output", "report.json", "--json")
    report = json.loads(Path("report.json").read_text())
    assert report["schema_version"] == 1
    assert json.loads(result.stdout)["issues"] == report["issues"]
    assert {"timestamp", "project_root", "checkpoint_path", "issues", "recommendations"} <= report.keys()
    (issue,) = report["issues"]
    assert (issue["type"], issue["severity"], issue["automatic"]) == (
        "corrupted_curriculum_state",
        "medium",
        True,
    )
    assert issue["fix_suggestion"] == "regress doctor --auto-fix"
    assert report["counts"] == {"high": 0, "medium": 1, "low": 0}
    repaired = json.loads(doctor(run.folder, "--auto-fix", "--json").stdout)
    assert len(repaired["applied_fixes"]) == 1
    assert repaired["failed_fixes"] == repaired["manual_fixes_needed"] == []


def test_a_fresh_curriculum_is_at_the_stage_of_the_checkpoint(run: Run, doctor: Doctor) -> None:
    (run.folder / "curriculum_state.json").unlink()
    result = doctor(run.folder, "--create-fresh")
    assert result.exit_code == 0, result.output
    state = json.loads((run.folder / "curriculum_state.json").read_text())
    assert (state["current_stage"], state["last_update_step"]) == (1, 4)
    run.change("checkpoint-4/regress_state.json", lambda tree: tree["parts"].pop("curriculum"), seal=True)
    (run.checkpoint() / "curriculum_state.json").unlink()
    run.seal(run.checkpoint())
    refused = doctor(run.folder, "--create-fresh")
    assert refused.exit_code == 2
    assert "its stage is unknown, and starting at the first would be a guess" in refused.stderr


def test_lines_for_the_shell_change_the_caller(run: Run, doctor: Doctor) -> None:
    """A child process cannot take a variable from its caller, so the caller's shell has to do it."""
    assert doctor(run.folder, "--shell").stdout == ""
    assert doctor(run.folder, "--shell", WANDB_RUN_ID=RUN_ID, WANDB_RESUME="must").stdout == ""
    stale = doctor(run.folder, "--shell", WANDB_RUN_ID="other", WANDB_RESUME="must").stdout
    assert stale == "unset WANDB_RUN_ID WANDB_RESUME\n"
    told = subprocess.run(
        ["bash", "-c", f"{stale} echo ${{WANDB_RUN_ID-gone}} ${{WANDB_RESUME-gone}}"],
        env={**os.environ, "WANDB_RUN_ID": "other", "WANDB_RESUME": "must"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "gone gone\n"


def test_a_backup_is_put_back(run: Run, doctor: Doctor) -> None:
    before = run.files()
    assert doctor(run.folder, "--backup").exit_code == 0
    for name in ("regress_state.json", "model.safetensors", "trainer_state.json"):
        (run.checkpoint() / name).unlink()
    tear(run)
    broken = run.files()
    assert doctor(run.folder, "--restore", "--dry-run").exit_code == 0
    assert run.files() == broken
    assert doctor(run.folder, "--restore").exit_code == 0
    assert run.files() == before
    name = max(path.name for path in (run.folder / ".regress-doctor").iterdir())
    assert doctor(run.folder, "--restore", name).exit_code == 0
    assert run.files() == broken


def test_a_damaged_backup_is_refused(run: Run, doctor: Doctor) -> None:
    doctor(run.folder, "--backup")
    (backup,) = (run.folder / ".regress-doctor").glob("backup-*")
    (backup / "curriculum_state.json").write_text("{}")
    result = doctor(run.folder, "--restore")
    assert result.exit_code == 2
    assert "not a backup that can be trusted" in result.stderr


def test_weights_come_back_from_a_backup(run: Run, doctor: Doctor) -> None:
    doctor(run.folder, "--backup")
    before = run.files()
    (run.checkpoint() / "model.safetensors").write_bytes(b"lost")
    assert doctor(run.folder, "--auto-fix").exit_code == 0
    assert run.files() == before


def test_what_was_changed_after_a_repair_is_kept_when_that_is_taken_back(run: Run, doctor: Doctor) -> None:
    tear(run)
    torn = run.files()
    doctor(run.folder, "--auto-fix")
    run.change("curriculum_state.json", lambda tree: tree.update(current_stage=0))
    changed = run.files()
    assert doctor(run.folder, "--restore").exit_code == 0
    assert run.files() == torn
    newest = max(path.name for path in (run.folder / ".regress-doctor").iterdir())
    assert doctor(run.folder, "--restore", newest).exit_code == 0
    assert run.files() == changed


def test_repairs_are_taken_back_one_after_the_other(run: Run, doctor: Doctor) -> None:
    states, backups, files = [], [], ("curriculum_state.json", "metrics.jsonl")
    for name in files:
        with (run.folder / name).open("a") as file:
            file.write('{"')
        states.append(run.files())
        doctor(run.folder, "--auto-fix")
        backups.append(max(path.name for path in (run.folder / ".regress-doctor").iterdir()))
    for name, state, backup in zip(reversed(files), reversed(states), reversed(backups), strict=True):
        assert doctor(run.folder, "--restore", backup).exit_code == 0
        assert run.files()[name] == state[name]


def test_a_repair_that_is_killed_anywhere_is_taken_back_whole(run: Run, doctor: Doctor) -> None:
    tear(run)
    torn, number = run.files(), 0
    while killed_at(number, lambda: doctor(run.folder, "--auto-fix")):
        if doctor(run.folder, "--restore").exit_code == 0:
            assert run.files() == torn
        else:
            assert doctor(run.folder, "--auto-fix").exit_code in (0, 1)
            assert doctor(run.folder, "--restore").exit_code == 0
            assert run.files() == torn
        number += 1
        shutil.rmtree(run.folder / ".regress-doctor", ignore_errors=True)
    assert number > 10


def test_one_undo_takes_back_repairs_that_made_others_possible(run: Run, doctor: Doctor) -> None:
    """The curriculum comes back from the checkpoint that takes the place of a broken one."""
    tear(run)
    (run.checkpoint() / "regress_state.json").write_bytes(b"")
    (run.checkpoint() / "curriculum_state.json").write_bytes(b"")
    before = run.files()
    repaired = json.loads(doctor(run.folder, "--auto-fix", "--json").stdout)
    assert len(repaired["applied_fixes"]) == 2
    assert (run.folder / "broken-checkpoint-4").is_dir()
    after = run.files()
    assert json.loads(doctor(run.folder, "--auto-fix", "--json").stdout)["applied_fixes"] == []
    assert run.files() == after
    assert doctor(run.folder, "--restore").exit_code == 0
    assert run.files() == before


def test_a_run_that_goes_on_is_not_repaired(run: Run, doctor: Doctor) -> None:
    tear(run)
    code = "import sys, time; file = open(sys.argv[1], 'a'); print('open', flush=True); time.sleep(600)"
    writer = subprocess.Popen(
        [sys.executable, "-c", code, run.folder / "metrics.jsonl"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        before = run.files()
        result = doctor(run.folder, "--auto-fix")
        assert result.exit_code == 2
        assert f"process {writer.pid} is writing to" in result.stderr
        assert run.files() == before
    finally:
        writer.kill()
        writer.communicate()
    assert doctor(run.folder, "--auto-fix").exit_code == 0


def test_only_proven_leftovers_are_cleaned(run: Run, doctor: Doctor) -> None:
    """Files of other tools, young files, and files with other content stay."""
    old = 1_000_000_000
    kept = {
        "trainer_temp_1.tmp": b"",
        "__pycache__.pyc": b"",
        ".partial-1-manifest.json": b"{",  # process 1 runs
        ".partial-notes.txt": b"mine",
        ".metrics.jsonl.partial": b"not what this tool writes",
        ".thesis.json.partial": b"{",
    }
    for name, content in kept.items():
        (run.folder / name).write_bytes(content)
        os.utime(run.folder / name, (old, old))
    (run.folder / ".partial-checkpoint-8").mkdir()
    young = run.folder / ".wandb_sync_state.json.partial"
    young.write_text("{")
    before = run.files()
    assert doctor(run.folder, "--clean-only").exit_code == 0
    assert run.files() == before
    os.utime(young, (old, old))
    assert doctor(run.folder, "--clean-only").exit_code == 0
    assert not young.exists()
    assert doctor(run.folder, "--restore").exit_code == 0
    assert run.files() == before


def test_lengths_that_just_fit_are_no_finding(run: Run, doctor: Doctor) -> None:
    """1536 + 2560 is not more than 4096."""
    lengths = ("data.max_prompt_length=1536", "data.max_completion_length=2560", "data.max_seq_length=4096")
    found = types(doctor(run.folder, *CONFIG, f"output_dir={run.folder}", *lengths, "--json"))
    assert found == ["length_config_mismatch"], "they differ from the checkpoint's, and add up"
    longer = (*lengths[:2], "data.max_seq_length=4095")
    found = types(doctor(run.folder, *CONFIG, f"output_dir={run.folder}", *longer, "--json"))
    assert found == ["config_instantiation_error"]


def test_disk_and_packages_are_compared(run: Run) -> None:
    def found(context: CheckContext) -> dict[str, str]:
        return {issue.type: issue.severity.value for issue in examination.examine(context)}

    target = gathered([str(run.folder)]).target
    assert found(CheckContext(target, free=lambda path: 100)) == {"disk_full": "high"}
    saving = load_config(None, None, [*CONFIG, "trainer.save_steps=1"], environ={}).config
    context = CheckContext(target, Next(saving), free=lambda path: 20_000)
    assert found(context)["disk_space"] == "medium"
    limited = load_config(
        None, None, [*CONFIG, "trainer.save_steps=1", "trainer.save_total_limit=1"], environ={}
    ).config
    assert "disk_space" not in found(CheckContext(target, Next(limited), free=lambda path: 20_000))


def test_a_login_is_asked_for_only_where_it_is_needed(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = load_config(None, None, [*CONFIG, "tracking.trackers=[wandb]"], environ={}).config
    target = gathered([str(run.folder)]).target

    def found(**environ: str) -> set[str]:
        here = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), **environ}
        return {issue.type for issue in check_wandb(CheckContext(target, Next(config), environ=here))}

    assert found() & {"wandb_no_credentials", "wandb_not_installed"}
    assert "wandb_no_credentials" not in found(WANDB_MODE="offline")
    assert "wandb_no_credentials" not in found(WANDB_API_KEY="0" * 40)


@pytest.mark.parametrize("key", ["seed=7", "data.group_size=4", "optimizer.learning_rate=0.5"])
def test_a_resume_that_would_be_another_run_is_stopped(run: Run, key: str) -> None:
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    wanted = [*CONFIG, f"output_dir={run.folder}", "trainer.resume_from_checkpoint=latest"]
    before_resume(load_config(None, None, wanted, environ={}).config, console)
    with pytest.raises(CheckpointError, match=key.partition("=")[0]):
        before_resume(load_config(None, None, [*wanted, key], environ={}).config, console)
    console.file.close()


def test_a_resume_prints_what_the_doctor_finds(run: Run) -> None:
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    wanted = [*CONFIG, f"output_dir={run.folder}", "trainer.resume_from_checkpoint=latest"]
    config = load_config(None, None, wanted, environ={}).config
    before_resume(config, console)
    assert console.export_text() == "", "nothing is said of a healthy run"
    tear(run)
    before = run.files()
    before_resume(config, console)
    assert "corrupted_curriculum_state" in console.export_text()
    assert run.files() == before
    console.file.close()


def test_every_rule_is_documented_and_prepared() -> None:
    page = (Path(__file__).parents[3] / "docs" / "howto" / "doctor.md").read_text()
    for name, rule in RULES.items():
        assert f"| `{name}` | {rule.severity} | {rule.meaning} |" in page, name
    covered = {name for case in BROKEN for name in case.finds}
    elsewhere = {
        *("disk_full", "disk_space", "missing_dependency", "no_checkpoint", "unproven_leftover"),
        *("wandb_not_installed", "wandb_no_credentials", "no_wandb_runs"),
    }
    assert RULES.keys() - covered == elsewhere
    assert {severity.value for severity in Severity} == {"low", "medium", "high"}
