"""Bugs that compute the same here, each with the proof: none may be flagged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regress.engine import passes, policy
from regress.engine.batch import Microbatch
from regress.engine.policy import LocalPolicy
from regress.engine.trainer import Trainer
from regress.grpo import losses
from regress.grpo.kl import kl_estimate
from regress.grpo.logprobs import token_log_probs
from regress.grpo.losses import token_loss
from tests.faults.advantages import with_groups
from tests.faults.fault import fault
from tests.faults.gradient import valued
from tests.faults.normalization import weighed
from tests.faults.patch import Patch

CONSTANT = "the schedule of these cases is constant: every multiple of its length has the same learning rate"


@fault(category="M", kind="equivalent", source="accelerate PR#999, transformers PR#24088", proof=CONSTANT)
def schedule_stepped_by_microbatches(patch: Patch) -> None:
    """The schedule goes on after every microbatch."""
    right: Any = Trainer._schedule

    def wrong(self: Trainer, outcome: Any) -> None:
        for _ in range(3):
            right(self, outcome)

    patch.setattr(Trainer, "_schedule", wrong)


@fault(category="M", kind="equivalent", source="lightning#1772", proof=CONSTANT)
def schedule_not_stepped(patch: Patch) -> None:
    """The schedule stays where it is."""
    patch.setattr(Trainer, "_schedule", lambda *_: None)


@fault(
    category="G",
    kind="equivalent",
    source="LlamaFactory PR#7318",
    variants=("mbs4", "packed-mbs3"),
    proof="rotary attention depends on differences of positions within a sample alone, which an offset leaves",
)
def rotary_positions_from_seven(patch: Patch) -> None:
    """The model counts positions from seven."""
    right: Any = LocalPolicy._run

    def wrong(self: LocalPolicy, model: Any, micro: Microbatch, *rest: Any) -> Tensor:
        return right(self, model, replace(micro, position_ids=micro.position_ids + 7), *rest)

    patch.setattr(LocalPolicy, "_run", wrong)


@fault(
    category="H",
    kind="equivalent",
    source="logits that are shifted by their maximum before the softmax",
    cases=("dense", "dr_grpo"),
    proof="a softmax does not change with a constant that is added to all of its logits",
)
def logits_shifted(patch: Patch) -> None:
    """A constant is added to the logits of each token."""
    right: Any = token_log_probs
    patch.setattr(policy, "token_log_probs", lambda logits, *args, **rest: right(logits + 0.5, *args, **rest))


@fault(
    category="K",
    kind="equivalent",
    source="tianshou#433",
    proof="no loss of these cases exceeds a hundred times the size of its advantage",
)
def dual_clip_far_away(patch: Patch) -> None:
    """A dual clip at 100 is on."""
    right: Any = losses._dual_clip
    patch.setattr(
        losses,
        "_dual_clip",
        lambda policy, advantages, o: right(policy, advantages, replace(o, dual_clip=100.0)),
    )


@fault(
    category="I",
    kind="equivalent",
    source="R1-V#67",
    cases=("dense", "dr_grpo"),
    proof="all tokens of a sample have one advantage, and the order of groups enters no statistic",
)
def groups_in_reversed_order(patch: Patch) -> None:
    """Groups are numbered from the last to the first."""
    with_groups(patch, lambda groups: groups.max() - groups)


@fault(
    category="J",
    kind="equivalent",
    source="Schulman: the direction of k2",
    cases=("dr_grpo", "dapo"),
    proof="these objectives have no KL term: its estimator is never called",
)
def kl_of_another_sign(patch: Patch) -> None:
    """The divergence has the wrong sign where there is none."""
    right: Any = kl_estimate
    patch.setattr(losses, "kl_estimate", lambda *args: -right(*args))


@fault(
    category="A",
    kind="equivalent",
    source="transformers PR#34191",
    variants=("mbs4", "mbs3"),
    proof="a mean over samples of means over their tokens is a mean of such means over microbatches of equally many "
    "samples",
)
def mean_of_equal_microbatches(patch: Patch) -> None:
    """The loss is the mean of each microbatch's mean over samples."""
    weighed(
        patch,
        lambda right, tokens, parts, objective, **rest: right(
            tokens, parts, replace(objective, denominator_scope="microbatch"), **rest
        ),
    )


@fault(
    category="Q",
    kind="equivalent",
    source="MemGen PR#33",
    proof="no token sees padding, and no loss token lies there",
)
def padding_of_the_stop_token(patch: Patch) -> None:
    """Padding is filled with token 1 in the model's inputs."""
    right: Any = LocalPolicy._run

    def wrong(self: LocalPolicy, model: Any, micro: Microbatch, *rest: Any) -> Tensor:
        there = torch.from_numpy(micro.layout.attention_mask)
        return right(self, model, replace(micro, input_ids=torch.where(there, micro.input_ids, 1)), *rest)

    patch.setattr(LocalPolicy, "_run", wrong)


@fault(
    category="R",
    kind="equivalent",
    source="advantages that keep a graph",
    proof="token_loss detaches its advantages, so that a graph of theirs gets no gradient",
)
def advantages_with_a_graph(patch: Patch) -> None:
    """Advantages carry a graph of their own."""
    right: Any = token_loss

    def wrong(log_probs: Tensor, old: Tensor, advantages: Tensor, *args: Any, **rest: Any) -> Any:
        return right(log_probs, old, valued(advantages, log_probs), *args, **rest)

    patch.setattr(passes, "token_loss", wrong)
