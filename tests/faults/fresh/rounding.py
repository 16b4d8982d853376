"""Precision faults of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regress.engine import passes, policy, trainer
from regress.engine.batch import TokenBatch
from regress.engine.build import Run
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.grpo.advantages import token_advantages
from regress.grpo.logprobs import token_log_probs
from regress.grpo.losses import token_loss
from tests.faults.fault import fault
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.patch import Patch
from tests.faults.rounding import outputs_rounded, rounded


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a loss that is summed under autocast",
    first="loss",
    rules=(
        "precision",
        "loss-sum",
    ),  # the last one names the dtype
)
def loss_summed_in_bfloat16(patch: Patch) -> None:
    """Losses of tokens are right, and their sum has half precision."""
    right: Any = passes._sum
    patch.setattr(passes, "_sum", lambda micro, values: rounded(right(micro, values)))


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="a norm of gradients in their own half precision",
    first="grad_norm grad_norm",
    rules=("precision", "norm"),
)
def norm_in_bfloat16(patch: Patch) -> None:
    """The norm of each gradient is rounded to half precision before the norms are joined."""
    right: Any = LocalPolicy._total_norm

    def wrong(self: LocalPolicy, norms: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = right(self, {name: rounded(norm) for name, norm in norms.items()})
        return found

    patch.setattr(LocalPolicy, "_total_norm", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="rewards that a service returns in half precision",
    cases=("on_policy",),
    variants=("base",),
    precisions=("float64",),
    first="advantages advantages",
    rules=("advantage-dtype", "precision"),
)
def rewards_in_bfloat16(patch: Patch) -> None:
    """Rewards are rounded to half precision before their group is looked at."""
    right: Any = token_advantages
    patch.setattr(
        trainer, "token_advantages", lambda rewards, *args, **rest: right(rounded(rewards), *args, **rest)
    )


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="updates without master weights, added in half precision",
    first=f"param {EMBEDDING}",
    rules=(
        "param-dtype",
        "precision",
        "optimizer-settings",
    ),  # the last one names the dtype of the sum
)
def updates_in_bfloat16(patch: Patch) -> None:
    """Updates are rounded to half precision before they are added; the parameter itself is not."""

    @torch.no_grad()
    def wrong(optimizer: Optimizer, update: Callable[[], None]) -> None:
        before = {p: p.clone() for group in optimizer.param_groups for p in group["params"]}
        update()
        for parameter, known in before.items():
            parameter.copy_(known + rounded(parameter - known))

    around_the_update(patch, wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="NeMo-RL docs/adding-new-models.md: embeddings of small numbers",
    first="activations model.embed_tokens",
    rules=("module-dtype", "precision"),
)
def embeddings_in_bfloat16(run: Run) -> None:
    """Embeddings of tokens are rounded to half precision."""
    outputs_rounded(run, "embed_tokens")


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="rllm#816",
    first="ref_log_probs ref_log_probs",
    rules=("softmax-dtype", "precision"),
)
def reference_stored_in_float16(patch: Patch) -> None:
    """Log-probs of the reference are stored in float16 until the update."""
    right: Any = Trainer._collected

    def wrong(self: Trainer, source: Any, *rest: Any) -> Tensor:
        found: Tensor = right(self, source, *rest)
        return found if source is self.policy else rounded(found, torch.float16)

    patch.setattr(Trainer, "_collected", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="SkyRL PR#1908: log-probs that travel in half precision",
    cases=("cispo",),
    first="sampler_weights sampler_weights",
    rules=("sampler-mismatch", "precision"),
)
def sampler_log_probs_travel_in_bfloat16(patch: Patch) -> None:
    """The trainer gets the sampler's log-probs in half precision."""
    right: Any = TokenBatch.sampler_log_probs

    def wrong(self: TokenBatch, dtype: torch.dtype) -> Tensor | None:
        found: Tensor | None = right(self, dtype)
        return None if found is None else rounded(found)

    patch.setattr(TokenBatch, "sampler_log_probs", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="O04: a softmax that asks for float32 whatever its logits are",
    precisions=("float64",),
    first="log_probs log_probs",
    rules=("softmax-dtype", "precision"),
)
def softmax_in_float32(patch: Patch) -> None:
    """Log-probs of float64 logits are computed in float32."""
    right: Any = token_log_probs

    def wrong(logits: Tensor, *args: Any, **rest: Any) -> Any:
        found = right(logits.float(), *args, **rest)
        entropy = None if found.entropy is None else found.entropy.to(logits.dtype)
        return replace(found, log_probs=found.log_probs.to(logits.dtype), entropy=entropy)

    patch.setattr(policy, "token_log_probs", wrong)


@fault(
    category="O",
    kind="precision",
    fresh=True,
    source="xtuner PR#1108: a cap at the least number of half precision",
    cases=("dr_grpo",),
    first="token_loss elementwise_loss",
    rules=(
        "precision",
        "token-loss",
    ),  # the last one names the dtype
)
def loss_of_a_token_in_float16(patch: Patch) -> None:
    """The terms of a token's loss are added in float16."""
    right: Any = token_loss

    def wrong(*args: Any, **rest: Any) -> Any:
        found = right(*args, **rest)
        return replace(found, loss_K=rounded(found.loss_K, torch.float16))

    patch.setattr(passes, "token_loss", wrong)
