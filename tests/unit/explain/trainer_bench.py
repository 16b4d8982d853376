"""A bench of trainers: the same rollouts, a tiny policy, and the losses of released trainers as pure functions of it.

The policy is a table of hidden states under a linear head, so that a trainer is one backward pass. `trl` follows the
formulas of TRL 1.16, `preset` those of an `Objective`; faults are planted in either. What is recorded is what `record`
would see of it: the gradient of the hidden states, solved for the token gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regress.capture.output_head import LinearHead
from regress.capture.token_gradient import residual_of, solve
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording, tap, tap_trajectories
from regress.dump.trajectory import Trajectory
from regress.layout import Segment, TokenLayout

GROUPS, GROUP_SIZE, WIDTH, VOCABULARY, LONGEST = 4, 4, 16, 37, 12
OPTIONS = {
    "token_gradient": True,
    "forward_data": True,
    "is_loss_debug": True,
    "activations": True,
    "old_log_probs": True,
    "ref_log_probs": True,
    "trajectory": True,
    "loss": True,
}


@dataclass
class Run:
    """Settings of the trainer's run: its policy, the number of its pieces, and the recorded parts."""

    seed: int = 0
    temperature: float = 1.0
    ranks: int = 1
    accumulation: int = 1
    off_policy: float = 0.0
    scaled: bool = True
    rewards: bool = True
    advantages: bool = False
    dtype: torch.dtype = torch.float32
    shift: int = 0
    tools: bool = False
    sampled: float | None = None
    coarse: bool = False
    zeros: bool = False
    recorded: float | None = None  # temperature of the recorded log-probs, where it is not that of the loss
    old: bool = True
    logits: bool = False  # the head's output is recorded, too
    classified: bool = False  # old and reference log-probs are those of the recorder, not of the trainer
    strays: int = 0  # positions that predict no token and have a gradient


@dataclass
class Batch:
    """Loss tokens of one microbatch ``[n, T]`` (right padded), as a trainer has them."""

    samples: list[int]
    mask: Tensor
    log_probs: Tensor
    entropies: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor


