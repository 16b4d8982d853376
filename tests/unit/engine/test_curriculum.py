"""Curriculum of a run: what is sampled follows the evaluations, in training, in a replay and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regress.dump.dump_reader import DumpReader
from regress.dump.metrics_file import read_metrics
from regress.dump.recorded_trajectories import read_trajectories
from regress.engine.config import load_config
from regress.engine.config.config_schema import Config
from regress.engine.training_run import train
from regress.errors import ConfigError, RegressError, ReplayError, TaskError

MakeConfig = Callable[..., Config]

STAGES = (
    "curriculum.stages=["
    "{name: short, levels: [basic], threshold: 0.01, min_steps: 1},"
    "{name: medium, levels: [basic, intermediate], threshold: 0.01, min_steps: 1},"
    "{name: long, levels: [advanced], threshold: 1.0}]"
)
WORDS = ("task.train_size=36", "task.eval_size=24", "task.params={alphabet: ab}")
THREE = (
    STAGES,
    *WORDS,
    "curriculum.enable=true",
    "curriculum.min_evaluations=1",
    "curriculum.full_pass=false",
    "curriculum.max_rounds=1",
    "evaluation.every_n_steps=1",
    "warm_start.steps=0",
    "optimizer.learning_rate=1e-5",
    "max_steps=4",
    "data.prompts_per_step=6",
    "data.group_size=2",
)
"""Three levels of reverse_string, for a model that knows some of the short words."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that was shown the words of all levels."""
    folder = tmp_path_factory.mktemp("model")
    given = ("max_steps=0", "warm_start.steps=80", "warm_start.batch_size=24", "data.prompts_per_step=2")
    stages = (STAGES, "curriculum.enable=true", "evaluation.every_n_steps=1")
    loaded = load_config(overrides=[*WORDS, *stages, *given, f"output_dir={folder}"], environ={})
    train(loaded.config, Console(quiet=True))
    return f"model.path={folder / 'final'}"


def lengths(folder: Path) -> dict[int, set[int]]:
    """Lengths of the words that each step has sampled."""
    found = read_trajectories(folder)
    return {step: {len(str(t.ground_truth)) for t in of.trajectories} for step, of in found.items()}


def stages_in(folder: Path) -> dict[int, int]:
    found = read_trajectories(folder)
    return {step: dict(of.meta["curriculum"])["stage"] for step, of in found.items()}  # type: ignore[arg-type]


def state(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "curriculum_state.json").read_text())
    return loaded


def test_promotion_changes_what_the_next_rollout_samples_and_a_replay_follows_the_recording(
    config: MakeConfig, console: Console, tmp_path: Path, model: str
) -> None:
    dump = (model, "debug.enable_data_dump=true", "debug.dump_options.trajectory=true")
    first = config(*THREE, *dump, f"output_dir={tmp_path / 'first'}")
    train(first, console)
    rows = [
        row for row in read_metrics(tmp_path / "first" / "metrics.jsonl") if "curriculum/current_stage" in row
    ]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    recorded = stages_in(Path(first.debug.dump_dir))
    for row in rows[:-1]:
        assert recorded[row["step"]] == row["curriculum/current_stage"]
        assert row["inference/step"] == row["curriculum/current_step"] == row["step"]
        assert row["curriculum/evaluation_count"] == row["step"] + 1
    assert recorded == {0: 0, 1: 1, 2: 2, 3: 2}
    allowed = {0: {3, 4, 5}, 1: {3, 4, 5, 6}, 2: {5, 6, 7, 8}}
    for step, words in lengths(Path(first.debug.dump_dir)).items():
        assert words <= allowed[recorded[step]]
    found = state(tmp_path / "first")
    assert found["current_stage"] == rows[-1]["curriculum/current_stage"]
    for entry in found["stage_advancement_log"]:
        evaluation = next(e for e in found["performance_history"] if e["step"] == entry["step"])
        assert evaluation["stage"] == entry["from_stage"]
        assert entry["to_stage"] == entry["from_stage"] + 1

    mock = (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        f"rollout_worker.trajectory_load_path={first.debug.dump_dir}",
        "evaluation.every_n_steps=0",
    )
    again = config(*THREE, *dump, *mock, f"output_dir={tmp_path / 'again'}")
    train(again, console)
    ours, theirs = DumpReader(first.debug.dump_dir), DumpReader(again.debug.dump_dir)
    assert ours.names() == theirs.names()
    assert all(ours.read(name).checksum() == theirs.read(name).checksum() for name in ours.names())
    assert state(tmp_path / "again")["current_stage"] == recorded[3]
    with pytest.raises(ReplayError, match="was recorded with a curriculum, which decides its prompts"):
        train(config(*THREE, *mock, model, "curriculum.enable=false", "task.eval_size=8"), console)


