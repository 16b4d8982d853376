"""Flags are aliases of keys: every one names a key, and two values for one key are refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.engine.config import Loaded, load_config
from regress.engine.config.config_loading import flag_entries
from regress.engine.config.config_option import Flag
from regress.engine.config.config_schema import flags_by_name
from regress.errors import ConfigError
from tests.as_subtests import as_subtests

FLAGS = [flag for flag, _ in flags_by_name().values()]
Load = Callable[..., Loaded]

CURRICULUM = ("train", "--config-name", "reverse_string_curriculum", "--print-config")
DOCUMENTED = (
    "wandb no-wandb run-name log-dir wandb-project model-name lr group-size rollouts-per-step train-batch-size "
    "temperature max-length checkpoint-interval seed max-prompts output-dir eval-every-n-steps max-eval-samples "
    "per-device-train-batch-size dataset-path resume-from-checkpoint enable-curriculum save-steps save-total-limit "
    "force-new-wandb-run"
)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_names_a_key_and_takes_its_values(flag: Flag) -> None:
    option = flags_by_name()[flag.name][1]
    assert flag.name == flag.name.lower().replace("_", "-")
    if flag.given is not None:
        (entry,) = flag_entries({flag.name: flag.given}, [])
        option.checked(entry.value, lambda _: entry.origin)


def test_names_are_unique() -> None:
    names = [flag.name for flag in FLAGS]
    assert len(names) == len(set(names))


def test_every_documented_flag_is_there() -> None:
    assert set(DOCUMENTED.split()) <= {flag.name for flag in FLAGS}


@pytest.mark.parametrize(
    ("written", "on"),
    [((), True), (("--enable_curriculum",), True), (("--enable-curriculum", "false"), False)],
)
def test_a_switch_may_have_a_value(written: tuple[str, ...], on: bool) -> None:
    said = CliRunner().invoke(main, [*CURRICULUM, *written]).output
    assert f"curriculum.enable: {str(on).lower()}  #" in said


@as_subtests("flag", FLAGS, ids=lambda flag: flag.name)
def test_help_lists_every_flag_with_its_key(flag: Flag) -> None:
    said = " ".join(CliRunner().invoke(main, ["train", "--help"], terminal_width=200).output.split())
    option = flags_by_name()[flag.name][1]
    metavar = flag.metavar or {int: "N", float: "NUMBER"}.get(option.kind, "")
    words = rf"{', '.join(flag.spellings)}( \[?{re.escape(metavar)}\]?)? Alias of {re.escape(option.key)}"
    assert re.search(words, said), words


@pytest.mark.parametrize("spelling", ["--max-length", "--max_length"])
def test_a_flag_is_the_command_line(spelling: str) -> None:
    arguments = ["train", "--config-name", "reverse_string", spelling, "64", "--lr", "1e-5", "--print-config"]
    said = CliRunner().invoke(main, arguments).output
    assert "data.max_seq_length: 64  # command line --max-length" in said
    assert "optimizer.learning_rate: 1.0e-05  # command line --lr" in said
    assert "data.max_prompt_length: 32  # strategy balanced of data.max_seq_length=64" in said


def test_a_flag_beats_environment_and_file() -> None:
    environ = {"REGRESS_SEED": "5"}
    loaded = load_config(config_name="experiment_base", environ=environ, flags={"seed": "7"})
    assert loaded.config.seed == 7


@pytest.mark.parametrize(
    ("flags", "override", "says"),
    [
        (
            {"lr": "1e-5"},
            "optimizer.learning_rate=1e-4",
            r"--lr gives optimizer\.learning_rate the value 1\.0e-05 and optimizer\.learning_rate=0\.0001 gives it an",
        ),
        (
            {"lr": "1e-5", "learning_rate": "1e-6"},
            None,
            r"--learning-rate gives .* the value 1\.0e-06 and --lr 1e-5 gives it another; leave one of them away",
        ),
        (
            {"lr": "fast"},
            None,
            r"optimizer\.learning_rate=fast \(command line --lr\) must be a finite number",
        ),
        (
            {"group_size": "0"},
            None,
            r"data\.group_size=0 \(command line --group-size\) must be an integer of at lea",
        ),
    ],
)
def test_what_is_refused(flags: dict[str, str], override: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(overrides=[override] if override else [], environ={}, flags=flags)


def test_the_same_value_twice_is_no_contradiction() -> None:
    loaded = load_config(overrides=["optimizer.learning_rate=0.00001"], environ={}, flags={"lr": "1e-5"})
    assert loaded.config.optimizer.learning_rate == 1e-5
