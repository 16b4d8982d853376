"""Faults of one process behind the backward pass: norms, optimizer, schedule, and what a checkpoint restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from regress.engine import build, optim
from regress.engine.checkpoint import resume
from regress.engine.optim import build_scheduler
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.grpo.controllers import Coefficients
from tests.faults.fault import fault
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.patch import Patch

BLIND = ("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3")


@dataclass(frozen=True)
class Moments:
    """State of AdamW for a parameter, once its moments are updated: `number` counts its updates from 1."""

    gradient: Tensor
    first: Tensor
    second: Tensor
    number: float
    beta1: float
    beta2: float
    eps: float


def with_direction(patch: Patch, direction: Callable[[Moments], tuple[Tensor, Tensor]]) -> None:
    """Let AdamW move every parameter by another mean over another root; its moments and its decay are right."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        before = {p: p.clone() for group in optimizer.param_groups for p in group["params"]}
        update()
        for group in optimizer.param_groups:
            rate, settings = group["lr"], (*group["betas"], group["eps"])
            for p, weights in ((p, before[p]) for p in group["params"]):
                state = optimizer.state[p]
                moments = Moments(
                    p.grad, state["exp_avg"], state["exp_avg_sq"], float(state["step"]), *settings
                )
                mean, root = direction(moments)
                p.copy_(weights * (1 - rate * group["weight_decay"]) - rate * mean / root)

    around_the_update(patch, wrong)


@fault(
    category="L",
    fresh=True,
    source="AReaL#312: a sum of squares without its root",
    first="grad_norm grad_norm",
    rules=("norm",),
    blind=("loss 5 %", "loss 1 %", "cosine 0.99", "allclose", "mean 1e-3"),
)
def root_of_the_norm_not_taken(patch: Patch) -> None:
    """The squares of all gradients are added, and their sum stands for the norm."""
    right: Any = LocalPolicy._total_norm
    patch.setattr(LocalPolicy, "_total_norm", lambda self, norms: right(self, norms).square())


@fault(
    category="M",
    fresh=True,
    source="NAdam in place of AdamW",
    first=f"param {EMBEDDING}",
    rules=("optimizer-settings",),  # names how the update is made of the moments
    blind=BLIND,
)
def update_looks_ahead(patch: Patch) -> None:
    """The update takes the first moment one step ahead, as Nesterov's does; the moments are right."""

    def wrong(moments: Moments) -> tuple[Tensor, Tensor]:
        ahead = moments.beta1 * moments.first / (1 - moments.beta1 ** (moments.number + 1))
        ahead = ahead + (1 - moments.beta1) * moments.gradient / (1 - moments.beta1**moments.number)
        root = (moments.second / (1 - moments.beta2**moments.number)).sqrt() + moments.eps
        return ahead, root

    with_direction(patch, wrong)


