"""Bugs planted in a correct trainer of two updates on one rollout, looked for by commands alone, without a baseline."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))
from planted_trainer import BUGS, PACKED, advantages_of, rollout, train

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
        options = {"packed": bug in PACKED, **options}
        name = json.dumps([bug, options], default=str)
        if name not in known:
            known[name] = tmp_path_factory.mktemp("planted") / "dump"
            train(known[name], bug, **options)
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
    extended({"packed": True}, CLAIM),
    extended({"rollouts": 2}, CLAIM),
    extended({"rollouts": 2, "old": "classified", "minis": True}, ()),
]


@pytest.mark.parametrize(("options", "claim"), LAYOUTS)
def test_oracle_passes_the_correct_trainer(
    dump: Dump, options: dict[str, Any], claim: tuple[str, ...]
) -> None:
    found = oracle(dump(**options), *claim)
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("bug", [extended(bug) for bug in BUGS])
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


@pytest.mark.extended
def test_oracle_prints_the_objective_and_a_command_that_can_be_run(dump: Dump) -> None:
    result = oracle(dump("recomputed"), *CLAIM)
    assert result.exit_code == 1
    found = result.output
    assert "loss=ppo_clip, clip_low=0.2, clip_high=0.28" in found
    assert "kl_coef=0.05, kl_estimator=k3, old_log_probs=recompute" in found

    (line,) = (line for line in found.splitlines() if line.startswith("next: "))
    again = CliRunner().invoke(main, shlex.split(line.removeprefix("next: "))[1:])
    assert again.exit_code == 1, again.output


EXPLAINED = {
    "uncentred": "preset:        departure: the preset that is expected, dapo, would have other gradients",
    "positions": "",
    "kl-sign": "kl:            departure: k3 with coefficient -0.05",
    "recomputed": "every ratio is 1",
    "mean-of-means": "denominator_scope 'microbatch' in place of 'global'",
    "leak": "",
}
"""Words of `regress explain --preset dapo`; empty where the loss is as it should be and other tokens were read."""
DEPARTURES = ("uncentred", "positions", "kl-sign", "mean-of-means")
"""Bugs that the loss of an update shows by itself; old log-probs and what was attended to are not in it."""


@pytest.mark.parametrize(
    "bug", [extended(None), *(bug if bug == "kl-sign" else extended(bug) for bug in BUGS)]
)
def test_explain_ends_with_1_where_the_loss_departs(dump: Dump, bug: str | None) -> None:
    folder = dump(bug, old="tapped")
    found = CliRunner().invoke(main, ["explain", str(folder), "--preset", "dapo"])
    assert found.exit_code == int(bug in DEPARTURES), found.output
    assert EXPLAINED.get(bug or "", "") in found.output


COMPARED = {
    "uncentred": ("loss", ""),
    "positions": ("coverage", "samples-in-one"),
    "kl-sign": ("loss", ""),
    "recomputed": ("old_log_probs", "old-is-current"),
    "mean-of-means": ("loss", "token-gradient-denominators"),
    "leak": ("log_probs", "packed-leak"),
}
"""Quantity that breaks first, and the rule that names the cause, if it is the same one both ways round."""


@pytest.mark.parametrize("turned", [False, extended(True)], ids=["correct first", "bug first"])
@pytest.mark.parametrize("bug", [bug if bug == "positions" else extended(bug) for bug in BUGS])
def test_compare_finds_each_bug_both_ways_round(dump: Dump, bug: str, turned: bool) -> None:
    sides = [str(dump(old="tapped", packed=bug in PACKED)), str(dump(bug, old="tapped"))]
    found = CliRunner().invoke(main, ["compare", *(reversed(sides) if turned else sides)])
    first, rule = COMPARED[bug]
    assert found.exit_code == 1, found.output
    assert f"compare: first {first}" in found.output
    assert f"(rule {rule}" in found.output
    assert "two different runs" not in found.output


def test_dump_check_says_that_a_packed_row_is_several_samples(dump: Dump) -> None:
    found = CliRunner().invoke(main, ["dump", "check", str(dump("positions", old="tapped"))])
    assert found.exit_code == 1, found.output
    assert "is 3 samples, one behind the other (0-0/0, 0-0/1, 0-0/2)" in found.output
    assert "(rule samples-in-one" in found.output


@pytest.mark.parametrize(("bug", "packed"), [(None, False), extended(None, True), ("uncentred", False)])
def test_dump_check_adds_up_the_advantages_of_each_group_that_was_tapped(
    dump: Dump, bug: str | None, packed: bool
) -> None:
    found = CliRunner().invoke(main, ["dump", "check", str(dump(bug, packed=packed, advantages=True))])
    assert found.exit_code == 0, found.output
    said = "not checked: advantages of a group add up to 0"
    assert (said in found.output) == (bug is not None)
    assert ("(advantages, token_ids" in found.output) == (bug is None)
    if bug:
        sums = advantages_of(rollout(0), bug).reshape(2, -1).sum(1)
        (told,) = re.findall(r"those of group 0-(\d) add up to (\S+);", found.output)
        assert float(told[1]) == pytest.approx(float(sums[int(told[0])]), rel=1e-5)
        assert "regress explain tells their formula (and at 1 more place)" in found.output


@pytest.mark.extended
def test_dump_check_adds_up_groups_of_updates_on_a_part_of_the_rollout(dump: Dump) -> None:
    found = CliRunner().invoke(main, ["dump", "check", str(dump(minis=True, advantages=True))])
    assert found.exit_code == 0, found.output
    assert "(advantages, token_ids" in found.output
    assert "samples of group" not in found.output


@pytest.mark.extended
def test_compare_and_dump_check_pass_the_correct_trainer_in_another_layout(dump: Dump) -> None:
    sides = [str(dump(old="tapped", packed=packed)) for packed in (False, True)]
    assert CliRunner().invoke(main, ["compare", *sides]).exit_code == 0
    assert CliRunner().invoke(main, ["dump", "check", sides[0]]).exit_code == 0