@dataclass
class World:
    """Rollouts and policies."""

    run: Run
    trajectories: list[Trajectory] = field(default_factory=list)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.run.seed)
        dtype = self.run.dtype
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype) * 0.4
        for group in range(GROUPS):
            prompt = torch.randint(VOCABULARY, (2 + group,), generator=generator).tolist()
            for member in range(GROUP_SIZE):
                n = int(torch.randint(2, LONGEST, (1,), generator=generator)) if member else 1 + group
                completion = torch.randint(VOCABULARY, (n,), generator=generator).tolist()
                reward = float(torch.randint(0, 9, (1,), generator=generator)) / 4 + 0.01 * n
                reward = 0.0 if self.run.zeros and member == group else reward
                reward = 0.5 if group == 1 else reward  # a group without variance
                mask = [0] * len(prompt) + [
                    int(not (self.run.tools and n > 4 and t in (1, 2))) for t in range(n)
                ]
                self.trajectories.append(
                    Trajectory(
                        f"g{group}",
                        member,
                        prompt + completion,
                        mask,
                        reward,
                        len(prompt),
                        temperature=self.run.sampled,
                    )
                )
        self.length = max(len(t.tokens) for t in self.trajectories)
        shape = (len(self.trajectories), self.length, WIDTH)
        self.hidden = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        noise = torch.randn((2, *shape), generator=generator).to(dtype)
        self.old = self.hidden.detach() + self.run.off_policy * noise[0]
        self.reference = self.hidden.detach() + 0.1 * noise[1]
        self.critic = 0.3 * torch.randn(shape[:2], generator=generator)
        self.greedy = torch.rand(GROUPS, generator=generator).repeat_interleave(GROUP_SIZE)
        pad = [0] * self.length
        self.ids = torch.tensor([(t.tokens + pad)[: self.length] for t in self.trajectories])
        self.mask = torch.tensor([(t.loss_mask + pad)[: self.length] for t in self.trajectories])
        self.rewards = torch.tensor([t.reward for t in self.trajectories], dtype=torch.float32)
        self.groups = torch.tensor([int(t.group_id[1:]) for t in self.trajectories])

    @property
    def blocks(self) -> list[tuple[int, int, list[int]]]:
        """(rank, microbatch, samples): samples are dealt in turn, so that microbatches differ in length."""
        count = self.run.ranks * self.run.accumulation
        size = len(self.trajectories) // count
        return [
            (b % self.run.ranks, b // self.run.ranks, list(range(b * size, (b + 1) * size)))
            for b in range(count)
        ]

    def batch(self, samples: list[int], advantages: Tensor) -> Batch:
        """Return the trainer's values for some samples, each at its predicted token."""
        rows = torch.tensor(samples)
        own = self._distribution(self.hidden[rows], rows)[:2]
        with torch.no_grad():
            old = self._distribution(self.old[rows], rows)[0] if self.run.off_policy else own[0].detach()
            ref = self._distribution(self.reference[rows], rows)[0]
        return Batch(samples, self.mask[rows].to(own[0].dtype), *own, old, ref, advantages[rows])

    @torch.no_grad()
    def before(self) -> tuple[Tensor, Tensor]:
        """Return log-probs and sums of squared probabilities of the policy before the update, ``[N, T]`` each."""
        log_probs, _, squares = self._distribution(self.old, torch.arange(len(self.trajectories)))
        return log_probs, squares

    def _distribution(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_p = ((hidden[:, :-1] @ self.head.T) / self.run.temperature).log_softmax(-1)
        targets = self.ids[rows].roll(-1 - self.run.shift, 1)[:, :-1]
        own = log_p.gather(-1, targets[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        first = torch.zeros(len(rows), 1, dtype=own.dtype)
        squares = log_p.exp().square().sum(-1)
        return torch.cat([first, own], 1), torch.cat([first, entropy], 1), torch.cat([first, squares], 1)


Loss = Callable[[World, Batch, dict[str, Any]], Tensor]
"""Loss of a microbatch, as it is back-propagated."""


def record(world: World, loss: Loss, advantages: Tensor, folder: Path, **facts: Any) -> Path:
    """Run one update of a trainer and record what its backward pass says."""
    run = world.run
    with recording(Recorder(folder, options=OPTIONS)), at(step=0):
        if run.rewards:
            tap_trajectories(world.trajectories)
        for rank, micro, samples in world.blocks:
            with at(rank=rank, micro=micro):
                _record(world, world.batch(samples, advantages), loss, facts)
    return folder


def record_updates(folder: Path, *updates: tuple[World, Loss, Tensor]) -> Path:
    """Record several updates on the rollouts of the first world, as `record` does one."""
    with recording(Recorder(folder, options=OPTIONS)), at(step=0):
        tap_trajectories(updates[0][0].trajectories)
        for number, (world, loss, advantages) in enumerate(updates):
            for rank, micro, samples in world.blocks:
                with at(update=number, rank=rank, micro=micro):
                    _record(world, world.batch(samples, advantages), loss, {})
    return folder


def _record(world: World, batch: Batch, loss: Loss, facts: dict[str, Any]) -> None:
    run = world.run
    value = loss(world, batch, facts)
    (grad,) = torch.autograd.grad(value, world.hidden)
    rows = torch.tensor(batch.samples)
    segments = tuple(
        Segment(row, 0, len(world.trajectories[s].tokens), row, 0) for row, s in enumerate(batch.samples)
    )
    layout = TokenLayout((len(rows), world.length), segments)
    meta = {"samples": [list(world.trajectories[s].key) for s in batch.samples]}
    hidden = world.hidden.detach()[rows, :-1].reshape(-1, WIDTH)
    states = grad[rows, :-1].reshape(-1, WIDTH)
    scale = float(run.ranks) if run.scaled and run.ranks > 1 else 1.0
    states = states / scale
    states = states.bfloat16() if run.coarse else states
    head, targets = LinearHead(world.head), world.ids[rows].roll(-1, 1)[:, :-1].reshape(-1)
    out = solve(hidden, states, head, targets)

    def placed(values: Tensor) -> Tensor:
        inner = values.reshape(len(rows), -1)
        return torch.cat([inner.new_zeros(len(rows), 1), inner], 1)

    told: dict[str, Any] = {"temperature": out.temperature, "temperature_error": out.temperature_error}
    if run.scaled:
        told["backward_scale"] = scale
    if out.temperature is None:
        other = {str(s): world.ids[rows].roll(-1 - s, 1)[:, :-1].reshape(-1) for s in (-1, 0, 1)}
        told["target_residuals"] = residual_of(hidden, states, head, other)
    if run.strays:
        told["rows_without_target"] = run.strays
    tap(
        "token_gradient",
        token_gradient=placed(out.log_prob_K),
        entropy_gradient=placed(out.entropy_K),
        token_residual=placed(out.residual_K),
        recoverable=placed(out.recoverable_K),
        layout=layout,
        meta=meta | {key: value for key, value in told.items() if value is not None},
    )
    mask = batch.mask
    forward = {"log_probs": batch.log_probs.detach() * mask, "entropy": batch.entropies.detach() * mask}
    at_temperature: dict[str, Any] = {}
    told_as = batch
    if run.recorded is not None:
        elsewhere = World(replace(run, temperature=run.recorded))
        told_as = elsewhere.batch(batch.samples, torch.zeros(len(world.trajectories)))
        forward = {
            "log_probs": told_as.log_probs.detach() * mask,
            "entropy": told_as.entropies.detach() * mask,
        }
        at_temperature = {"temperature": run.recorded}
    if run.logits:
        seen = facts.get("logits", torch.clone)(world.hidden.detach()[rows] @ world.head.T)
        tap("activations", lm_head=seen, layout=layout, meta=meta)
    ids = {"input_ids": world.ids[rows]}
    tap("forward_data", **forward, **ids, response_mask=mask, layout=layout, meta=meta | at_temperature)
    debug = {"old_log_probs": batch.old * mask, "ref_log_probs": batch.ref * mask}
    if not run.old:
        del debug["old_log_probs"]
    if run.classified:
        for name, values in (("old_log_probs", told_as.old), ("ref_log_probs", told_as.ref)):
            tap(name, **{name: values * mask}, layout=layout, meta=meta | at_temperature)
        debug = {"effective_valid": mask}
    if run.advantages:
        advantages = batch.advantages.reshape(len(mask), -1)
        debug["advantages"] = advantages.expand_as(mask) * mask
    if "kl" in facts:
        debug["kl"] = facts["kl"](batch).detach() * mask
    tap("is_loss_debug", **debug, layout=layout, meta=meta)


def trl_advantages(world: World, scale: str = "group", ddof: int = 1) -> Tensor:
    """TRL's advantages ``[N]``, in float32."""
    rewards = world.rewards.view(-1, GROUP_SIZE)
    mean = rewards.mean(1, keepdim=True)
    if scale == "none":
        return (rewards - mean).flatten()
    std = rewards.std(1, correction=ddof, keepdim=True) if scale == "group" else rewards.std(correction=ddof)
    return ((rewards - mean) / (std + 1e-4)).flatten()


def trl(
    loss_type: str = "dapo",
    *,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    epsilon: tuple[float, float] = (0.2, 0.2),
    level: str = "token",
    corrected: bool = True,
    fault: str = "",
) -> Loss:
    """The loss of TRL 1.16's `GRPOTrainer`; `fault` plants one."""

    def loss(world: World, batch: Batch, facts: dict[str, Any]) -> Tensor:
        mask = _faulty_mask(batch.mask, fault)
        a = batch.advantages[:, None].to(mask.dtype)
        log_ratio = batch.log_probs - batch.old
        if level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]
        ratio = log_ratio.exp()
        kl = _k3(batch, ratio if corrected else torch.ones_like(ratio))
        if beta:
            facts["kl"] = lambda other: _k3(other, torch.ones_like(other.old))
        token = _policy(loss_type, ratio, a, batch.log_probs, epsilon, fault)
        if beta:
            token = token + beta * (kl.detach() if fault == "kl detached" else kl)
        value = _aggregate(world, loss_type, token, mask, fault)
        if entropy_coef:
            everywhere = torch.zeros_like(mask)
            for row, sample in enumerate(batch.samples):
                everywhere[row, 1 : len(world.trajectories[sample].tokens)] = 1
            over = everywhere if fault == "entropy on masked tokens" else mask
            bonus = (batch.entropies * over).sum() / over.sum().clamp(min=1.0) / world.run.accumulation
            value = value - entropy_coef * bonus
        return value * (world.run.ranks if fault == "factor of ranks" else 1)

    return loss


def _k3(batch: Batch, ratio: Tensor) -> Tensor:
    gap = batch.ref - batch.log_probs
    return (gap.exp() - gap - 1) * ratio


def _policy(
    loss_type: str, ratio: Tensor, a: Tensor, log_probs: Tensor, epsilon: tuple[float, float], fault: str
) -> Tensor:
    low, high = epsilon
    if loss_type == "cispo":
        weight = ratio.clamp(max=5.0)
        return -(weight if fault == "ratio not detached" else weight.detach()) * a * log_probs
    if loss_type == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
    clipped = ratio.clamp(1 - low, 1 + high) * a
    return -(torch.max if fault == "clip sides" else torch.min)(ratio * a, clipped)


def _faulty_mask(mask: Tensor, fault: str) -> Tensor:
    if fault == "mask off by one":  # ends one token early
        return mask * mask.roll(-1, 1)
    if fault == "mask shifted":
        return mask.roll(-1, 1)
    return mask


def _aggregate(world: World, loss_type: str, token: Tensor, mask: Tensor, fault: str) -> Tensor:
    ga, ranks = world.run.accumulation, world.run.ranks
    per_row = (token * mask).sum(-1)
    if loss_type in ("grpo", "sapo"):
        return (per_row / mask.sum(-1).clamp(min=1.0)).mean() / ga
    if loss_type == "bnpo" or fault == "denominator of the microbatch":
        return per_row.sum() / mask.sum().clamp(min=1.0) / ga
    if loss_type == "dr_grpo":
        return per_row.sum() / (len(per_row) * LONGEST) / ga
    if loss_type == "luspo":
        return per_row.mean() / ga
    return per_row.sum() / (world.mask.sum() / ranks)


def in_grid(world: World, values: Tensor) -> Tensor:
    """Return values of all loss tokens ``[K]`` at their places, ``[N, T]``."""
    out = torch.zeros(world.mask.shape, dtype=values.dtype)
    out[world.mask.bool()] = values
    return out
