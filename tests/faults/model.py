"""Faults of the model and of its log-probs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regress.engine import build, policy, trainer
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.engine.projection import logits_at
from regress.engine.step import train_step
from regress.engine.trainer import Trainer
from regress.errors import ReplayError
from regress.grpo import losses
from regress.grpo.logprobs import token_log_probs
from tests.faults.fault import fault
from tests.faults.patch import Patch


@fault(
    category="F",
    source="transformers: norm_topk_prob of other checkpoints",
    first="activations model.layers.0",
    place="step0/rank0/micro0",
    cases=("moe",),
    tokens="all",
    probe="log_probs",
    # module: only the layer as a whole is recorded, and its router is among what is named
    rules=("router", "module"),
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
    precisions=("float64", "float32"),
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
    rules=("output-projection", "module-scale"),
    small=True,
    calibration=True,
    silent={},
)
@torch.no_grad()
def stale_weight(run: Run) -> None:
    """One matrix is off by 2 %."""
    found = [p for name, p in run.trainer.policy.named_parameters() if p.ndim == 2 and "embed" not in name]
    found[-1].mul_(1.02)


@fault(
    category="H",
    source="TRL#6789, vllm#42259",
    first="log_probs log_probs",
    rules=("log-softmax", "vocabulary-parts"),
)
def log_probs_over_top_k(patch: Patch) -> None:
    """Log-probs are normalized over the eight likeliest tokens and the sampled one."""
    right: Any = token_log_probs

    def wrong(logits: Tensor, targets: Tensor, **rest: Any) -> Any:
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept.scatter_(-1, logits.topk(8, dim=-1).indices, True)
        kept.scatter_(-1, targets[..., None], True)
        return right(logits.masked_fill(~kept, -torch.inf), targets, **rest)

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="H",
    source="prime-rl PR#1525, ms-swift PR#8196",
    first="old_log_probs old_log_probs",
    rules=("log-probs-shifted", "old-log-probs"),
)
def sampler_log_probs_one_late(patch: Patch) -> None:
    """Log-probs of the sampler are read one token off."""
    right: Any = TokenBatch.sampler_log_probs

    def wrong(self: TokenBatch, dtype: torch.dtype) -> Tensor | None:
        found = right(self, dtype)
        return None if found is None else found.roll(1)

    patch.setattr(TokenBatch, "sampler_log_probs", wrong)


@fault(
    category="K",
    source="verl: rollout log-probs in place of recomputed ones",
    first="old_log_probs old_log_probs",
    cases=("cispo",),
    rules=("old-log-probs",),
    silent={"dense": "the configuration asks for them"},
)
def old_log_probs_of_the_sampler(patch: Patch) -> None:
    """Old log-probs are those of the sampler, and should be recomputed."""
    right: Any = Trainer._recorded

    def wrong(self: Trainer, mini: Any) -> Any:
        found = right(self, mini)
        return replace(found, tokens=replace(found.tokens, old_log_probs=found.tokens.sampler_log_probs))

    patch.setattr(Trainer, "_recorded", wrong)


@fault(
    category="K",
    source="slime PR#179",
    first="sampler_weights sampler_weights",
    cases=("cispo",),
    update=1,
    rules=("sampler-mismatch",),
)
def correction_of_the_current_policy(patch: Patch) -> None:
    """The sampler's weights are those of the policy that is trained, not of the one before the updates."""
    right: Any = losses._correction
    patch.setattr(
        losses,
        "_correction",
        lambda log_probs, given, objective: right(
            log_probs, replace(given, old=log_probs.detach()), objective
        ),
    )


@fault(
    category="F",
    source="Megatron PR#4256: routers disagree",
    first="activations model.layers.0",
    cases=("moe",),
    tokens="all",
    probe="log_probs",
    # module: only the layer as a whole is recorded, and its router is among what is named
    rules=("router", "module"),
)
def one_expert_fewer(run: Run) -> None:
    """Each token has one expert in place of two."""
    routers: list[Any] = [m for m in run.trainer.policy.model.modules() if hasattr(m, "norm_topk_prob")]
    if not routers:
        raise ReplayError("there is no router")
    for router in routers:
        router.top_k -= 1


@fault(
    category="H",
    source="TRL PR#3234, TRL#2042, trlX#107",
    first="activations model.layers.0",
    rules=("module",),
)
def dropout_left_on(run: Run) -> None:
    """Dropout is active in the trainer's forward pass, and was not in the sampler's."""
    for name, module in run.trainer.policy.model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_hook(lambda _, __, out: nn.functional.dropout(out, 0.1, training=True))


@fault(
    category="T",
    source="Megatron#1503: 1 / sqrt of another head dimension",
    first="activations model.layers.0",
    tokens="",
    rules=("module", "module-scale"),
)
def attention_not_scaled(run: Run) -> None:
    """Scores are not divided by the root of the head dimension."""
    for module in run.trainer.policy.model.modules():
        if hasattr(module, "scaling") and hasattr(module, "q_proj"):
            setattr(module, "scaling", 1.0)  # noqa: B010  # torch declares no such attribute


@fault(
    category="T",
    source="rope_theta of another checkpoint",
    first="activations model.layers.0",
    # module: only the layer as a whole is recorded, and its rotary embeddings are among what is named
    rules=("rotary", "module"),
)
def rotary_base_of_another_model(run: Run) -> None:
    """Rotary frequencies have the base 500000 in place of 10000."""
    for name, buffer in run.trainer.policy.model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.pow_(math.log(500000) / math.log(10000))


@fault(
    category="T",
    source="linear RoPE scaling that the sampler has not",
    first="activations model.layers.0",
    # module: only the layer as a whole is recorded, and its rotary embeddings are among what is named
    rules=("rotary", "module"),
)
def positions_interpolated(run: Run) -> None:
    """Positions are halved before the rotation."""
    for name, buffer in run.trainer.policy.model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)


@fault(
    category="T",
    source="hidden_act of another family",
    first="activations model.layers.0",
    tokens="all",
    probe="log_probs",
    rules=("module",),
)
def another_activation_function(run: Run) -> None:
    """GELU in place of SiLU."""
    for module in run.trainer.policy.model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = nn.GELU()


@fault(
    category="T",
    source="transformers: rotate_half and interleaved rotation",
    first="activations model.layers.0",
    rules=("rotary", "module"),
)
def rotation_interleaved(run: Run) -> None:
    """The columns of queries and keys are paired 0-1, 2-3, and the weights are made for halves."""
    for name, parameter in run.trainer.policy.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = parameter.data.view(-1, 8, parameter.shape[1])
            heads.copy_(torch.cat([heads[:, 0::2], heads[:, 1::2]], dim=1))


# @@new
