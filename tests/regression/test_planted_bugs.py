"""Bugs planted in a correct trainer of two updates on one rollout, looked for by commands alone, without a baseline."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))
from planted_trainer import BUGS, PACKED, train

from regress.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CLAIM = ("--preset", "dapo", "--set", "algorithm.kl_coef=0.05")
OLD = ("untapped", "tapped", "classified")
FIRST = {
    "uncentred": "loss",
    "positions": "",
    "kl-sign": "loss",
    "recomputed": "loss",
    "mean-of-means": "loss",
    "leak": "log_probs",
}
"""Quantity that breaks first, where old log-probs are not recorded; empty where the command says what is wrong."""

Dump = Callable[..., Path]


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """A function that trains once with each of its arguments, and returns the dump."""
    known: dict[str, Path] = {}

    def made(bug: str | None = None, **options: Any) -> Path:
        name = json.dumps([bug, options], default=str)
        if name not in known:
            known[name] = tmp_path_factory.mktemp("planted") / "dump"
            train(known[name], bug, packed=bug in PACKED, **options)
        return known[name]

    return made


def oracle(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["oracle", str(folder), *arguments])


def extended(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.extended)


LAYOUTS = [
    ({}, CLAIM),
    ({}, ()),
    ({"old": "classified", "minis": True}, CLAIM),
    extended({"old": "classified"}, CLAIM),
    extended({"old": "tapped"}, CLAIM),
    extended({"old": "tapped"}, ()),
    extended({"minis": True}, CLAIM),
    extended({"minis": True}, ()),
    extended({"minis": True, "rollout_tapped": "first update"}, CLAIM),
    extended({"minis": True, "rollout_tapped": "its own", "old": "tapped"}, CLAIM),
    extended({"rollouts": 2}, CLAIM),
    extended({"rollouts": 2, "old": "classified", "minis": True}, ()),
]


@pytest.mark.parametrize(("options", "claim"), LAYOUTS)
def test_oracle_passes_the_correct_trainer(
    dump: Dump, options: dict[str, Any], claim: tuple[str, ...]
) -> None:
    found = oracle(dump(**options), *claim)
    assert found.exit_code == 0, found.output


@pytest.mark.extended
@pytest.mark.parametrize("bug", PACKED)
def test_oracle_passes_the_correct_packed_trainer(tmp_path: Path, bug: str) -> None:
    train(tmp_path / "dump", packed=True)
    assert oracle(tmp_path / "dump", *CLAIM).exit_code == 0


@pytest.mark.parametrize("bug", [bug if bug == "recomputed" else extended(bug) for bug in BUGS])
def test_oracle_finds_each_bug(dump: Dump, bug: str) -> None:
    found = oracle(dump(bug), *CLAIM)
    assert found.exit_code == (1 if FIRST[bug] else 2), found.output
    assert (
        f"oracle: first {FIRST[bug]}" in found.output
        if FIRST[bug]
        else "restart the position ids" in found.output
    )


@pytest.mark.parametrize("old", [extended("tapped"), "classified"])
def test_recorded_old_log_probs_are_judged(dump: Dump, old: str) -> None:
    found = oracle(dump("recomputed", old=old), *CLAIM)
    assert found.exit_code == 1
    assert "oracle: first old_log_probs" in found.output


@pytest.mark.extended
@pytest.mark.parametrize("bug", BUGS)
def test_oracle_without_a_claim_finds_each_bug_or_says_that_it_cannot(dump: Dump, bug: str) -> None:
    found = oracle(dump(bug))
    assert found.exit_code in (1, 2), found.output


def test_oracle_says_what_it_took_for_a_rollout(dump: Dump) -> None:
    one = oracle(dump(), *CLAIM).output
    assert "step 1 was taken to train on the rollout of an earlier one, step 0" in one

    options = {"minis": True, "rollout_tapped": "its own"}
    parts = oracle(dump(**options), *CLAIM)
    assert "step 1 was taken to train on a rollout of its own" in parts.output
    assert "tap old_log_probs" in parts.output


@pytest.mark.parametrize(
    ("bug", "true"),
    [(None, False), extended(None, True), extended("kl-sign", False), extended("kl-sign", True)],
)
def test_float32_inside_of_a_float64_model_is_found_and_said(dump: Dump, bug: str | None, true: bool) -> None:
    found = oracle(dump(bug, dtype=torch.float64, true=true), *CLAIM)
    assert found.exit_code == (0 if bug is None else 1), found.output
    said = "the model is of float64, but aten._to_copy in model.rotary_emb" in found.output
    assert said == ("train under regress.true_float64()" in found.output) == (not true)


def test_oracle_prints_the_objective_and_a_command_that_can_be_run(dump: Dump) -> None:
    found = oracle(dump("recomputed"), *CLAIM).output
    assert "loss=ppo_clip, clip_low=0.2, clip_high=0.28" in found
    assert "kl_coef=0.05, kl_estimator=k3, old_log_probs=recompute" in found

    (line,) = (line for line in found.splitlines() if line.startswith("next: "))
    again = CliRunner().invoke(main, shlex.split(line.removeprefix("next: "))[1:])
    assert again.exit_code == 1, again.output
