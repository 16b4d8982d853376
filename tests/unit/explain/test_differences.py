"""The faults that people really make, in a foreign trainer without a configuration: `regress compare` names each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from regress.cli import main
from tests.unit.explain.trainer_bench import (
    GROUP_SIZE,
    Batch,
    Loss,
    Run,
    World,
    record,
    trl,
    trl_advantages,
)


def kl(estimator: str, coefficient: float = 0.1) -> Loss:
    """DAPO's loss and a KL term that is not corrected for the policy."""
    of: dict[str, Callable[[Tensor], Tensor]] = {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: (-x).exp() + x - 1,
    }

    def loss(world: World, batch: Batch, facts: dict[str, Any]) -> Tensor:
        term = (of[estimator](batch.log_probs - batch.ref) * batch.mask).sum() / world.mask.sum()
        return trl()(world, batch, facts) + coefficient * term

    return loss


def times(factor: float, loss: Loss) -> Loss:
    return lambda world, batch, facts: factor * loss(world, batch, facts)


def on_policy(world: World, batch: Batch, facts: dict[str, Any]) -> Tensor:
    """The loss with the log-probs of the pass itself for the old ones."""
    old, batch.old = batch.old, batch.log_probs.detach()
    value = trl()(world, batch, facts)
    batch.old = old  # what the trainer shows of it is right
    return value


def counted(world: World) -> None:
    """Every fourth completion was cut off, and does not count."""
    world.mask[::4] = 0


@dataclass(frozen=True)
class Mistake:
    """A loss beside the right one; ``says`` is what names it where advantages are tapped and where they are not."""

    says: tuple[str, str]
    wrong: Loss = field(default_factory=trl)
    right: Loss = field(default_factory=trl)
    run: Run = field(default_factory=Run)
    other: Run | None = None
    advantages: Callable[[World], Tensor] = trl_advantages
    before: Callable[[World], None] = lambda world: None


OFF = Run(off_policy=0.3)
TWICE = Run(accumulation=2)
MISTAKES = {
    "mask off by one": Mistake(
        ("it lacks 11 tokens in 11 samples, the last",) * 2, trl(fault="mask off by one"), run=TWICE
    ),
    "population deviation": Mistake(
        ("(population deviation)",) * 2, advantages=lambda world: trl_advantages(world, ddof=0)
    ),
    "KL k1": Mistake(("kl: k1 with coefficient 0.1, where the golden dump has: k3",) * 2, kl("k1"), kl("k3")),
    "KL k2": Mistake(("kl: k2 with coefficient 0.1, where the golden dump has: k3",) * 2, kl("k2"), kl("k3")),
    "KL sign": Mistake(
        ("kl: k3 with coefficient -0.1, where the golden dump",) * 2, kl("k3", -0.1), kl("k3")
    ),
    "another sample": Mistake(
        ("order-not-restored", "unknown"), advantages=lambda world: trl_advantages(world).roll(1)
    ),
    "another group": Mistake(
        ("order-not-restored", "unknown"), advantages=lambda world: trl_advantages(world).roll(GROUP_SIZE)
    ),
    "temperature missing": Mistake(
        ("temperature: logits are divided by 1, completions were sampled at 0.7",) * 2,
        run=Run(temperature=0.7, sampled=0.7),
        other=Run(sampled=0.7),
    ),
    "temperature twice": Mistake(
        ("temperature: logits are divided by 0.49",) * 2,
        run=Run(temperature=0.7, sampled=0.7),
        other=Run(temperature=0.49, sampled=0.7),
    ),
    "no division by accumulation": Mistake(
        ("(rule token-gradient-of-microbatches;",) * 2,
        times(4, trl("grpo")),
        trl("grpo"),
        Run(accumulation=4),
    ),
    "denominator of the microbatch": Mistake(
        (
            "1 / tokens of each microbatch, where the golden dump has: the weight of a token is 1 / tokens of the",
        )
        * 2,
        trl(fault="denominator of the microbatch"),
        run=TWICE,
    ),
    "constant denominator": Mistake(
        ("of another size: 1.2987 x 1 / tokens of the whole update",) * 2, times(100 / 77, trl())
    ),
    "no clip": Mistake(
        ("clip: no token of this update is clipped, where",) * 2, trl(epsilon=(0.999, 1e9)), run=OFF
    ),
    "no old log-probs": Mistake(
        ("ratio: 1: on policy, or without a ratio, where the golden dump has: the ratio of the token",) * 2,
        on_policy,
        run=OFF,
    ),
    "token mean": Mistake(
        ("1 / tokens of the whole update, where the golden dump has: the weight of a token is 1 / (samples",)
        * 2,
        trl("dapo"),
        trl("grpo"),
    ),
    "truncated rows counted": Mistake(("(rule loss-mask;",) * 2, before=counted),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("tapped", [True, False], ids=["advantages", "gradients"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_frequent_mistake_is_named(name: str, tapped: bool, tmp_path: Path) -> None:
    one = MISTAKES[name]
    worlds = [World(Run(**{**vars(run), "advantages": tapped})) for run in (one.run, one.other or one.run)]
    one.before(worlds[0])
    golden = record(worlds[0], one.right, trl_advantages(worlds[0]), tmp_path / "golden")
    actual = record(worlds[1], one.wrong, one.advantages(worlds[1]), tmp_path / "actual")
    done = CliRunner().invoke(main, ["compare", str(golden), str(actual)])
    assert done.exit_code == 1, done.output
    told = " ".join(done.output.split())
    assert one.says[not tapped] in told, told[told.find("cause") :]


def test_the_same_losses_have_no_difference(tmp_path: Path) -> None:
    """Say nothing that tells both sides apart where noise is left that no loss explains."""
    world = World(Run())
    golden = record(world, trl(), trl_advantages(world), tmp_path / "golden")
    noise = torch.Generator().manual_seed(3)
    shaken = trl_advantages(world) * (1 + 0.1 * torch.rand(len(world.trajectories), generator=noise))
    actual = record(world, trl(), shaken, tmp_path / "actual")
    told = CliRunner().invoke(main, ["compare", str(golden), str(actual)]).output
    assert "the losses are not the same" not in told
    assert "cause unknown" in told
