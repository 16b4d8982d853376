"""Faults of the model, its log-probs and its temperature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from regress.engine import build, policy, trainer
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.engine.projection import logits_at
from regress.engine.step import train_step
from regress.errors import ReplayError
from regress.faults.fault import fault
from regress.faults.patch import Patch
from regress.grpo import losses
from regress.grpo.logprobs import token_log_probs


@fault(
    category="F",
    source="transformers: norm_topk_prob of other checkpoints",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    cases=("moe",),
    tokens="all",
    probe="log_probs",
    rules=("router",),
    calibration=True,
)
def router_not_normalized(run: Run) -> None:
    """The weights of the chosen experts do not add up to 1."""
    routers: list[Any] = [
        m for m in run.trainer.policy.model.modules() if getattr(m, "norm_topk_prob", False)
    ]
    if not routers:
        raise ReplayError("there is no router")
    for router in routers:
        router.norm_topk_prob = False


@fault(
    category="T",
    source="eps of another configuration",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
    calibration=True,
    blind=("loss 5 %", "cosine 0.99"),
)
def norm_epsilon(run: Run) -> None:
    """Every RMSNorm has ten times its epsilon."""
    norms: list[Any] = [m for m in run.trainer.policy.model.modules() if hasattr(m, "variance_epsilon")]
    if not norms:
        raise ReplayError("there is no RMSNorm")
    for norm in norms:
        norm.variance_epsilon *= 10


@fault(
    category="J",
    source="TRL#3194",
    first="ref_log_probs ref_log_probs",
    place="step0/rank0/micro0",
    tokens="all",
    rules=("reference-is-the-policy",),
    small=True,
    calibration=True,
)
def reference_is_the_policy(patch: Patch) -> None:
    patch.setattr(build, "build_reference", lambda *_: None)


@fault(
    category="H",
    source="prime-rl PR#1525, ms-swift PR#8196",
    first="activations lm_head",
    place="step0/rank0/micro0",
    tokens="all",
    probe="log_probs",
    rules=("logits-shifted",),
    calibration=True,
)
def logits_one_late(patch: Patch) -> None:
    """The logits are those at a token, not those that predict it."""
    right: Any = logits_at
    patch.setattr(policy, "logits_at", lambda model, index, *rest: right(model, index + 1, *rest))


@fault(
    category="H",
    source="verl#6475",
    first="log_probs log_probs",
    place="step0/rank0/micro0",
    tokens="after another",
    rules=("targets-off-by-one",),
    calibration=True,
)
def targets_one_early(patch: Patch) -> None:
    """The target is the token before the predicted one."""
    right: Any = TokenBatch._project

    def early(self: TokenBatch, *args: Any) -> Microbatch:
        micro: Microbatch = right(self, *args)
        return replace(micro, targets=micro.input_ids.reshape(-1)[micro.local - 1])

    patch.setattr(TokenBatch, "_project", early)


@fault(
    category="H",
    source="TRL PR#3029, NeMo-RL PR#935",
    first="log_probs log_probs",
    place="step0/rank0/micro0",
    cases=("dr_grpo",),
    tokens="all",
    rules=("temperature",),
    calibration=True,
    silent={"dense/mbs4": "the temperature is 1"},
)
def temperature_ignored(patch: Patch) -> None:
    """Samples are drawn from tempered logits, and scored by plain ones."""
    right: Any = token_log_probs
    patch.setattr(policy, "token_log_probs", lambda *args, temperature, **rest: right(*args, **rest))


@fault(
    category="H",
    source="a temperature that is rounded on its way",
    first="log_probs log_probs",
    tokens="all",
    rules=("temperature",),
    small=True,
    calibration=True,
)
def temperature_off(patch: Patch) -> None:
    """The temperature is 0.79 in place of 0.80."""
    right: Any = token_log_probs
    patch.setattr(
        policy,
        "token_log_probs",
        lambda *args, temperature, **rest: right(*args, temperature=temperature * 0.79 / 0.80, **rest),
    )


@fault(
    category="K",
    source="slime PR#179",
    first="old_log_probs old_log_probs",
    place="step0/update1/rank0/micro0",
    update=1,
    cases=("dapo",),
    tokens="all",
    rules=("old-is-current",),
    calibration=True,
)
def old_is_current(patch: Patch) -> None:
    """Old log-probs are recomputed after the first update, so that every ratio is 1."""
    right: Any = train_step

    def wrong(model: LocalPolicy, optimizer: Any, tokens: LossTokens, *args: Any, **rest: Any) -> Any:
        return right(model, optimizer, replace(tokens, old_log_probs=None), *args, **rest)

    patch.setattr(trainer, "train_step", wrong)


@fault(
    category="K",
    source="Liger-Kernel#1082",
    first="sampler_weights sampler_weights",
    place="step0/update0/rank0/micro0",
    cases=("cispo",),
    rules=("sampler-correction-off",),
    calibration=True,
)
def no_sampler_correction(patch: Patch) -> None:
    """The sampling policy is taken for the trained one."""
    patch.setattr(losses, "sampler_weights", lambda old, *_: torch.ones_like(old))


@fault(
    category="P",
    source="TRL#5312, verl#7495",
    first="activations lm_head",
    rules=("output-projection",),
    small=True,
    calibration=True,
    silent={},
)
@torch.no_grad()
def stale_weight(run: Run) -> None:
    """One matrix is off by 2 %."""
    found = [p for name, p in run.trainer.policy.named_parameters() if p.ndim == 2 and "embed" not in name]
    found[-1].mul_(1.02)


# @@new
