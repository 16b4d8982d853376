"""All mistakes of a configuration are named at once, the first as if it were alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.engine.config import load_config
from regress.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a configuration of two impossible values and an unknown key."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("seed: -1\nalgorithm:\n  clip_high: many\noptimizer: {lr: 1}\n")


def told(*overrides: str, name: str | None = None) -> tuple[str, list[str]]:
    with pytest.raises(ConfigError) as refused:
        load_config(
            config_name=name, overrides=overrides, environ={"REGRESS_DATA__GROUP_SIZE": "0"} if name else {}
        )
    return str(refused.value), getattr(refused.value, "__notes__", [])


def test_wrong_keys_and_values_of_every_layer_are_named() -> None:
    first, others = told("max_steps=x", "nope=1", name="run")
    assert first.startswith("optimizer.lr=1 (file run.yaml:4) is not a key of the configuration; ")
    assert others == [
        "nope=1 (command line) is not a key of the configuration; the nearest valid key is trainer.type.",
        "seed=-1 must be an integer of at least 0 and at most 4294967295 @ seed (run.yaml:1)",
        "max_steps=x must be an integer of at least 0 @ max_steps (command line)",
        "data.group_size=0 must be an integer of at least 1 @ data.group_size (environment REGRESS_DATA__GROUP_SIZE)",
        "algorithm.clip_high=many must be a finite number of at least 0 @ algorithm.clip_high (run.yaml:3)",
    ]


def test_rules_of_several_sections_are_named() -> None:
    first, others = told("trainer.mini_batch_size=7", "task.max_turns=3", "model.lora.rank_pattern={q: 0}")
    assert first.startswith("model.lora.rank_pattern={q: 0} means nothing with model.lora.r=null")
    assert [note.rpartition(" @ ")[2] for note in others] == [
        "model.lora.rank_pattern.q (command line)",
        "task.max_turns (command line)",
        "trainer.mini_batch_size (command line)",
    ]


def test_rules_of_the_objective_are_named() -> None:
    assert told("algorithm.ddof=2", "algorithm.gamma=2") == (
        "algorithm.ddof=2 is not possible: set it to 0 (population) or 1 (sample).",
        ["algorithm.gamma=2 is not possible: a discount is at most 1 @ algorithm.gamma (command line)"],
    )


def test_one_mistake_is_one_sentence() -> None:
    assert told("seed=-1") == (
        "seed=-1 (command line) must be an integer of at least 0 and at most 4294967295.",
        [],
    )


def test_the_command_prints_them_in_one_line() -> None:
    result = CliRunner().invoke(main, ["train", "seed=-1", "max_steps=-1"])
    assert result.exit_code == 2
    assert result.output == (
        "error: seed=-1 (command line) must be an integer of at least 0 and at most 4294967295. | "
        "max_steps=-1 must be an integer of at least 0 @ max_steps (command line)\n"
    )
