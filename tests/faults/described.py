"""Faults of one process, written from descriptions of bugs and the engine alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regress.dump.trajectory import Trajectory
from regress.engine import optim, policy
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.errors import ReplayError
from regress.grpo import losses
from regress.grpo.logprobs import token_log_probs
from regress.grpo.objective import Objective
from regress.grpo.segments import segment_lengths, segment_sum
from tests.faults.advantages import with_groups
from tests.faults.fault import fault
from tests.faults.inputs import masks
from tests.faults.patch import Patch


@fault(
    category="A",
    fresh=True,
    source="open-instruct PR#535",
    first="token_loss elementwise_loss",
    rules=("token-loss", "term-left-out", "coefficient"),
)
def kl_averaged_over_everything(patch: Patch) -> None:
    """The KL term is one mean over all tokens of the microbatch, added to each of them."""
    right: Any = losses._total

    def wrong(policy: Tensor, kl: Tensor | None, entropy: Any, objective: Objective) -> Tensor:
        return right(policy, None if kl is None else kl.mean().expand_as(kl), entropy, objective)

    patch.setattr(losses, "_total", wrong)


@fault(
    category="H",
    fresh=True,
    source="TRL PR#5620",
    cases=("dr_grpo",),
    first="entropy entropy",
    rules=("log-probs-shifted",),
)
def entropy_one_token_late(patch: Patch) -> None:
    """The entropy of a token stands at the one behind it."""
    right: Any = token_log_probs

    def wrong(*args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return replace(found, entropy=None if found.entropy is None else found.entropy.roll(1))

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="I",
    fresh=True,
    source="NeMo-RL PR#2176",
    first="advantages advantages",
    rules=("advantage-groups",),
)
def prompts_share_a_group(patch: Patch) -> None:
    """Two prompts have one key, and their samples one group."""
    with_groups(patch, lambda groups: groups // 2)


@fault(
    category="K",
    fresh=True,
    source="EasyR1 PR#596, Soup#723",
    cases=("gspo",),
    first="ratio prob_ratio",
    rules=("ratio", "ratio-level"),
)
def prompt_counted_in_the_mean(patch: Patch) -> None:
    """The mean of a sample's log-ratios divides by four tokens of the prompt, too."""

    def wrong(log_probs: Tensor, old: Tensor, sequence: Tensor, count: int, *_: Any) -> Tensor:
        lengths = segment_lengths(sequence, count) + 4
        return torch.exp((segment_sum(log_probs - old, sequence, count) / lengths)[sequence])

    patch.setattr(losses, "importance_ratio", wrong)


@fault(
    category="M",
    fresh=True,
    source="Megatron PR#5976, lightning#1772",
    first="optimizer model.embed_tokens.weight/step",
    place="step0/rank0",
    rules=("step-counter",),
)
def counter_one_behind(run: Run) -> None:
    """The last update before a checkpoint was not counted."""
    for state in run.trainer.optimizer.state.values():
        state["step"] -= 1


@fault(
    category="M",
    fresh=True,
    source="verl#5070, verl PR#7215",
    first="param model.embed_tokens.weight",
    names=r"model\.embed_tokens\.weight",
    rules=("weight-decay",),
)
def embeddings_do_not_decay(patch: Patch) -> None:
    """Embeddings are among the parameters that do not decay."""
    right: Any = optim.update

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        with torch.no_grad():
            for parameter, name in zip(group["params"], group["param_names"], strict=True):
                if "embed" in name:
                    parameter.div_(1.0 - group["lr"] * group["weight_decay"])
        right(optimizer)

    patch.setattr(optim, "update", wrong)


@fault(
    category="L",
    fresh=True,
    source="pytorch#149768",
    first="optimizer model.embed_tokens.weight/exp_avg",
    steps=None,
    rules=("clip-of-gradients",),
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "allclose", "mean 1e-3"),
)
def thousandth_added_to_the_norm(patch: Patch) -> None:
    """Gradients are divided by their norm and a thousandth, in place of a millionth."""
    right: Any = LocalPolicy.clip_grad_norm

    def wrong(self: LocalPolicy, limit: float | None) -> Tensor:
        norm = right(self, None)
        if limit is not None:
            for _, parameter in self.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_((limit / (norm + 1e-3)).clamp(max=1.0))
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault(
    category="Q",
    fresh=True,
    source="Megatron PR#4243: a mask on the wrong side",
    first="batch_inputs response_mask",
    rules=("mask-shifted", "loss-mask"),
)
def first_token_not_in_the_loss(patch: Patch) -> None:
    """The first token of each completion is masked."""

    def change(sample: Trajectory) -> list[int]:
        mask = list(sample.loss_mask)
        mask[sample.prompt_length] = 0
        return mask

    masks(patch, change)


@fault(
    category="P",
    fresh=True,
    source="prime-rl PR#2823, vllm PR#51665",
    cases=("tied",),
    first="activations lm_head",
    steps=2,
    place="step1/rank0/micro0",
    rules=("output-projection", "stale-weights"),
)
def tied_head_not_refreshed(run: Run) -> None:
    """The output projection reads a copy of the tied weight from before the update; its gradient arrives."""
    head: Any = run.trainer.policy.model.get_output_embeddings()
    before = head.weight.detach().clone()
    head.forward = lambda hidden: functional.linear(hidden, before + (head.weight - head.weight.detach()))


@fault(
    category="F",
    fresh=True,
    source="Megatron PR#5694",
    cases=("moe",),
    first="gradient",
    names=r"model\.(embed_tokens|layers\..|norm)\..*",
    rules=("router-gradient", "backward-of-a-module"),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def load_balancing_loss_on(run: Run) -> None:
    """The auxiliary loss of the model's configuration acts on the routers, and is in no loss that is reported."""

    def add(_: Any, __: Any, out: Any) -> Any:
        logits, weights, chosen = out
        share = functional.one_hot(chosen, logits.shape[-1]).to(logits.dtype).mean((0, 1))
        own = 1e-3 * logits.shape[-1] * (share * logits.softmax(-1).mean(0)).sum()
        return logits, _WithAnotherLoss.apply(weights, own), chosen

    found = [m for m in run.trainer.policy.model.modules() if hasattr(m, "norm_topk_prob")]
    if not found:
        raise ReplayError("there is no router")
    for module in found:
        module.register_forward_hook(add)


class _WithAnotherLoss(torch.autograd.Function):
    """Passes a tensor on, and gives another loss the gradient of 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())
