"""TRL's trainer under `guard`, unmodified: healthy runs are left alone, and faults stop it at their step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from trl_loop import make_trainer, make_world, start_ranks

import regress
from regress.errors import GuardError

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and transformers, about themselves

STEP = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def scored(trainer: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what TRL's rollout step returns, from the generation on that step 2 trains on."""
    own, calls = trainer._generate_and_score_completions, [0]

    def changed(inputs: Any) -> Any:
        output = own(inputs)
        output["sampling_per_token_logps"] = _log_probs(trainer, output)
        if calls[0] == STEP:
            change(output)
        calls[0] += 1
        return output

    trainer._generate_and_score_completions = changed


def _log_probs(trainer: Any, output: dict[str, Any]) -> torch.Tensor:
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], 1)
    with torch.no_grad():
        found: torch.Tensor = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, output["completion_ids"].shape[1]
        )[0]
    return found


def baseline(output: dict[str, Any]) -> None:
    output["advantages"] = output["advantages"] + 0.3


def zeros(output: dict[str, Any]) -> None:
    output["sampling_per_token_logps"][:, 0] = 0


def shifted(output: dict[str, Any]) -> None:
    output["sampling_per_token_logps"] = output["sampling_per_token_logps"].roll(1, 1)


def nan(output: dict[str, Any]) -> None:
    output["advantages"][3] = float("nan")


def ratio(output: dict[str, Any]) -> None:
    output["old_per_token_logps"] = output["sampling_per_token_logps"] * 1.01


FAULTS = {
    "ratio": (ratio, "the ratio is"),
    "baseline": (baseline, "add up to"),
    "zeros": (zeros, "are exactly 0, a filled-in value"),
    "shifted": (shifted, "those of the previous token"),
    "nan": (nan, "advantages is nan"),
}


def healthy(output: dict[str, Any]) -> None:
    """Leave it as it is."""


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_healthy_training_breaks_no_rule(world: Path, loss_type: str, accumulation: int) -> None:
    size: dict[str, Any] = {
        "per_device_train_batch_size": 16 // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    trainer = make_trainer(world, loss_type=loss_type, beta=0.0, num_iterations=1, **size)
    scored(trainer, healthy)
    with regress.guard(trainer) as watch:
        trainer.train()
    assert watch.violations == []
    assert watch.updates == 3
    assert all(watch.checked[name] for name in ("finite", "group_sums", "shares", "sampler")), watch.summary()


def test_old_log_probs_of_the_same_weights_are_checked(world: Path) -> None:
    """With two iterations TRL computes old log-probs; only the first update on them is on policy."""
    trainer = make_trainer(world, num_iterations=2)
    scored(trainer, healthy)
    with regress.guard(trainer) as watch:
        trainer.train()
    assert watch.violations == []
    assert watch.checked["on_policy"] == 2


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_stops_training_at_its_step(world: Path, fault: str) -> None:
    change, words = FAULTS[fault]
    trainer = make_trainer(world, beta=0.0, num_iterations=1)
    scored(trainer, change)
    with pytest.raises(GuardError) as caught, regress.guard(trainer):
        trainer.train()
    assert f"step {STEP}, rank 0: " in str(caught.value)
    assert words in str(caught.value)
    assert "_compute_loss" not in vars(trainer)


def test_a_share_that_counts_twice_stops_training_at_its_step(world: Path) -> None:
    trainer = make_trainer(
        world, beta=0.0, num_iterations=1, per_device_train_batch_size=4, gradient_accumulation_steps=4
    )
    scored(trainer, healthy)
    own, calls = trainer._compute_loss, [0]

    def twice(model: Any, inputs: Any) -> Any:
        calls[0] += 1
        return own(model, inputs) * (2 if calls[0] == 4 * STEP + 2 else 1)

    trainer._compute_loss = twice
    with pytest.raises(GuardError) as caught, regress.guard(trainer):
        trainer.train()
    assert f"step {STEP}, rank 0: microbatch 1 of rank 0 weighs 2.000 times as much" in str(caught.value)


def test_a_sampler_with_earlier_weights_stops_training_at_its_step(world: Path) -> None:
    trainer = make_trainer(world, beta=0.0, num_iterations=1)
    own, held = trainer._generate_and_score_completions, [list[torch.Tensor]()]

    def stale(inputs: Any) -> Any:
        output, parameters = own(inputs), [*trainer.model.parameters()]
        now = [p.detach().clone() for p in parameters]
        if len(held) == STEP + 1:
            _put(parameters, held[-1])
        output["sampling_per_token_logps"] = _log_probs(trainer, output)
        _put(parameters, now)
        held.append(now)
        return output

    trainer._generate_and_score_completions = stale
    with pytest.raises(GuardError) as caught, regress.guard(trainer):
        trainer.train()
    assert f"step {STEP}, rank 0: " in str(caught.value)
    assert "they are those of the weights before the last update" in str(caught.value)


@torch.no_grad()
def _put(parameters: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


def test_replicas_that_come_apart_stop_both_ranks_at_their_step(world: Path, tmp_path: Path) -> None:
    start_ranks(2, Path(__file__).with_name("guard_ranks.py"), str(tmp_path), str(world))
    told = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert f"step {STEP}, rank 0: model.embed_tokens.weight differs between ranks 0 and 1" in told[0]


def test_training_is_the_same_bit_for_bit(world: Path) -> None:
    watched = make_trainer(world)
    scored(watched, healthy)
    with regress.guard(watched):
        watched.train()
    alone = make_trainer(world)
    scored(alone, healthy)
    alone.train()
    for one, other in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(one, other)
