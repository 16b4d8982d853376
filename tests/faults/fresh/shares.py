"""Faults in shares of the loss and of the gradient: what they are divided by, and which ones are added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine import passes
from regress.engine.batch import Microbatch
from regress.engine.local import local
from regress.engine.trainer import MiniBatch, Trainer
from regress.grpo.segments import segment_lengths
from regress.parallel import policy, reduction
from regress.parallel.pipeline import Pipeline
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import before_the_second_backward_pass


def _reweighed(patch: Patch, change: Any) -> None:
    """Give the loss tokens of a mini-batch the weights ``change(trainer, mini)``."""
    right: Any = Trainer._laid_out

    def wrong(self: Trainer, *args: Any) -> MiniBatch:
        found: MiniBatch = right(self, *args)
        return replace(found, tokens=replace(found.tokens, weights=change(self, found)))

    patch.setattr(Trainer, "_laid_out", wrong)


@fault(
    category="A",
    fresh=True,
    source="lengths from attention_mask in place of the mask of completions",
    first="weights weights",
    rules=("weights-denominator",),
)
def prompts_counted_in_the_length(patch: Patch) -> None:
    """A sample's sum is divided by all of its tokens, those of the prompt included."""

    def change(_: Trainer, mini: MiniBatch) -> Tensor:
        tokens = mini.tokens
        assert tokens.weights is not None
        own = segment_lengths(tokens.sequence, tokens.num_sequences)
        share = own / torch.tensor(mini.batch.lengths)
        return tokens.weights * share[tokens.sequence]

    _reweighed(patch, change)


@fault(
    category="A",
    fresh=True,
    source="a sequence mean over packed rows",
    variants=("dp4-packed-mbs2",),
    first="weights weights",
    ranks=(0, 1, 2, 3),
    rules=(
        "weights-denominator",
        "mean-of-means",
    ),  # a row is a microbatch, so this is the mean of their means
)
def packed_rows_taken_for_samples(patch: Patch) -> None:
    """The mean over tokens is taken of each packed row, and then the mean over rows."""

    def change(self: Trainer, mini: MiniBatch) -> Tensor:
        tokens = mini.tokens
        assert tokens.weights is not None
        rows = mini.batch.partition(self._plan(), self.world.plan)
        weights = torch.zeros_like(tokens.weights)
        for members in rows:
            inside = torch.isin(tokens.sequence, torch.tensor(members))
            weights[inside] = 1.0 / (len(rows) * max(int(inside.sum()), 1))
        return weights

    _reweighed(patch, change)


@fault(
    category="D",
    fresh=True,
    source="verl PR#4250: the last token of a chunk has no label there, and is masked",
    cases=("tools",),
    variants=("cp2",),
    first="loss loss",
    names="loss",
    ranks=(0,),
    rules=("loss-sum", "equal-log-probs-other-loss"),  # names tokens that are left out, and the mask
)
def tokens_behind_the_border_left_out(patch: Patch) -> None:
    """Tokens that the last column of a rank's chunk predicts do not enter the sum of the loss."""
    right: Any = passes._sum

    def wrong(micro: Microbatch, values: Tensor) -> Tensor:
        width = micro.layout.shape[1]
        border = (micro.predictors % width) == width - 1
        return right(micro, values.masked_fill(border, 0.0))

    patch.setattr(passes, "_sum", wrong)


@fault(
    category="B",
    fresh=True,
    source="a mean over all ranks that is undone by the ranks that had samples",
    cases=("dr_grpo",),
    variants=("dp5",),
    first="gradient",
    ranks=(0, 1, 2, 3, 4),
    rules=("gradient-scale",),
)
def averaged_over_ranks_and_scaled_for_those_with_samples(patch: Patch) -> None:
    """Gradients are averaged over five ranks, and multiplied by the four that have samples."""
    right: Any = reduction.sum_gradients

    def wrong(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        for names, group in groups:
            own = [parameters[name].grad for name in names]
            some = any(bool(local(grad).any()) for grad in own if grad is not None)
            active = torch.tensor(float(some))
            dist.all_reduce(active, group=group)
            right(parameters, [(names, group)])
            for name in names:
                grad = parameters[name].grad
                assert grad is not None
                local(grad).mul_(float(active) / group.size())

    patch.setattr(policy, "sum_gradients", wrong)


@fault(
    category="E",
    fresh=True,
    source="Megatron#844: an all-reduce of tied embeddings that averages",
    cases=("tied",),
    variants=("pp2-bfs-left-mbs5",),
    first="gradient",
    names=r"model\.embed_tokens\.weight",
    ranks=(0, 1),
    rules=(
        "tied-embeddings",
        "gradient-averaged-over-ranks",
        "gradient-power-of-two",
        "gradient-scale",
        "gradient-of-one-tensor",
    ),  # the last three name a scale on one tensor, and its factor
)
def tied_gradient_averaged(patch: Patch) -> None:
    """The gradient of the tied weight is the mean of those on first and last stage."""
    right: Any = Pipeline.sum_tied

    def wrong(self: Pipeline) -> None:
        right(self)
        for name, parameter in self.stages.named_parameters():
            if name in self.stages.tied and parameter.grad is not None:
                local(parameter.grad).mul_(0.5)

    patch.setattr(Pipeline, "sum_tied", wrong)


@fault(
    category="R",
    fresh=True,
    source="a backward pass that is made again after an error, on one rank",
    variants=("dp2-packed-budget48",),
    first="token_gradient",
    ranks=(1,),
    place="step0/rank1/micro1",
    rules=("token-gradient-power-of-two", "token-gradient-denominators", "token-gradient-scale"),
)
def second_microbatch_of_a_rank_goes_back_twice(patch: Patch) -> None:
    """One rank makes the backward pass of its second microbatch twice."""
    before_the_second_backward_pass(patch, lambda _, share: share.backward(retain_graph=True))
