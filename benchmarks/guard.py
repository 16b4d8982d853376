"""Step time of a plain GRPO loop under `regress.guard`, against the same loop without it.

Timed: whole steps on a batch of 4 groups of 4 rows: forward pass, loss, backward pass, AdamW. Under guard every rule
that one process can check is checked in every step, and the weights before the last update are kept. Nothing else of
a training step is there (rollouts, metrics), which would make the overhead smaller. Both sides hold the same weights
throughout, which is checked bit by bit at the end.

Also told: the largest movement of a log-prob between a forward pass of all rows and one of two rows, in spacings of
numbers at 1 + |log-prob|, to which the rule about ratios on policy compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.report import Report
from benchmarks.timing import alternate, timed
from benchmarks.workload import TEN_MILLION
from regress import guard
from regress.live.guarded_microbatch import EPS

GROUPS, SIZE, WIDTH, STEPS, ROUNDS = 4, 4, 96, 3, 5


def run() -> Report:
    """Time steps at ten million parameters, with and without guard."""
    report = Report("guard", "step time of a plain loop under regress.guard")
    sides = {name: _Side() for name in ("off", "on")}
    with guard(sides["on"].model, group_size=SIZE) as watch:
        sides["on"].tell = watch.batch
        blocks: dict[str, Callable[[], None]] = {name: side.steps for name, side in sides.items()}
        measured = alternate({name: timed(block, STEPS) for name, block in blocks.items()}, ROUNDS)
    for one, other in zip(sides["on"].model.parameters(), sides["off"].model.parameters(), strict=True):
        if not torch.equal(one, other):
            raise AssertionError("guard changed the training: weights must be the same bit for bit")
    if watch.violations or not watch.checked["shares"]:
        raise AssertionError(f"the rules were not checked, or do not hold: {watch.summary()}")
    report.facts |= {"steps_per_block": STEPS, "rounds": ROUNDS, "rounding_spacings": sides["on"].spacings()}
    report.add_times(measured, "off")
    report.goals["10M, guard over none"] = (measured.ratio("on", "off"), 1.03)
    return report


class _Side:
    """A model, its optimizer, and the loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        sizes: dict[str, Any] = {**TEN_MILLION.model}
        config = Qwen3Config(vocab_size=TEN_MILLION.vocabulary, use_cache=False, **sizes)
        self.model = Qwen3ForCausalLM(config)
        self.tell: Callable[..., None] | None = None
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._draw = torch.Generator().manual_seed(1)
        self._count = 0

    def steps(self) -> None:
        """Train for a block of steps."""
        for _ in range(STEPS):
            ids = torch.randint(2, TEN_MILLION.vocabulary, (GROUPS * SIZE, WIDTH), generator=self._draw)
            rewards = torch.randint(0, 2, (GROUPS, SIZE), generator=self._draw).float()
            advantages = (rewards - rewards.mean(1, keepdim=True)).reshape(-1)
            mask = (torch.arange(WIDTH) >= TEN_MILLION.prompt).expand(ids.shape)
            log_probs = _log_probs(self.model, ids)
            old = log_probs.detach()
            self._told(ids, log_probs, old, mask, advantages)
            loss = -((log_probs - old).exp() * advantages[:, None] * mask).sum() / mask.sum()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._count += GROUPS

    def _told(self, ids: Tensor, log_probs: Tensor, old: Tensor, mask: Tensor, advantages: Tensor) -> None:
        if self.tell is None:
            return
        rows = torch.arange(len(ids))
        values: dict[str, Any] = {"log_probs": log_probs, "old_log_probs": old, "sampler_log_probs": old}
        values |= {"loss_mask": mask, "advantages": advantages, "on_policy": True, "samples": rows.tolist()}
        groups = (rows // SIZE + self._count).tolist()
        self.tell(**values, groups=groups, recompute=lambda: _log_probs(self.model, ids))

    def spacings(self) -> float:
        """Return the largest movement of a log-prob when rows are split, in spacings."""
        ids = torch.randint(2, TEN_MILLION.vocabulary, (GROUPS * SIZE, WIDTH), generator=self._draw)
        with torch.no_grad():
            whole = _log_probs(self.model, ids)
            parts = torch.cat([_log_probs(self.model, rows) for rows in ids.split(2)])
        return round(float(((whole - parts).abs() / (1 + whole.abs())).max()) / EPS[whole.dtype], 2)


def _log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1]).logits
    found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return nn.functional.pad(found, (1, 0))
