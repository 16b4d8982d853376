"""The objective as one function: from what is known of an update to every quantity that it makes of it.

The trainer calls the parts one by one; whoever asks what an objective would have made of recorded values (diagnosis,
`regress explain`, the oracle, the signal of a golden case) asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from regress.grpo.advantage_computation import token_advantages
from regress.grpo.fields import ObjectiveFields
from regress.grpo.kl_divergence import kl_penalty
from regress.grpo.loss_aggregation import batch_weights, entropy_scale, entropy_weights
from regress.grpo.token_losses import entropy_in_loss, token_loss


@dataclass(frozen=True)
class Samples:
    """Samples of an update, and of the rollout that it is of.

    Attributes:
        sequence: [K] sample of each loss token; ``count`` samples, those without loss tokens included.
        own: [count] numbers of the update's samples in the rollout.
        whole: True if the update has all samples of the rollout, in its order.
        length: longest completion that is allowed; 0 where nobody knows it.
        microbatches: samples of each microbatch; none where nobody knows them, or there is one.
        ranks: ranks that hold different samples.
        spans: tokens of each sample's completion, tools' answers included.
    """

    sequence: Tensor
    count: int
    own: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    whole: bool = False
    length: int = 0
    microbatches: Sequence[Sequence[int]] = ()
    ranks: int = 1
    spans: Sequence[int] | None = None

    @property
    def partition(self) -> Sequence[Sequence[int]]:
        """Samples of each microbatch: one of all of them where nobody knows any."""
        return self.microbatches or [[*range(self.count)]]


Values = Mapping[str, Tensor]
"""Name -> values of the K loss tokens; ``rewards`` and ``groups`` are those of the M samples of the rollout."""

_OF_TOKENS = (
    *("log_probs", "old_log_probs", "ref_log_probs", "sampler_log_probs"),
    *("advantages", "entropy", "weights"),
)
Compute = Callable[[Values, Samples, ObjectiveFields], dict[str, Tensor]]


def loss_of(values: Values, samples: Samples, o: ObjectiveFields) -> dict[str, Tensor]:
    """Return ratio, sampler_weights, kl, policy_loss, entropy_loss and token_loss, those that the objective has.

    Raises:
        InputError: for values that the objective needs and that are not there.
    """
    if o.statistics_scope == "microbatch" and o.compares_tokens and len(samples.partition) > 1:
        return _loss_of_microbatches(values, samples, o)
    found = token_loss(
        values["log_probs"],
        values["old_log_probs"],
        values["advantages"],
        samples.sequence,
        samples.count,
        o,
        ref_log_probs_K=values.get("ref_log_probs"),
        sampler_log_probs_K=values.get("sampler_log_probs"),
        entropy_K=values.get("entropy"),
        entropy_scale_K=_entropy_scale(values, samples, o),
    )
    named = {
        "ratio": found.ratio_K,
        "sampler_weights": found.correction_K,
        "kl": found.kl_K,
        "policy_loss": found.policy_K,
        "entropy_loss": entropy_in_loss(found),
        "token_loss": found.loss_K,
    }
    return {name: each for name, each in named.items() if each is not None}


def _loss_of_microbatches(values: Values, samples: Samples, o: ObjectiveFields) -> dict[str, Tensor]:
    """Return `loss_of` where tokens are compared with those of their own microbatch alone."""
    given = {name: each for name in _OF_TOKENS if (each := values.get(name)) is not None}
    if (scale := _entropy_scale(values, samples, o)) is not None:
        given["entropy_scale"] = scale
    found: dict[str, Tensor] = {}
    for members in samples.partition:
        ordered = torch.tensor(sorted(members), dtype=torch.int64)
        select = torch.nonzero(torch.isin(samples.sequence, ordered))[:, 0]
        own = Samples(torch.searchsorted(ordered, samples.sequence[select]), len(members))
        for name, each in loss_of({name: one[select] for name, one in given.items()}, own, o).items():
            whole = found.get(name, torch.zeros(len(samples.sequence), dtype=each.dtype))
            found[name] = whole.index_copy(0, select, each)
    return found


def _entropy_scale(values: Values, samples: Samples, o: ObjectiveFields) -> Tensor | None:
    """Return what entropies are multiplied by; None where the weights of losses are theirs, or are not known."""
    if "weights" not in values or "entropy_scale" in values:
        return values.get("entropy_scale")
    own = entropy_weights(samples.sequence, samples.count, o, partition=samples.partition)
    return None if own is None else entropy_scale(values["weights"], own)


def gradients_of(values: Values, samples: Samples, o: ObjectiveFields) -> dict[str, Tensor]:
    """Return token_gradient and entropy_gradient: of the weighted sum of the loss by log-probs and entropies."""
    asked = {
        name: values[name].detach().requires_grad_() for name in ("log_probs", "entropy") if name in values
    }
    total = (values["weights"] * loss_of({**values, **asked}, samples, o)["token_loss"]).sum()
    names = ["token_gradient", "entropy_gradient"][: len(asked)]
    if not total.requires_grad:
        return {name: torch.zeros_like(values["weights"]) for name in names}
    found = torch.autograd.grad(total, [*asked.values()], allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def advantages_of(values: Values, samples: Samples, o: ObjectiveFields) -> dict[str, Tensor]:
    """Return the advantages of the loss tokens, from the rewards of the rollout."""
    rewards = values["rewards"]
    if samples.whole:
        penalty = None
        if o.kl_in_reward:
            penalty = kl_penalty(values["old_log_probs"], values.get("ref_log_probs"), o)
        return {"advantages": token_advantages(rewards, values["groups"], samples.sequence, o, penalty)}
    each = token_advantages(rewards, values["groups"], torch.arange(len(rewards)), o)
    return {"advantages": each[samples.own[samples.sequence]]}


def weights_of(values: Values, samples: Samples, o: ObjectiveFields) -> dict[str, Tensor]:
    """Return the weights of the loss tokens."""
    weights = batch_weights(
        samples.sequence,
        samples.count,
        o,
        max_completion_length=max(samples.length, 1),
        partition=samples.partition,
        ranks=samples.ranks,
        completion_lengths=samples.spans,
    )
    return {"weights": weights}


def mistakes(
    compute: Compute, samples: Samples, o: ObjectiveFields
) -> dict[str, Callable[[Values, ObjectiveFields], dict[str, Tensor]]]:
    """Return by id what people compute in place of a part of this objective, where that is more than one change."""
    if compute not in (loss_of, gradients_of) or o.loss not in ("ppo_clip", "clip_cov"):
        return {}

    def minimum_first(values: Values, own: ObjectiveFields) -> dict[str, Tensor]:
        advantages = values["advantages"]
        alone = replace(own, kl_coef=0.0, entropy_coef=0.0)
        bare = compute({**values, "advantages": torch.ones_like(advantages)}, samples, alone)
        if compute is loss_of:
            return {"policy_loss": bare["policy_loss"] * advantages}
        rest = compute({**values, "advantages": torch.zeros_like(advantages)}, samples, own)
        return {name: bare[name] * advantages + rest[name] for name in bare}

    return {"the_minimum_before_the_advantage": minimum_first}
