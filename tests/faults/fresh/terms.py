"""Faults of one process in denominators, log-probs, terms of the loss, and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import policy, step, trainer
from regress.engine.build import Run
from regress.engine.trainer import Trainer
from regress.errors import ReplayError
from regress.grpo import losses
from regress.grpo.aggregation import batch_weights, entropy_weights
from regress.grpo.fields import ObjectiveFields
from regress.grpo.logprobs import token_log_probs
from regress.grpo.objective import Objective
from regress.grpo.segments import segment_lengths
from tests.faults.fault import fault
from tests.faults.patch import Patch

LOSS = "policy_loss policy_loss"
BLIND = ("allclose", "mean 1e-3")


@fault(
    category="A",
    fresh=True,
    source="Dr. GRPO: the longest completion of another batch as its constant",
    cases=("vespo",),
    variants=("base",),
    first="weights weights",
    rules=("weights-denominator",),
    blind=BLIND,
)
def longest_of_the_whole_batch(patch: Patch) -> None:
    """Each microbatch is divided by the longest completion of the mini-batch, not by its own longest."""
    right: Any = batch_weights

    def wrong(*args: Any, completion_lengths: Sequence[int], **rest: Any) -> Tensor:
        longest = [max(completion_lengths)] * len(completion_lengths)
        return right(*args, completion_lengths=longest, **rest)

    patch.setattr(step, "batch_weights", wrong)


@fault(
    category="A",
    fresh=True,
    source="TRL issue#6369",
    cases=("cispo_kl",),
    variants=("base",),
    first="weights weights",
    rules=("weights-denominator",),
)
def samples_without_tokens_counted(patch: Patch) -> None:
    """Samples of which nothing is trained on count in the mean over samples."""
    right: Any = batch_weights

    def wrong(sequence: Tensor, count: int, objective: Objective, **rest: Any) -> Tensor:
        return right(sequence, count, replace(objective, count_empty_rows=True), **rest)

    patch.setattr(step, "batch_weights", wrong)


@fault(
    category="A",
    fresh=True,
    source="open-instruct PR#535",
    cases=("trl",),
    variants=("base",),
    first="entropy_loss",
    rules=("token-loss", "entropy-loss"),
    blind=("mean 1e-3",),
)
def entropy_averaged_over_padding(patch: Patch) -> None:
    """The mean entropy of a microbatch divides by its rows times the longest of them, padding included."""
    right: Any = entropy_weights

    def wrong(sequence: Tensor, count: int, *args: Any, partition: Any, **rest: Any) -> Tensor | None:
        found: Tensor | None = right(sequence, count, *args, partition=partition, **rest)
        if found is None:
            return None
        lengths = segment_lengths(sequence, count)
        factor = torch.ones(count, dtype=found.dtype)
        for members in partition:
            own = lengths[list(members)]
            factor[list(members)] = float(own.sum()) / float(max(int(own.max()), 1) * len(own))
        return found * factor[sequence]

    patch.setattr(trainer, "entropy_weights", wrong)


@fault(
    category="H",
    fresh=True,
    source="verl#2484: entropies of other logits",
    cases=("dr_grpo",),
    first="entropy entropy",
    rules=("temperature", "entropy-of-changed-logits"),
    blind=BLIND,
)
def entropy_without_temperature(patch: Patch) -> None:
    """Log-probs are tempered, and entropies are those of the plain logits."""
    right: Any = token_log_probs

    def wrong(*args: Any, temperature: float, **rest: Any) -> Any:
        plain = right(*args, temperature=1.0, **rest).entropy
        return replace(right(*args, temperature=temperature, **rest), entropy=plain)

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="H",
    fresh=True,
    source="TRL PR#3029, NeMo-RL PR#935",
    cases=("trl",),
    variants=("base",),
    first="old_log_probs old_log_probs",
    rules=(
        "temperature",
        "old-log-probs",
        "loss-mask",
    ),  # the last one names the rejection whose log-probs differ
)
def old_log_probs_without_temperature(patch: Patch) -> None:
    """Log-probs that are recomputed before the first update come from plain logits, those of updates from tempered."""
    right: Any = Trainer._collected

    def wrong(self: Trainer, source: Any, *rest: Any) -> Tensor:
        known = self.policy.temperature
        if source is self.policy:
            self.policy.temperature = 1.0
        try:
            return right(self, source, *rest)
        finally:
            self.policy.temperature = known

    patch.setattr(Trainer, "_collected", wrong)


@fault(
    category="H",
    fresh=True,
    source="miles PR#68, OpenRLHF PR#853",
    cases=("trl",),
    variants=("base",),
    first="ref_log_probs ref_log_probs",
    rules=(
        "temperature",
        "reference",
    ),  # the last one names the temperature of the reference
    blind=("mean 1e-3",),
)
def reference_without_temperature(run: Run) -> None:
    """The reference scores by plain logits, and the policy by tempered ones."""
    if run.trainer.reference is None:
        raise ReplayError("there is no reference")
    run.trainer.reference._policy.temperature = 1.0


@fault(
    category="J",
    fresh=True,
    source="a divergence of the rollout's policy, which has no gradient",
    first="kl kl",
    rules=("kl",),
    blind=BLIND,
)
def divergence_of_the_old_policy(patch: Patch) -> None:
    """The KL term compares old log-probs with the reference, not those of the pass."""
    right: Any = losses._token_loss
    estimate: Any = losses._kl
    old: list[Tensor] = []

    def wrong(log_probs: Tensor, given: Any, *rest: Any) -> Any:
        old[:] = [given.old]
        return right(log_probs, given, *rest)

    patch.setattr(losses, "_token_loss", wrong)
    patch.setattr(losses, "_kl", lambda _, *rest: estimate(old[0].detach(), *rest))


@fault(
    category="J",
    fresh=True,
    source="a penalty in the reward whose coefficient the loss reads, too",
    cases=("reinforce_plus_plus",),
    variants=("base",),
    first="kl",
    rules=("term-not-computed", "new-tensor"),
)
def divergence_in_reward_and_loss(patch: Patch) -> None:
    """The KL of a token is taken off its reward, and added to the loss once more."""
    patch.setattr(ObjectiveFields, "kl_in_loss", property(lambda o: o.kl_coef != 0.0))


@fault(
    category="R",
    fresh=True,
    source="a frozen layer by detach in place of requires_grad",
    first="gradient",
    names=r"model\.(embed_tokens|layers\.0)\..*",
    rules=("gradient-missing", "gradient-zero", "backward-of-a-module"),
    blind=("loss 5 %", "loss 1 %", *BLIND),
)
def hidden_states_detached_before_layer_1(run: Run) -> None:
    """Hidden states are detached on their way into layer 1, so that nothing below it learns."""
    found = [m for n, m in run.trainer.policy.model.named_modules() if n.endswith("layers.1")]
    if not found:
        raise ReplayError("there is no layer 1")
    found[0].register_forward_pre_hook(lambda _, args: (args[0].detach(), *args[1:]))


@fault(
    category="R",
    fresh=True,
    source="Megatron#1503: a wrong dQ of fused attention",
    first="gradient",
    rules=("backward-of-a-module",),
    blind=("loss 5 %", "loss 1 %", *BLIND),
)
def gradient_of_queries_scaled_again(run: Run) -> None:
    """The gradient of queries is divided by the root of the head dimension once more."""

    factor = run.trainer.policy.model.config.head_dim**-0.5

    def scale(module: Any, _: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * factor)

    found = [m for n, m in run.trainer.policy.model.named_modules() if n.endswith("q_proj")]
    if not found:
        raise ReplayError("there are no queries")
    for module in found:
        module.register_forward_hook(scale)


@fault(
    category="T",
    fresh=True,
    source="a cap of final logits of another family",
    first="activations lm_head",
    rules=("output-projection", "module"),
)
def logits_capped(run: Run) -> None:
    """Logits pass a hyperbolic tangent that caps them at 30."""
    head: Any = run.trainer.policy.model.get_output_embeddings()
    head.register_forward_hook(lambda _, __, out: 30.0 * torch.tanh(out / 30.0), prepend=True)


@fault(
    category="T",
    fresh=True,
    source="Megatron#1304: layers numbered otherwise in a checkpoint",
    first="activations model.layers.0",
    rules=("module",),
)
@torch.no_grad()
def layers_exchanged(run: Run) -> None:
    """Weights of layer 0 are loaded into layer 1, and those of layer 1 into layer 0."""
    named = dict(run.trainer.policy.named_parameters())
    for name, parameter in named.items():
        if "layers.0." in name:
            other = named[name.replace("layers.0.", "layers.1.")]
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)
