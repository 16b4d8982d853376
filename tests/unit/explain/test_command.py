"""`regress explain`: what it reads, how it ends, and what it may not contradict."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor
from trainer_bench import Batch, Loss, Run, World, record, record_updates, trl, trl_advantages

from regress.cli import main


def explain(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def told(folder: Path, *more: object) -> tuple[int, dict[str, Any], str]:
    """Run the command and return its exit code, its JSON and its output."""
    run = explain(folder, *more, "--json", folder.parent / "e.json")
    return run.exit_code, json.loads((folder.parent / "e.json").read_text()), run.output


def departures(tree: dict[str, Any]) -> set[str]:
    return {statement["subject"] for statement in tree["statements"] if statement["departure"]}


def of_other_groups(world: World) -> Tensor:
    """Advantages whose groups are every fourth sample, in place of four in a row."""
    rewards = world.rewards.view(4, 4).T
    centred = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return centred.T.flatten()


def rounded(values: Tensor) -> Tensor:
    return values.bfloat16().float()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("advantages", "code"),
    [
        pytest.param(trl_advantages, 0, id="right"),
        pytest.param(of_other_groups, 1, id="wrong-groups"),
        pytest.param(lambda world: -trl_advantages(world), 1, id="sign"),
        pytest.param(lambda world: trl_advantages(world).roll(1), 1, id="other-samples"),
        pytest.param(lambda world: rounded(trl_advantages(world)), 0, id="bfloat16"),
        pytest.param(
            lambda world: (
                trl_advantages(world, "none") / (world.rewards.view(4, 4).std(1) + 0.03).repeat_interleave(4)
            ),
            0,
            id="another-constant",
        ),
        pytest.param(lambda world: world.rewards - world.greedy, 0, id="a-baseline-of-its-own"),
    ],
)
def test_recorded_advantages_that_no_formula_of_the_rewards_gives_are_a_departure(
    advantages: Callable[[World], Tensor], code: int, tmp_path: Path
) -> None:
    world = World(Run(advantages=True))
    found, tree, output = told(record(world, trl(), advantages(world), tmp_path / "dump"))
    assert found == code, output
    assert departures(tree) == ({"advantages"} if code else set()), output
    assert tree["exit_code"] == code
    if code:
        assert "no known formula of the recorded rewards gives them" in output


def test_a_kl_that_drives_the_policy_away_is_a_departure(tmp_path: Path) -> None:
    world = World(Run(accumulation=2))
    dump = record(world, trl(beta=-0.05), trl_advantages(world), tmp_path / "dump")
    code, tree, output = told(dump)
    assert code == 1
    assert departures(tree) == {"kl"}, output
    assert "drives the policy away from the reference" in output
    code, tree, output = told(dump, "--preset", "trl:dapo")
    assert code == 1, output
    assert "trl:dapo cannot be evaluated" in output


def test_a_preset_that_cannot_be_evaluated_is_an_error(tmp_path: Path) -> None:
    world = World(Run())
    code, tree, output = told(
        record(world, trl(), trl_advantages(world), tmp_path / "dump"), "--preset", "verl:gae"
    )
    assert code == 2
    assert "error: verl:gae cannot be evaluated: values_K is missing" in output
    assert tree["error"]["rule"].startswith("verl:gae cannot be evaluated")
    assert tree["exit_code"] == 2
    assert tree["statements"]  # what is known all the same


@pytest.mark.parametrize(
    ("run", "preset", "code", "words"),
    [
        (Run(), "trl:dapo", 0, "the same gradients as trl:dapo"),
        (Run(), "trl:grpo", 1, "trl:grpo, would have other gradients; it has them with aggregation"),
        (
            Run(rewards=False),
            "trl:dapo",
            1,
            "not determinable from this dump: the dump has no trajectories with rewards",
        ),
    ],
    ids=["followed", "departs", "unknown"],
)
def test_the_preset_that_is_asked_for_decides(
    run: Run, preset: str, code: int, words: str, tmp_path: Path
) -> None:
    world = World(run)
    found, tree, output = told(
        record(world, trl(), trl_advantages(world), tmp_path / "dump"), "--preset", preset
    )
    assert found == code, output
    assert words in output
    assert tree["preset"] == preset
    assert ("preset" in tree["undetermined"]) == ("not determinable" in words)


def test_a_preset_is_not_followed_where_nothing_explains_the_gradients(tmp_path: Path) -> None:
    def odd(world: World, batch: Batch, facts: dict[str, Any]) -> Tensor:
        place = batch.mask.cumsum(1)
        token = -batch.advantages[:, None] * batch.log_probs * batch.mask / (1 + 0.1 * place)
        total: Tensor = token.sum() / world.mask.sum()
        return total

    world = World(Run())
    dump = record(world, odd, trl_advantages(world), tmp_path / "dump")
    assert told(dump)[0] == 0  # nothing is known, and nothing was asked
    code, _, output = told(dump, "--preset", "trl:dapo")
    assert code == 1
    assert "the preset that is expected, trl:dapo, would have other gradients" in output


def two_updates(folder: Path, loss: Loss) -> Path:
    """Two updates on the same rollouts: the first on policy, the second not."""
    worlds = [World(Run()), World(Run(off_policy=0.3))]
    return record_updates(folder, *((world, loss, trl_advantages(world)) for world in worlds))


def test_every_update_is_read_and_says_what_it_shows(tmp_path: Path) -> None:
    """The clip does not show where every ratio is 1."""
    code, tree, output = told(two_updates(tmp_path / "dump", trl(fault="clip sides")))
    assert code == 1
    assert departures(tree) == {"clip"}, output
    assert [(one["step"], one["update"]) for one in tree["updates"]] == [(0, 0), (0, 1)]
    assert "clip" not in tree["updates"][0]["shown"]
    assert {"ratio", "clip"} <= set(tree["updates"][1]["shown"])
    assert {"mask", "advantages"} <= set(tree["updates"][0]["shown"])
    assert {one["update"] for one in tree["statements"]} == {0, 1}
    assert not {"ratio", "clip"} & set(tree["undetermined"])
    assert "all 2 updates show:" in output
    assert "  step 0, update 1: ratio, clip" in output
    assert output.count("exactly the loss mask") == 1  # what is as before is not said again
    first = explain(tmp_path / "dump", "--update", 0)
    assert first.exit_code == 0, first.output
    assert "update 1" not in first.output


def test_the_temperature_that_was_found_is_applied(tmp_path: Path) -> None:
    """Log-probs recorded at 1, a loss at 0.8: on policy those before the update are the policy's own."""
    world = World(Run(temperature=0.8, recorded=1.0))
    code, tree, output = told(record(world, trl(beta=0.05), trl_advantages(world), tmp_path / "dump"))
    assert code == 0, output
    said = {one["subject"]: one for one in tree["statements"]}
    assert said["temperature"]["values"] == [pytest.approx(0.8, rel=1e-3)]
    assert "k3 times the ratio" in said["kl"]["values"]
    assert "advantages" in said
    assert "ratio" not in said  # it is taken for 1, not seen
    assert "record with temperature=0.8" in tree["undetermined"]["ratio"]


