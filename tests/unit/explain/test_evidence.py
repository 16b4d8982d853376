"""`explain_dump` says what the records tell, and is silent or refuses where they do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from trainer_bench import Run, World, record, trl, trl_advantages

from regress import explain_dump
from regress.cli import main
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording, tap
from regress.errors import CompareError


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("dapo", "token-mean"), ("grpo", "seq-mean-token-mean")]
)
def test_groups_alone_tell_the_weights(loss_type: str, aggregation: str, tmp_path: Path) -> None:
    """Neither rewards nor advantages: samples with one prompt, whose centred advantages sum to 0."""
    world = World(Run(rewards=False, accumulation=2))
    found = explain_dump(record(world, trl(loss_type), trl_advantages(world), tmp_path / "dump"))
    weights = found.about("weights")
    assert weights is not None, found.to_text()
    assert set(weights.values) & {aggregation} or loss_type == "dapo"
    assert ("seq-mean-token-mean" in weights.values) == (loss_type == "grpo")
    denominator = found.about("aggregation")
    assert denominator is not None, found.to_text()
    assert f"{aggregation}/global" in denominator.values
    assert found.about("advantages") is None
    assert "tap_trajectories" in found.undetermined["advantages"]


def test_advantages_that_are_not_centred_tell_nothing_without_rewards(tmp_path: Path) -> None:
    world = World(Run(rewards=False))
    found = explain_dump(record(world, trl(), world.rewards, tmp_path / "dump"))
    assert found.about("weights") is None
    assert found.about("aggregation") is None


def test_recorded_advantages_need_no_rewards_and_get_the_name_of_their_rule_with_them(tmp_path: Path) -> None:
    for rewards in (False, True):
        world = World(Run(rewards=rewards, advantages=True, accumulation=2))
        found = explain_dump(record(world, trl(), trl_advantages(world), tmp_path / str(rewards)))
        advantages, aggregation = found.about("advantages"), found.about("aggregation")
        assert advantages is not None, found.to_text()
        assert aggregation is not None
        assert "token-mean/global" in aggregation.values
        assert advantages.text.startswith("as recorded")
        assert ("deviation of the group (sample deviation)" in advantages.text) == rewards


def test_noise_makes_an_explanation_silent_and_not_wrong(tmp_path: Path) -> None:
    """Gradients in bfloat16: what is said holds, what cannot be told is not said."""
    world = World(Run(accumulation=2, coarse=True))
    found = explain_dump(record(world, trl("dapo"), trl_advantages(world), tmp_path / "dump"))
    said = {statement.subject: statement for statement in found.statements}
    if "aggregation" in said:
        assert "token-mean/global" in said["aggregation"].values
    if "entropy" in said:
        assert said["entropy"].values == ("none",)
    assert not found.departures


def test_a_dump_without_token_gradients_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path / "dump", options={"loss": True})), at(step=0):
        tap("loss", loss=1.0)
    with pytest.raises(CompareError, match=r"has no token gradients.*token_gradient=True"):
        explain_dump(tmp_path / "dump")


def test_an_explanation_is_plain_json_also_where_a_bound_is_open(tmp_path: Path) -> None:
    world = World(Run(off_policy=0.02))  # nothing is clipped, so that nothing bounds the clip range
    found = explain_dump(record(world, trl(), trl_advantages(world), tmp_path / "dump"))
    clip = found.about("clip")
    assert clip is not None, found.to_text()
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["statements"]


def test_the_command_prints_and_writes_the_explanation(tmp_path: Path) -> None:
    world = World(Run())
    record(world, trl(), trl_advantages(world), tmp_path / "dump")
    run = CliRunner().invoke(main, ["explain", str(tmp_path / "dump"), "--output", str(tmp_path / "e.json")])
    assert run.exit_code == 0, run.output
    assert "logits are divided by 1" in run.output
    told = json.loads((tmp_path / "e.json").read_text())
    assert {s["subject"] for s in told["statements"]} >= {"temperature", "mask", "aggregation", "advantages"}
    record(World(Run()), trl(fault="mask shifted"), trl_advantages(world), tmp_path / "wrong")
    assert CliRunner().invoke(main, ["explain", str(tmp_path / "wrong")]).exit_code == 1
    none = CliRunner().invoke(main, ["explain", str(tmp_path / "none")])
    assert none.exit_code == 2
    assert len(none.output.strip().splitlines()) == 1


@pytest.mark.parametrize("rewards", [True, False])
def test_tokens_of_no_advantage_are_no_evidence_about_the_mask(rewards: bool, tmp_path: Path) -> None:
    """A group of equal rewards keeps what rounding leaves of its advantages, at some of its tokens."""
    world = World(Run(rewards=rewards))
    right = trl("grpo")

    def rounded(world: World, batch: Any, facts: dict[str, Any]) -> Any:
        value = right(world, batch, facts)
        odd = (torch.arange(batch.log_probs.shape[1]) % 2).to(batch.log_probs.dtype)
        idle = torch.tensor([float(s // 4 == 1) for s in batch.samples], dtype=odd.dtype)
        return value + 1e-7 * (batch.log_probs * batch.mask * odd * idle[:, None]).sum()

    found = explain_dump(record(world, rounded, trl_advantages(world), tmp_path / "dump"))
    mask = found.about("mask")
    assert mask is not None
    assert not mask.departure, found.to_text()


def test_unknown_weights_are_not_explained_away(tmp_path: Path) -> None:
    """Weights that follow no known rule: nothing is said of them, least of all something near."""

    def loss(world: World, batch: Any, facts: dict[str, Any]) -> Tensor:
        place = batch.mask.cumsum(1)
        token: Tensor = -batch.advantages[:, None] * batch.log_probs * batch.mask / (1 + 0.1 * place)
        total: Tensor = token.sum() / world.mask.sum()
        return total

    world = World(Run())
    found = explain_dump(record(world, loss, trl_advantages(world), tmp_path / "dump"))
    assert found.about("aggregation") is None
    assert found.about("advantages") is None
    assert "no known combination" in found.undetermined["aggregation"]
