"""The faults that people really make: `regress oracle` names each from one run, with nothing to compare it with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from off_policy_loop import LENGTHS, padded, rollout, tiny_model
from plain_loop import MAX_NORM

from regress import Trajectory, at, record, tap_batch, tap_trajectories
from regress.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CUT = (1, 5)
"""Samples that were cut off; a fault lets them count."""
COUNTED = sum(length for number, (_, length) in enumerate(LENGTHS) if number not in CUT)


class Divided(nn.Module):
    """A model whose logits a trainer divides."""

    def __init__(self, model: nn.Module, by: float) -> None:
        super().__init__()
        self.model, self.by = model, by

    def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Return log-probs of the tokens that follow, ``[B, T - 1]``."""
        logits = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1] / self.by
        found: Tensor = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return found


def train(folder: Path, fault: str = "") -> None:
    """Record an update of GRPO in microbatches of 2: clip of 0.2, k3 with 0.04, mean over tokens.

    Ratios are those to the sampler; where the temperature is at fault, it is on policy.
    """
    model, reference = tiny_model(), tiny_model()
    reference.requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for weight in reference.parameters():
        weight += 0.05 * torch.randn(weight.shape, generator=generator)
    reference.save_pretrained(folder.with_name("reference"))
    sampled = 0.7 if "temperature" in fault else 1.0
    divided = {"temperature missing": 1.0, "temperature twice": 0.49}.get(fault, sampled)
    policy, frozen = Divided(model, divided), Divided(reference, sampled)
    samples = [sampled_by(model, one, number) for number, one in enumerate(rollout())]
    rewards = torch.tensor([sample.reward for sample in samples]).reshape(2, 4)
    deviation = rewards.std(1, keepdim=True, correction=fault != "population deviation")
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (deviation + 1e-6)).reshape(-1)
    advantages = advantages.roll({"another sample": 1, "another group": 4}.get(fault, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with record(folder, model, token_gradient=True, initial_weights=True):
        with at(step=0):
            tap_trajectories(samples)
        for first in range(0, len(LENGTHS), 2):
            own = samples[first : first + 2]
            ids, mask, attention = padded(own)
            now, column = policy(ids, attention), torch.arange(1, ids.shape[1])
            old = nn.utils.rnn.pad_sequence([torch.tensor(one.log_probs) for one in own], True)[:, 1:]
            old = now.detach() if "temperature" in fault else old
            tap_batch(advantages=advantages[first : first + 2], loss_mask=mask)
            kept = mask[:, 1:].float()
            if fault == "truncated rows counted":
                prompts = torch.tensor([[one.prompt_length] for one in own])
                kept = (attention[:, 1:] * (column >= prompts)).float()
            if fault == "mask off by one":
                kept = nn.functional.pad(kept[:, 1:], (0, 1))
            loss_of(
                now, old, frozen(ids, attention), kept, advantages[first : first + 2, None], fault
            ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def sampled_by(model: nn.Module, one: Trajectory, number: int) -> Trajectory:
    """Return a sample with log-probs of a policy that has moved since; of one that was cut off no token counts."""
    ids = torch.tensor([one.tokens])
    with torch.no_grad():
        now = Divided(model, 1.0)(ids, torch.ones_like(ids))[0]
    old = (now + 0.3 * torch.sin(ids[0, 1:] * 7.0 + torch.arange(1, ids.shape[1]))).float()
    mask = [0] * len(one.tokens) if number in CUT else one.loss_mask
    return replace(
        one,
        loss_mask=mask,
        log_probs=np.r_[0.0, old.numpy()].astype(np.float32) * np.array(one.loss_mask, np.float32),
    )


def loss_of(now: Tensor, old: Tensor, ref: Tensor, kept: Tensor, a: Tensor, fault: str) -> Tensor:
    """Return the share of a microbatch in the loss."""
    if fault == "no old log-probs":
        old = now.detach()
    ratio, x = (now - old).exp(), ref - now
    policy = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    if fault == "no clip":
        policy = -ratio * a
    kl = {"KL k1": -x, "KL k2": x * x / 2}.get(fault, x.exp() - x - 1)
    token = (policy + (-0.04 if fault == "KL sign" else 0.04) * kl) * kept
    if fault == "mean over samples":
        return (token.sum(1) / kept.sum(1).clamp(min=1)).sum() / len(LENGTHS)
    own = COUNTED if fault != "denominator of the microbatch" else 4 * float(kept.sum())
    divisor = {"constant denominator": 500.0, "no division by accumulation": COUNTED / 4}.get(fault, own)
    return token.sum() / divisor


FAULTS = {
    "mean over samples": "1 / (samples of the whole update x tokens of the sample), where the golden dump has: the "
    "weight of a token is 1 / tokens of the whole update",
    "mask off by one": "it lacks 4 tokens in 4 samples, the last token of each",
    "population deviation": "scaled by 1.1547",
    "KL k1": "(rule kl-estimator;",
    "KL k2": "with kl_estimator=k2 in place of k3",
    "KL sign": "a sum in which the KL term counts with the other sign",
    "another sample": "advantages are not those of the recorded rewards in their groups",
    "another group": "advantages are not those of the recorded rewards in their groups",
    "no clip": "the ratio is not clipped (rule clip-left-out;",
    "temperature missing": "those of the recorded logits at temperature 1, golden 0.7",
    "temperature twice": "those of the recorded logits at temperature 0.49, golden 0.7",
    "no division by accumulation": "that factor is the number of microbatches, 4",
    "denominator of the microbatch": "its own denominator in place of that of the mini-batch",
    "constant denominator": "another denominator, a backward pass",
    "no old log-probs": "the ratio does not enter the loss (rule loss-without-ratio;",
    "truncated rows counted": "it has in addition 168 tokens in 2 samples",
}
"""Fault -> what `regress oracle` says of it."""


def judged(folder: Path, fault: str = "") -> tuple[int, str]:
    """Return exit code and output of the command on a run, on one line."""
    train(folder / "run", fault)
    temperature = "temperature" in fault
    settings = {
        "algorithm.aggregation": "token-mean",
        "algorithm.old_log_probs": "current" if temperature else "sampler",
        "rollout_worker.temperature": 0.7 if temperature else 1.0,
    }
    claim = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    reference = ("--reference", str(folder / "reference"))
    done = CliRunner().invoke(main, ["oracle", str(folder / "run"), "--preset", "grpo", *claim, *reference])
    return done.exit_code, " ".join(done.output.split())


def test_the_right_trainer_passes(tmp_path: Path) -> None:
    code, text = judged(tmp_path)
    assert code == 0, text


@pytest.mark.one_in(8)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_frequent_mistake_is_named(fault: str, tmp_path: Path) -> None:
    code, text = judged(tmp_path, fault)
    assert code == 1, text
    causes = text[text.find("cause of it:") : text.find(" note: ")]
    assert FAULTS[fault] in causes, causes
    assert "(rule equal-log-probs-other-loss;" not in causes