def test_a_recording_without_a_curriculum_is_not_replayed_with_one(
    config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    dump = (
        "debug.enable_data_dump=true",
        "debug.dump_options.trajectory=true",
        "warm_start.steps=0",
        "max_steps=1",
    )
    first = config(*dump, f"output_dir={tmp_path / 'first'}")
    train(first, console)
    mock = (
        "rollout_worker.type=mock",
        "rollout_worker.need_llm_inference=false",
        "evaluation.every_n_steps=0",
    )
    path = f"rollout_worker.trajectory_load_path={first.debug.dump_dir}"
    with pytest.raises(ReplayError, match=r"was recorded without a curriculum; set curriculum\.enable=false"):
        train(config(*THREE, "warm_start.steps=0", "max_steps=1", *mock, path), console)


@pytest.mark.extended
def test_a_run_that_goes_on_from_a_checkpoint_keeps_its_stage(
    config: MakeConfig, console: Console, tmp_path: Path, model: str
) -> None:
    """Stopped after two steps and resumed, against a run that was never interrupted: the same words and stages."""
    dump = (
        model,
        "debug.enable_data_dump=true",
        "debug.dump_options.trajectory=true",
        "trainer.save_steps=2",
    )
    train(config(*THREE, *dump, f"output_dir={tmp_path / 'whole'}"), console)
    parts = (*THREE, *dump, f"output_dir={tmp_path / 'parts'}")
    train(config(*parts, "max_steps=2"), console)
    assert state(tmp_path / "parts" / "checkpoint-2") == state(tmp_path / "parts")
    train(config(*parts, "trainer.resume_from_checkpoint=latest"), console)
    assert state(tmp_path / "parts") == state(tmp_path / "whole")
    assert state(tmp_path / "parts")["current_stage"] == 2
    steps = [
        [row["step"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("parts", "whole")
    ]
    assert steps[0] == steps[1]
    ours, theirs = (read_trajectories(tmp_path / name / "debug_dump") for name in ("parts", "whole"))
    for step, found in theirs.items():
        assert [t.tokens for t in ours[step].trajectories] == [t.tokens for t in found.trajectories]
        assert ours[step].meta["curriculum"] == found.meta["curriculum"]


def test_off_unless_asked_for(config: MakeConfig, console: Console, tmp_path: Path) -> None:
    run = config("evaluation.every_n_steps=1", "warm_start.steps=0", "max_steps=1")
    train(run, console)
    assert not (Path(run.output_dir) / "curriculum_state.json").exists()
    assert not any(
        name.startswith("curriculum/")
        for row in read_metrics(Path(run.output_dir) / "metrics.jsonl")
        for name in row
    )


ON = ("curriculum.enable=true", "evaluation.every_n_steps=1")
REFUSED: list[tuple[tuple[str, ...], type[RegressError], str]] = [
    (
        ("curriculum.enable=true",),
        ConfigError,
        "curriculum.enable=true never leaves its first stage while evaluation.every_n_steps=0, because only an",
    ),
    (
        (*ON, "curriculum.stages=[{name: a, threshold: 2}]"),
        ConfigError,
        "curriculum.stages[0] (a): threshold=2 must be a pass rate greater than 0 and at most 1",
    ),
    (
        ON,
        TaskError,
        "stage 'foundation' of the curriculum (basic, complexity 0 to 3) has 3 of 12 problems, but needs 8; raise "
        "task.train_size, or widen the stage in curriculum.stages",
    ),
    (
        (*ON, "task.train_size=600", "task.eval_size=4"),
        TaskError,
        "has 0 of 4 problems, but needs 1; raise task.eval_size and evaluation.max_samples, or widen",
    ),
    (
        (*ON, "curriculum.stages=[{name: a, threshold: 0.5}]"),
        ConfigError,
        "a stage takes any level, but task.name=reverse_string makes problems level by level; name the levels",
    ),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("overrides", "kind", "says"), REFUSED)
def test_what_cannot_be(
    overrides: tuple[str, ...], kind: type[RegressError], says: str, config: MakeConfig, console: Console
) -> None:
    with pytest.raises(kind) as caught:
        train(config("data.prompts_per_step=8", *overrides), console)
    assert says in str(caught.value)


def thresholds(environ: dict[str, str], *overrides: str) -> dict[str, float]:

    base = ["curriculum.enable=true", "evaluation.every_n_steps=1", *overrides]
    found = load_config(overrides=base, environ=environ)
    return {stage.name: stage.threshold for stage in found.config.curriculum.read_stages()}


FIRST = "CURRICULUM_PERFORMANCE_THRESHOLD_1"


def test_variables_count_stages_from_1_and_any_key_wins() -> None:
    assert thresholds({FIRST: "0.3"})["foundation"] == 0.3
    assert thresholds({"CURRICULUM_PERFORMANCE_THRESHOLD_6": "0.3"})["comprehensive"] == 0.3
    assert (
        thresholds({FIRST: "0.3", "REGRESS_CURRICULUM__THRESHOLDS__FOUNDATION": "0.4"})["foundation"] == 0.4
    )
    assert thresholds({FIRST: "0.3"}, "curriculum.thresholds.foundation=0.2")["foundation"] == 0.2
    own = "curriculum.stages=[{name: a, threshold: 0.7, levels: [1]}, {name: b, threshold: 0.6, levels: [2]}]"
    assert thresholds({FIRST: "0.3"}, own) == {"a": 0.7, "b": 0.6}
    load_config(overrides=[], environ={FIRST: "no number, and no curriculum"})


def test_variables_beat_a_file_as_every_variable_does(tmp_path: Path) -> None:

    def first(text: str, environ: dict[str, str]) -> list[float]:
        (tmp_path / "mine.yaml").write_text(text)
        found = load_config(str(tmp_path / "mine.yaml"), None, [], environ=environ)
        return [stage.threshold for stage in found.config.curriculum.read_stages()][:2]

    built_in = load_config(config_name="reverse_string_curriculum", environ={FIRST: "0.3"}).config
    assert [stage.threshold for stage in built_in.curriculum.read_stages()] == [0.3, 0.5, 0.5]
    on = "evaluation: {every_n_steps: 1}\ncurriculum:\n  enable: true\n"
    for text in (
        "  stages: [{name: a, threshold: 0.7}, {name: b, threshold: 0.6}]\n",
        "  thresholds: {foundation: 0.7}\n",
    ):
        assert first(on + text, {})[0] == 0.7
        assert first(on + text, {FIRST: "0.3"}) == [0.3, 0.6]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        (FIRST, "65%", f"{FIRST}=65% must be a pass rate greater than 0 and at most 1."),
        (FIRST, "nan", f"{FIRST}=nan must be a pass rate"),
        (
            "CURRICULUM_PERFORMANCE_THRESHOLD_0",
            "0.5",
            "belongs to no stage of the curriculum; they are numbered from 1",
        ),
        (
            "CURRICULUM_PERFORMANCE_THRESHOLD_7",
            "0.5",
            "numbered from 1 to 6, so correct its name or unset it.",
        ),
        ("CURRICULUM_PERFORMANCE_THRESHOLD_x", "0.5", "belongs to no stage"),
    ],
)
def test_variables_that_set_nothing_are_refused(variable: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        thresholds({variable: text})
    assert says in str(caught.value)
