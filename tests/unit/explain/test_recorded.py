"""`explain_dump` on what `record` writes of a plain loop with a transformers model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from regress import explain_dump
from regress.capture.recording import record
from regress.capture.tap_batch import tap_batch
from regress.dump.trajectory import Trajectory, to_record
from regress.explain.statement import Explanation

PROMPT, LENGTH, GROUPS, SIZE = 3, 9, 2, 4
REWARDS = torch.tensor([0.0, 1.0, 0.25, 0.75, 1.0, 0.5, 0.0, 0.25])

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Loss of log-probs ``[B, T, V]``, ids ``[B, T]``, loss mask ``[B, T]`` and advantages ``[B]``."""


def explained(
    folder: Path, loss: Loss, temperature: float = 1.0, updates: int = 1, **more: Any
) -> Explanation:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            initializer_range=0.3,
        )
    ).float()
    ids = torch.randint(0, 40, (GROUPS * SIZE, LENGTH))
    ids[:, :PROMPT] = (
        ids[:, :PROMPT].view(GROUPS, SIZE, PROMPT)[:, :1].expand(-1, SIZE, -1).reshape(-1, PROMPT)
    )
    lengths = [LENGTH - number % 4 for number in range(len(ids))]
    mask = torch.tensor([[int(PROMPT <= t < n) for t in range(LENGTH)] for n in lengths])
    attention = torch.tensor([[int(t < n) for t in range(LENGTH)] for n in lengths])
    groups = REWARDS.view(GROUPS, SIZE)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    samples = [
        Trajectory(
            f"g{i // SIZE}", i % SIZE, ids[i, :n].tolist(), mask[i, :n].tolist(), float(REWARDS[i]), PROMPT
        )
        for i, n in enumerate(lengths)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with record(folder, model, token_gradient=True, **more) as recorder:
        recorder.put(to_record(samples, 0))
        for _ in range(updates):
            logits = model(input_ids=ids, attention_mask=attention).logits / temperature
            loss(logits.log_softmax(-1), ids, mask, advantages).backward()
            if updates > 1:
                optimizer.step()
                optimizer.zero_grad()
    return explain_dump(folder)


def policy_gradient(shift: int = 1) -> Loss:
    """Token mean of -A log p, with the log-prob of the token `shift` places after the state."""

    def loss(log_p: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        chosen = log_p[:, : LENGTH - shift].gather(-1, ids[:, shift:, None])[..., 0]
        own = mask[:, shift:]
        return -(advantages[:, None] * chosen * own).sum() / own.sum()

    return loss


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_plain_loop_is_read_off(tmp_path: Path, temperature: float) -> None:
    found = explained(tmp_path / "dump", policy_gradient(), temperature)
    assert not found.departures, found.to_text()
    said = {statement.subject: statement.values for statement in found.statements}
    assert said["temperature"] == (pytest.approx(temperature, rel=1e-3),)
    assert said["mask"] == ("as expected",)
    assert "token-mean/global" in said["aggregation"]
    name = "reward minus the mean of the group, divided by the standard deviation of the group (sample deviation)"
    assert name in said["advantages"]
    assert "trl:dapo" in said["preset"]


def test_a_second_update_has_the_rewards_of_the_rollouts_it_repeats(tmp_path: Path) -> None:
    """The recorder counts an optimizer step as a step, and the rollouts were tapped before the first."""
    found = explained(tmp_path / "dump", policy_gradient(), updates=2)
    assert [one.step for one in found.updates] == [0, 1]
    assert all({"advantages", "aggregation", "preset"} <= set(one.shown) for one in found.updates), (
        found.to_text()
    )


class Ratios:
    """The clipped ratio against the log-probs of the first call, which are tapped."""

    old: Tensor | None = None

    def __call__(self, log_p: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        chosen, own = log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0], mask[:, 1:]
        self.old = chosen.detach() if self.old is None else self.old
        tap_batch(loss_mask=mask, old_log_probs=self.old)
        ratio, a = (chosen - self.old).exp(), advantages[:, None]
        return -(torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * own).sum() / own.sum()


@pytest.mark.parametrize("activations", [None, "lm_head"])
def test_the_found_temperature_is_applied_to_every_update(activations: str | None, tmp_path: Path) -> None:
    found = explained(tmp_path / "dump", Ratios(), 0.7, 2, activations=activations)
    assert not found.departures, found.to_text()
    first, second = found.updates
    assert {"advantages", "aggregation", "preset"} <= set(first.shown)
    assert {"ratio", "clip", "advantages", "aggregation", "preset"} <= set(second.shown), found.to_text()


@pytest.mark.parametrize("shift", [0, 2])
def test_a_wrong_shift_of_the_targets_is_named(tmp_path: Path, shift: int) -> None:
    found = explained(tmp_path / "dump", policy_gradient(shift))
    departures = {statement.subject: statement for statement in found.departures}
    assert departures["targets"].values == (shift - 1,), found.to_text()
    assert found.about("aggregation") is None
    assert found.about("temperature") is None


def test_a_term_besides_the_log_probs_is_said_and_nothing_else(tmp_path: Path) -> None:
    def loss(log_p: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        return policy_gradient()(log_p, ids, mask, advantages) - 0.05 * log_p.mean()  # label smoothing

    found = explained(tmp_path / "dump", loss)
    (departure,) = found.departures
    assert departure.subject == "loss"
    assert "do not explain its gradient" in departure.text
    assert [statement.subject for statement in found.statements] == ["loss"]
    assert "everything else" in found.undetermined


def test_a_gradient_beyond_the_last_token_is_named(tmp_path: Path) -> None:
    """A mask that is not shifted with the log-probs: the state of the last token gets a gradient."""

    def loss(log_p: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        chosen = log_p.gather(-1, ids.roll(-1, 1)[..., None])[..., 0]
        return -(advantages[:, None] * chosen * mask).sum() / mask.sum()

    found = explained(tmp_path / "dump", loss)
    texts = [statement.text for statement in found.departures]
    assert any("predict no token of their sample" in text for text in texts), found.to_text()
    assert any("the first token of each" in text for text in texts), found.to_text()
