"""Rows of the document on resuming and repairing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from regress.dump.dump_files import file_stamp
from regress.dump.dump_manifest import MANIFEST
from regress.engine.checkpoint.checkpoint_manifest import write_manifest
from tests.docs.walking import Walk, shows

CURRICULUM = (
    *("curriculum.enable=true", "task.train_size=120", "task.eval_size=60", "evaluation.every_n_steps=2"),
    *("max_steps=4", "trainer.save_steps=2"),
)


def trained(walk: Walk) -> str:
    """The output directory of a run with two checkpoints, a curriculum and a tracker's state."""
    walk.train(*CURRICULUM, "tracking.trackers=[tensorboard]", to="RUN")
    return "RUN"


def copied(walk: Walk, name: str) -> Path:
    """A copy of that run, to be damaged."""
    folder = walk.path(name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(walk.path(trained(walk)), folder)
    return folder


def sealed(checkpoint: Path) -> None:
    """Make the manifest fit what somebody has changed in a checkpoint."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / MANIFEST]
    write_manifest(checkpoint, {path.relative_to(checkpoint).as_posix(): file_stamp(path) for path in files})


def rewritten(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def content(folder: Path) -> dict[str, bytes]:
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    return {name: data for name, data in found.items() if not name.startswith(".regress-doctor")}


@shows(
    "resume-repair",
    *(
        "tool 1|cleanup_before",
        "cleanup: --report-only",
        "tool 3|curriculum: --auto-fix",
        "curriculum state file",
    ),
    *("lost or damaged state", "stepwise repair", "fix_curriculum_sync.py"),
)
def a_torn_state_is_made_again(walk: Walk) -> None:
    folder = copied(walk, "torn")
    healthy = content(folder)
    state = folder / "curriculum_state.json"
    state.write_bytes(state.read_bytes()[:40])
    damaged = content(folder)
    report = walk.regress("doctor", "torn", "--report-only", code=1).told
    assert "corrupted_curriculum_state" in report
    assert "repair:" not in report
    assert "repair:" in walk.regress("doctor", "torn", "--diagnose", code=1).told
    assert "repair:" in walk.regress("doctor", "torn", "--auto-fix", "--dry-run", code=1).told
    assert content(folder) == damaged, "nothing is changed unless it is asked for"
    walk.regress("doctor", "torn", "--auto-fix", code=0)
    made = content(folder)
    name = "curriculum_state.json"
    assert json.loads(made.pop(name)) == json.loads(healthy.pop(name)), "it is made again of the checkpoint"
    assert made == healthy


@shows("resume-repair", "cleanup: --clean-only")
def leftovers_are_moved_away(walk: Walk) -> None:
    folder = copied(walk, "leftovers")
    left = folder / ".wandb_sync_state.json.partial"
    left.write_text("{")
    os.utime(left, (1e9, 1e9))
    walk.regress("doctor", "leftovers", "--clean-only")
    assert not left.exists()


@shows("resume-repair", "stale tracker variables", "WANDB_RUN_ID, WANDB_RESUME")
def stale_variables_are_unset_by_the_shell(walk: Walk) -> None:
    trained(walk)
    told = walk.regress("doctor", "RUN", "--shell", WANDB_RUN_ID="other", WANDB_RESUME="must").output
    assert told == "unset WANDB_RUN_ID WANDB_RESUME\n"
    walk.train("tracking.trackers=[tensorboard]", to="named2", WANDB_RUN_ID="mine0001")
    assert walk.json("named2/wandb_sync_state.json")["run_id"] == "mine0001"


@shows(
    "resume-repair",
    *("checkpoint files are verified", "state of the checkpoint", "fix_resume", "resume: --auto-fix"),
)
def a_damaged_file_is_found(walk: Walk) -> None:
    walk.regress("doctor", trained(walk))
    walk.regress("doctor", "RUN/checkpoint-4", "--diagnose")
    folder = copied(walk, "flipped")
    weights = folder / "checkpoint-4/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    assert "checksum_mismatch" in walk.regress("doctor", "--checkpoint", "flipped/checkpoint-4", code=1).told
    walk.regress("doctor", "--checkpoint", "flipped/checkpoint-4", "--report-only", code=1)
    walk.regress("doctor", "--checkpoint", "flipped/checkpoint-4", "--auto-fix")
    assert weights.read_bytes() == walk.path("RUN/final/model.safetensors").read_bytes()


@shows("resume-repair", "resume: --report-only", "detailed report")
def the_report_is_a_file(walk: Walk) -> None:
    trained(walk)
    walk.regress("doctor", "--checkpoint", "RUN/checkpoint-4", "--report-only")
    walk.regress("doctor", "RUN", "--output", "report.json")
    assert {"issues", "recommendations", "counts", "step"} <= walk.json("report.json").keys()


@shows("resume-repair", "configuration is verified", "configuration compared with", "lengths compared with")
def another_configuration_is_found(walk: Walk) -> None:
    trained(walk)
    for words in (["RUN"], ["RUN/checkpoint-4", "seed=1"]):
        told = walk.regress("doctor", *words, "--config-name", "experiment_base", code=1).told
        assert all(
            name in told for name in ("seed_mismatch", "data_config_mismatch", "objective_config_mismatch")
        )
    longer = ("data.max_prompt_length=64", "data.max_completion_length=16")
    assert "length_config_mismatch" in walk.regress("doctor", "RUN/checkpoint-4", *longer, code=1).told


@shows("resume-repair", "Python dependencies")
def another_version_is_found(walk: Walk) -> None:
    checkpoint = copied(walk, "versions") / "checkpoint-4"
    state = json.loads((checkpoint / "regress_state.json").read_text())
    rewritten(checkpoint / "regress_state.json", versions={**state["versions"], "torch": "2.0.0"})
    sealed(checkpoint)
    told = walk.regress("doctor", "versions", code=1).told
    assert "dependency_mismatch" in told
    assert "torch" in told


@shows("resume-repair", "synchronization of the tracker", "offset between tracker")
def an_offset_of_the_tracker_is_told(walk: Walk) -> None:
    folder = copied(walk, "offset")
    state = walk.json("offset/wandb_sync_state.json")
    rewritten(folder / "wandb_sync_state.json", **{name: 150 for name in ("step",) if name in state})
    told = walk.regress("doctor", "offset/checkpoint-4", "--diagnose").told
    assert "tracking_step_offset" in told
    assert "150" in told


@shows("resume-repair", "curriculum: --create-fresh")
def a_fresh_state_is_at_the_stage_of_the_checkpoint(walk: Walk) -> None:
    folder = copied(walk, "fresh")
    (folder / "curriculum_state.json").unlink()
    walk.regress("doctor", "--checkpoint", "fresh/checkpoint-4", "--create-fresh")
    assert "stages" in walk.json("fresh/curriculum_state.json")


@shows("resume-repair", "step of the curriculum")
def another_step_of_the_curriculum_is_found(walk: Walk) -> None:
    checkpoint = copied(walk, "steps") / "checkpoint-4"
    state = json.loads((checkpoint / "curriculum_state.json").read_text())
    (name,) = [name for name in state if name.endswith("step")][:1]
    rewritten(checkpoint / "curriculum_state.json", **{name: 2})
    sealed(checkpoint)
    assert "step_mismatch" in walk.regress("doctor", "steps", code=1).told


@shows(
    "resume-repair", "manager is checked", "callbacks are checked", "import errors", "lengths of one section"
)
def the_run_itself_reads_the_state(walk: Walk) -> None:
    trained(walk)
    told = walk.regress("doctor", "RUN", "task.rewards={nowhere.at_all:reward: 1.0}", code=1).told
    assert "config_import_error" in told or "nowhere" in told
    lengths = {
        key: value for key, value in walk.config("data.max_prompt_length=20").items() if "length" in key
    }
    assert lengths["data.max_prompt_length"].startswith("20")


@shows("resume-repair", "lengths that do not add up", "validate_config")
def lengths_have_to_add_up(walk: Walk) -> None:
    lengths = ("data.max_prompt_length=1536", "data.max_completion_length=2560")
    told = walk.regress("train", *lengths, "data.max_seq_length=4095", code=2).told
    assert "4096" in told
    walk.regress("train", *lengths, "data.max_seq_length=4096", "--print-config")


@shows("resume-repair", "MAX_PROMPT_LENGTH", "LENGTH_ALLOCATION", "command line > environment")
def lengths_come_from_variables(walk: Walk) -> None:
    found = walk.config(MAX_PROMPT_LENGTH="1024", MAX_COMPLETION_LENGTH="3072")
    assert [found[f"data.max_{part}_length"].split()[0] for part in ("prompt", "seq")] == ["1024", "4096"]
    shares = {"balanced": (512, 512), "prompt_heavy": (614, 410), "completion_heavy": (410, 614)}
    for strategy, (prompt, completion) in shares.items():
        found = walk.config("--max-length", 1024, LENGTH_ALLOCATION_STRATEGY=strategy)
        assert abs(int(found["data.max_prompt_length"].split()[0]) - prompt) <= 1, (strategy, found)
        assert abs(int(found["data.max_completion_length"].split()[0]) - completion) <= 1, strategy
    own = {"LENGTH_ALLOCATION_STRATEGY": "custom", "MAX_PROMPT_LENGTH": "300", "MAX_COMPLETION_LENGTH": "700"}
    found = walk.config("--max-length", 1024, **own)
    assert [found[f"data.max_{part}_length"].split()[0] for part in ("prompt", "completion")] == [
        "300",
        "700",
    ]
    found = walk.config("data.max_prompt_length=20", MAX_PROMPT_LENGTH="30")
    assert found["data.max_prompt_length"].startswith("20")
    assert "environ" in walk.config(MAX_PROMPT_LENGTH="30")["data.max_prompt_length"]


@shows("resume-repair", "checkpoint folder", "training goes on", "state saved every 100", "automatic check")
def a_run_goes_on(walk: Walk) -> None:
    trained(walk)
    names = {path.name for path in walk.path("RUN/checkpoint-2").iterdir()}
    assert {"trainer_state.json", "config.json", "model.safetensors"} <= names
    folder = copied(walk, "resumed")
    shutil.rmtree(folder / "checkpoint-4")
    on = (*CURRICULUM, "tracking.trackers=[tensorboard]", "trainer.resume_from_checkpoint=latest")
    told = walk.train(*on, to="resumed").told
    assert "checkpoint-2" in told
    finals = [walk.path(f"{run}/final/model.safetensors").read_bytes() for run in ("RUN", "resumed")]
    assert finals[0] == finals[1]
    assert walk.config("trainer.save_steps=100")["trainer.save_steps"].startswith("100")
    weights = folder / "checkpoint-4/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    refused = walk.train(*on, "max_steps=5", to="resumed", code=2)
    assert "regress doctor" in refused.told
    assert len([line for line in refused.errors.splitlines() if line.strip()]) == 1


@shows("resume-repair", "environment variables of devices")
def variables_are_set_by_the_configuration(walk: Walk) -> None:
    own = "system_envs={CUDA_VISIBLE_DEVICES: '1', WANDB_PROJECT: VerilogGRPO, WANDB_ENTITY: me}"
    walk.train(own, "debug.enable_data_dump=true", "debug.dump_options.trajectory=true", to="devices")
    assert "CUDA_VISIBLE_DEVICES" in walk.path("devices/debug_dump/manifest.json").read_text() or (
        "VerilogGRPO" in walk.path("devices/config.yaml").read_text()
    )


@shows("resume-repair", "state of the checkpoint overrides")
def what_may_change_is_told(walk: Walk) -> None:
    trained(walk)
    copied(walk, "changed")
    on = (*CURRICULUM, "trainer.resume_from_checkpoint=latest", "max_steps=5", "tracking.trackers=[]")
    refused = walk.train(*on, "seed=3", to="changed", code=2)
    assert "seed" in refused.errors
    assert "--allow-change seed" in refused.errors
    walk.train(*on, "seed=3", "--allow-change", "seed", to="changed")
    assert walk.path("changed/checkpoint-5").is_dir() or walk.path("changed/final").is_dir()


@shows("resume-repair", "log lines of lengths")
def the_log_can_be_searched(walk: Walk) -> None:
    copied(walk, "searched")
    on = (
        *CURRICULUM,
        "tracking.trackers=[tensorboard]",
        "trainer.resume_from_checkpoint=latest",
        "max_steps=5",
    )
    said = walk.train(*on, "trainer.save_steps=1", to="searched", LC_ALL="zh_CN.UTF-8")
    lines = said.output.splitlines()
    for word in ("🔧 同步长度配置", "WandB恢复", "课程学习", "checkpoint"):
        assert [line for line in lines if word in line], word


@shows("resume-repair", "backup and restore")
def a_backup_is_put_back(walk: Walk) -> None:
    folder = copied(walk, "saved")
    before = content(folder)
    walk.regress("doctor", "saved", "--backup")
    (folder / "curriculum_state.json").write_text("{}")
    walk.regress("doctor", "saved", "--restore")
    assert content(folder) == before