@fault(
    category="M",
    fresh=True,
    source="weight decay of the configured rate, whatever the schedule says",
    cases=("on_policy",),
    variants=("base",),
    first=f"param {EMBEDDING}",
    steps=None,
    rules=(
        "weight-decay",
        "optimizer-settings",
    ),  # the last one names weight decay
    blind=(
        "loss 5 %",
        "loss 1 %",
        "norm 3 %",
        "cosine 0.99",
        "L2 8.3 %",
        "mean 1e-3",
    ),
)
def decay_at_the_full_rate(patch: Patch) -> None:
    """Weights decay by the rate that the schedule began with, and are updated by its present one."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1.0 - group["initial_lr"] * group["weight_decay"])
            group["weight_decay"] = 0.0
        update()
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    around_the_update(patch, wrong)


@fault(
    category="M",
    fresh=True,
    source="lightning#1772",
    cases=("on_policy",),
    variants=("base",),
    first=f"param {EMBEDDING}",
    rules=("learning-rate",),
)
def rate_of_the_next_update(patch: Patch) -> None:
    """The schedule goes on before the optimizer, so that every update has the rate of the next one."""

    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, next_one in zip(optimizer.param_groups, _next_rates(schedules[-1]), strict=True):
            group["lr"] = next_one
        update()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    schedules: list[Any] = []
    right: Any = build_scheduler

    def kept(*args: Any, **rest: Any) -> LRScheduler:
        schedules.append(right(*args, **rest))
        found: LRScheduler = schedules[-1]
        return found

    patch.setattr(build, "build_scheduler", kept)
    around_the_update(patch, wrong)


def _next_rates(schedule: Any) -> list[float]:
    """Return the rates of the update behind the present one."""
    number = schedule.last_epoch + 1
    return [base * rule(number) for base, rule in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]


@fault(
    category="M",
    fresh=True,
    source="accelerate PR#999",
    cases=("cispo_kl",),
    variants=("base",),
    first=f"param {EMBEDDING}",
    steps=None,
    rules=("learning-rate",),
    blind=("norm 3 %",),
)
def one_more_update_of_warm_up(patch: Patch) -> None:
    """The learning rate rises over one update more than it should."""
    right: Any = get_scheduler

    def wrong(*args: Any, num_warmup_steps: int, **rest: Any) -> Any:
        return right(*args, num_warmup_steps=num_warmup_steps + 1, **rest)

    patch.setattr(optim, "get_scheduler", wrong)


@fault(
    category="M",
    fresh=True,
    source="a tied weight that is in two lists of parameters",
    cases=("tied",),
    first=f"optimizer {EMBEDDING}",
    names=r"model\.embed_tokens\.weight/.*",
    rules=(
        "update-sign",
        "step-counter",
        "update-made-twice",
    ),  # the weight is updated once under each name
    blind=BLIND,
)
def tied_weight_updated_twice(patch: Patch) -> None:
    """The optimizer knows the tied weight under both of its names, and updates it for each."""

    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        update()
        (group,) = optimizer.param_groups
        params, names = group["params"], group["param_names"]
        kept = [(p, n) for p, n in zip(params, names, strict=True) if "embed" in n]
        group["params"], group["param_names"] = [p for p, _ in kept], [n for _, n in kept]
        update()
        group["params"], group["param_names"] = params, names

    around_the_update(patch, wrong)


@fault(
    category="M",
    fresh=True,
    source="optimizers that add eps below the root",
    first=f"param {EMBEDDING}",
    rules=("optimizer-eps", "optimizer-settings"),
    blind=BLIND,
)
def epsilon_below_the_root(patch: Patch) -> None:
    """The root is taken of the second moment and eps together."""

    def wrong(moments: Moments) -> tuple[Tensor, Tensor]:
        mean = moments.first / (1 - moments.beta1**moments.number)
        return mean, (moments.second / (1 - moments.beta2**moments.number) + moments.eps).sqrt()

    with_direction(patch, wrong)


@fault(
    category="N",
    fresh=True,
    source="the_well#77",
    cases=("on_policy",),
    variants=("resume-at2",),
    first="param",
    steps=None,
    rules=("learning-rate",),
)
def schedule_begins_anew(patch: Patch) -> None:
    """Weights and moments come from the checkpoint, and the learning rate begins to rise again."""
    patch.setattr(resume, "_restore_scheduler", lambda *_: None)


@fault(
    category="N",
    fresh=True,
    source="ms-swift PR#8275",
    cases=("cispo_kl",),
    variants=("resume-at2",),
    first="ref_log_probs",
    steps=None,
    rules=(
        "reference",
        "advantage-penalty",
    ),  # the last one names the reference that the penalty compares
)
def reference_not_restored(patch: Patch) -> None:
    """The reference, which had moved, is the initial one again."""
    patch.setattr(resume, "_restore_reference", lambda *_: None)


@fault(
    category="N",
    fresh=True,
    source="the_well#77: a controller whose state is not kept",
    cases=("cispo_kl",),
    variants=("resume-at2",),
    first="advantages",
    steps=None,
    rules=("advantage-penalty",),  # names the coefficient
)
def coefficients_not_restored(patch: Patch) -> None:
    """The coefficient of the KL, which had been adapted, is the configured one again."""
    patch.setattr(Coefficients, "load_state_dict", lambda *_: None)


@fault(
    category="M",
    fresh=True,
    source="clipping of a copy of the gradients",
    first=f"optimizer {EMBEDDING}/exp_avg_sq",
    steps=None,
    rules=("state-of-a-rank-unclipped", "clip-of-gradients-left-out", "clip-of-gradients"),
    blind=BLIND,
)
def second_moment_of_unclipped_gradients(patch: Patch) -> None:
    """The second moment is made of the gradient as it was before it was clipped."""
    right: Any = LocalPolicy.clip_grad_norm
    kept: dict[Tensor, Tensor] = {}

    def noted(self: LocalPolicy, limit: float | None) -> Tensor:
        kept.clear()
        kept.update({p: p.grad.clone() for _, p in self.named_parameters() if p.grad is not None})
        found: Tensor = right(self, limit)
        return found

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        before = _second_moments(optimizer)
        update()
        for group in optimizer.param_groups:
            beta2 = group["betas"][1]
            for p in group["params"]:
                known = before.get(p, torch.zeros_like(p))
                optimizer.state[p]["exp_avg_sq"].copy_(beta2 * known + (1 - beta2) * kept[p].square())

    patch.setattr(LocalPolicy, "clip_grad_norm", noted)
    around_the_update(patch, wrong)


def _second_moments(optimizer: Optimizer) -> Mapping[Any, Tensor]:
    """Return copies of the second moments that are known."""
    return {p: state["exp_avg_sq"].clone() for p, state in optimizer.state.items() if "exp_avg_sq" in state}


@fault(
    category="M",
    fresh=True,
    source="OpenRLHF: an update for every mini-batch but the last of an epoch",
    cases=("dapo",),
    first="optimizer",
    steps=None,
    rules=("no-update",),
    blind=BLIND,
)
def last_update_of_a_step_skipped(patch: Patch) -> None:
    """The optimizer makes all updates of a step but the last one."""
    due = [0]
    update: Any = Trainer._update

    def counted(self: Trainer, work: Any, after: Any) -> None:
        due[0] = self.config.trainer.epochs * len(work.minis) - len(work.outcomes)
        update(self, work, after)

    def wrong(_: Optimizer, made: Callable[[], None]) -> None:
        due[0] -= 1
        if due[0]:
            made()

    patch.setattr(Trainer, "_update", counted)
    around_the_update(patch, wrong)