OTHER = "log-probs of the policy were recorded at temperature 1 alone"


@pytest.mark.parametrize("beta", [0.0, 0.05], ids=["", "kl"])
def test_nothing_is_judged_off_policy_by_log_probs_of_another_temperature(
    beta: float, tmp_path: Path
) -> None:
    """Clipped tokens are not a fault of the mask, and a fit with ratio 1 that fails says nothing of the formulas."""
    world = World(Run(off_policy=0.3, temperature=0.8, recorded=1.0))
    dump = record(world, trl(beta=beta), trl_advantages(world), tmp_path / "dump")
    code, tree, output = told(dump)
    assert code == 0, output
    assert not departures(tree), output
    assert "no known combination" not in output
    for subject in ("advantages", "aggregation", "ratio", "kl"):
        assert tree["undetermined"][subject].startswith(OTHER), output
        assert tree["undetermined"][subject].endswith("record with temperature=0.8")
    code, tree, output = told(dump, "--preset", "trl:dapo")
    assert code == 1
    assert not departures(tree), output
    assert tree["undetermined"]["preset"].startswith(OTHER), output


@pytest.mark.one_in(2)
@pytest.mark.parametrize("run", [Run(off_policy=0.3, accumulation=2), Run()], ids=["off", "on"])
def test_log_probs_are_recomputed_from_recorded_logits(run: Run, tmp_path: Path) -> None:
    """Explain the same as by log-probs that were recorded at the temperature of the loss."""
    said = []
    for name, more in (("right", {}), ("logits", {"recorded": 1.0, "logits": True})):
        world = World(replace(run, temperature=0.8, **more))
        dump = record(world, trl(beta=0.05), trl_advantages(world), tmp_path / name / "dump")
        code, tree, output = told(dump)
        assert code == 0, output
        said.append({one["subject"]: one["text"] for one in tree["statements"]})
    assert said[0] == said[1]
    assert "coefficient 0.05" in said[0]["kl"]


