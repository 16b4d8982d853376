"""Lines that a run prints, as its documents show them, and refusals of recordings in the way or of another program."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from regress.engine import run_log, training_run
from regress.engine.config.config_schema import Config
from regress.engine.training_run import train
from regress.errors import DumpError

MakeConfig = Callable[..., Config]


def said(config: Config, encoding: str = "utf-8") -> list[str]:
    """The lines of a whole run."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    train(config, Console(file=stream, width=400))
    return raw.getvalue().decode(encoding).splitlines()


def mock(folder: Path, mode: str) -> tuple[str, ...]:
    return (
        *("rollout_mock.enable=true", f"rollout_mock.mode={mode}", f"rollout_mock.dump_dir={folder}"),
        "evaluation.every_n_steps=2",
    )


def test_recording_and_replay_say_what_they_do(config: MakeConfig, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    lines = said(config(*mock(folder, "dump")))
    assert f"[Rollout Mock] Rollout Mock enabled: mode=dump, dir={folder}" in lines
    assert any(
        re.match(r"\[Rollout Mock\] disk: up to .* a step, .* for max_steps=2; .* are free", line)
        for line in lines
    )
    dumped = [line for line in lines if " Dumped step " in line]
    for step, split, samples in [(0, "train", 8), (1, "train", 8), (0, "val", 4), (2, "val", 4)]:
        path = folder / split / f"step_{step:06d}.safetensors"
        size = run_log.megabytes(path.stat().st_size)
        line = f"[Rollout Mock] Dumped step {step}: {path} (samples={samples}, size={size})"
        assert dumped.count(line) == 1
    loaded = [line for line in said(config(*mock(folder, "mock"))) if " Loaded step " in line]
    assert sorted(loaded) == sorted(
        line.replace("Dumped", "Loaded").partition(", size")[0] + ")"
        for line in dumped
        if "_samples" not in line
    )


def test_a_resumed_run_says_its_stage(config: MakeConfig, tmp_path: Path) -> None:
    stages = "curriculum.stages=[{name: short, levels: [basic], threshold: 0.9}]"
    on = (stages, "curriculum.enable=true", "evaluation.every_n_steps=1", "trainer.save_steps=1")
    begun = said(config(*on, f"output_dir={tmp_path}", "max_steps=1"))
    assert f"{run_log.CURRICULUM}: step 0: stage short (1 of 1, round 1)" in begun
    again = said(
        config(*on, f"output_dir={tmp_path}", "max_steps=2", "trainer.resume_from_checkpoint=latest")
    )
    assert f"{run_log.CURRICULUM}: step 1: stage short (1 of 1, round 1)" in again


def test_the_estimate_is_no_less_than_what_is_written(config: MakeConfig, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    asked = config(*mock(folder, "dump"))
    train(asked, Console(quiet=True))
    step, whole = training_run.recording_size(asked)
    sizes = [path.stat().st_size for path in folder.glob("train/*")]
    assert max(sizes) <= step
    assert sum(path.stat().st_size for path in folder.glob("*/step_*")) <= whole


def test_too_little_space_is_a_warning(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        free = 10

    records: list[logging.LogRecord] = []

    monkeypatch.setattr(training_run.shutil, "disk_usage", lambda path: Full)
    monkeypatch.setattr(run_log.LOGGER, "handle", records.append)
    training_run.log_estimate(config(*mock(tmp_path / "deep" / "down", "dump")))
    (record,) = records
    assert record.levelno == logging.WARNING
    assert "10 bytes are free" in record.getMessage()


def test_lengths_are_said_with_the_words_that_logs_are_searched_for(
    config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    asked = config("max_steps=0", "data.max_seq_length=64", "data.length_allocation_strategy=prompt_heavy")
    found = [line for line in said(asked) if "🔧 同步长度配置" in line]
    assert len(found) == 1
    assert found[0].endswith(
        "data.max_prompt_length=38 data.max_completion_length=26 data.max_seq_length=64 (prompt_heavy)"
    )
    assert any(r"\u540c" in line for line in said(asked, "ascii")), "a console of few characters gets escapes"


def test_nothing_is_printed_after_the_run_or_by_other_ranks() -> None:
    def printed(main: bool) -> str:
        stream = io.StringIO()
        with run_log.printed(Console(file=stream), main):
            run_log.LOGGER.info("within")
        run_log.LOGGER.info("after")
        return stream.getvalue()

    assert printed(main=True) == "within\n"
    assert printed(main=False) == ""


@pytest.mark.parametrize(
    ("first", "key"),
    [
        (("rollout_mock.enable=true", "rollout_mock.dump_dir={}"), "rollout_mock.overwrite=true"),
        (
            ("debug.enable_data_dump=true", "debug.dump_options.loss=true", "debug.dump_dir={}"),
            "debug.overwrite=true",
        ),
    ],
)
def test_recording_twice_names_the_key_that_helps(
    first: tuple[str, ...], key: str, config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    asked = [part.format(tmp_path / "dump") for part in first]
    train(config("max_steps=1", *asked), console)
    with pytest.raises(DumpError, match=rf"already holds a dump .*ask for overwriting \({re.escape(key)}\)"):
        train(config("max_steps=1", *asked), console)
    train(config("max_steps=1", *asked, key), console)


@pytest.mark.parametrize("path", ["", "train", "train/step_000000.pkl"])
def test_recordings_of_roll_are_said_to_be_rolls(
    path: str, config: MakeConfig, console: Console, tmp_path: Path
) -> None:
    file = tmp_path / "rolls" / "train" / "step_000000.pkl"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    asked: dict[str, Any] = {
        "rollout_worker": (
            *("rollout_worker.type=mock", "rollout_worker.need_llm_inference=false"),
            f"rollout_worker.trajectory_load_path={tmp_path / 'rolls' / path}",
        )
    }
    if path == "":
        asked["rollout_mock"] = mock(tmp_path / "rolls", "mock")
    for overrides in asked.values():
        with pytest.raises(
            DumpError, match=r"step_000000\.pkl is a rollout that ROLL has pickled: .* never loaded"
        ):
            train(config(*overrides), console)
