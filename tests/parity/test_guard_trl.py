"""TRL's trainer under `guard`, unmodified: healthy runs are left alone, and faults stop it at their step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from trl_loop import make_trainer, make_world

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


FAULTS = {
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