def test_outputs_that_are_no_logits_of_the_log_probs_are_not_taken_for_them(tmp_path: Path) -> None:
    """Those before a soft cap."""
    run = Run(off_policy=0.3, temperature=0.8, recorded=1.0, logits=True)
    world = World(run)
    dump = record(world, trl(), trl_advantages(world), tmp_path / "dump", logits=lambda z: 3 * z)
    code, tree, output = told(dump)
    assert code == 0, output
    assert tree["undetermined"]["ratio"].startswith(OTHER)


@pytest.mark.parametrize(
    ("off_policy", "beta"), [(0.0, 0.0), (0.0, 0.05), (0.3, 0.0)], ids=["on", "kl", "off"]
)
def test_policies_recorded_at_another_temperature_tell_at_most_that_they_agree(
    off_policy: float, beta: float, tmp_path: Path
) -> None:
    """Equal log-probs at any temperature are those of one policy; the reference's say nothing of a KL."""
    world = World(Run(off_policy=off_policy, temperature=0.8, recorded=1.0, classified=True))
    code, tree, output = told(record(world, trl(beta=beta), trl_advantages(world), tmp_path / "dump"))
    assert code == 0, output
    said = {one["subject"] for one in tree["statements"]}
    assert "no known combination" not in output
    if off_policy or beta:
        reason = "log-probs of the policy and the old policy and the reference were recorded at temperature 1"
        assert tree["undetermined"]["kl"].startswith(reason), output
        assert not {"advantages", "aggregation", "kl", "preset"} & said
    else:
        assert {"advantages", "aggregation", "ratio", "kl", "preset"} <= said, output


def test_tokens_without_a_gradient_may_be_clipped_where_no_old_log_probs_are_tapped(tmp_path: Path) -> None:
    world = World(Run(off_policy=0.3, old=False))
    code, tree, output = told(record(world, trl(), trl_advantages(world), tmp_path / "dump"))
    assert code == 0, output
    assert "or are clipped" in output
    assert tree["undetermined"]["ratio"] == "tap old_log_probs"


def test_a_mask_with_positions_beyond_the_end_is_not_the_expected_one(tmp_path: Path) -> None:
    world = World(Run(strays=13))
    code, _, output = told(record(world, trl(), trl_advantages(world), tmp_path / "dump"))
    assert code == 1
    assert "13 positions that predict no token of their sample have a gradient" in output
    assert "exactly the loss mask" not in output
    assert "in this update" not in output  # a preset has no such gradients


@pytest.mark.parametrize("source", ["golden:dr_grpo", "golden/dr_grpo"])
def test_a_golden_case_is_explained(source: str) -> None:
    run = explain(source, "--step", 0)
    assert run.exit_code == 0, run.output
    assert "the same gradients as dr_grpo" in run.output


def test_a_preset_is_not_said_of_tokens_that_the_mask_lost(tmp_path: Path) -> None:
    world = World(Run(accumulation=2))
    dump = record(world, trl("grpo", fault="mask off by one"), trl_advantages(world), tmp_path / "dump")
    code, _, output = told(dump)
    assert code == 1
    assert "the same gradients as" in output
    assert "at the tokens of this update that have a gradient" in output


GOLDEN = sorted(path.parent.name for path in (Path(__file__).parents[3] / "golden").glob("*/manifest.json"))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in ("geo_mean", "on_policy") else pytest.mark.extended)
        for name in GOLDEN
    ],
)
def test_a_healthy_case_has_no_departure(case: str) -> None:
    run = explain(f"golden:{case}")
    assert run.exit_code == 0, run.output


def test_a_weight_for_the_sampler_is_part_of_the_policy_term() -> None:
    output = explain("golden:cispo").output
    assert "the ratio of the token, times the weight for the sampler" in output
    assert "not determinable from this dump: no known combination" not in output


def test_a_golden_case_in_place_of_a_dump_is_named() -> None:
    run = CliRunner().invoke(main, ["dump", "diff", "golden/dr_grpo", "golden/dense"])
    assert run.exit_code == 2
    assert "is a golden case, and a dump was asked for" in run.output


def test_nothing_is_read_from_the_gradients_of_one_sample(tmp_path: Path) -> None:
    """All but one sample are clipped: any weights fit the rest."""

    def one(world: World, batch: Batch, facts: dict[str, Any]) -> Tensor:
        kept = torch.tensor([float(sample == 5) for sample in batch.samples])[:, None]
        token = -batch.advantages[:, None] * batch.log_probs * batch.mask * kept
        total: Tensor = token.sum() / world.mask.sum() * 0.37
        return total

    world = World(Run(off_policy=0.3))
    _, tree, output = told(record(world, one, trl_advantages(world), tmp_path / "dump"))
    assert {"aggregation", "advantages"} <= set(tree["undetermined"]), output
