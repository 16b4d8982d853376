"""Faults that show where strategies meet: ranks, packing and precision at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from regress.engine import projection
from regress.engine.attention import visible
from regress.engine.batch import Microbatch
from regress.engine.local import local
from regress.parallel import expert, policy, reduction, ring, segments, tensor
from regress.parallel.policy import ParallelPolicy
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import AFTER_ATTENTION
from tests.faults.rounding import rounded


@fault(
    category="B",
    fresh=True,
    source="FunASR PR#3472, DeepSpeed PR#7985",
    cases=("tools",),
    variants=("dp2-packed-budget48",),
    first="gradient",
    ranks=(0, 1),
    rules=("reduction", "not-reduced"),
)
def last_microbatch_not_summed(patch: Patch) -> None:
    """Gradients are summed over ranks before the last microbatch, whose own part stays on its rank."""
    right: Any = ParallelPolicy.forward_backward
    backward: Any = ParallelPolicy._backward

    def wrong(self: ParallelPolicy, micros: Sequence[Microbatch], loss: Any) -> Any:
        groups, left = list(self._summed), [len(micros)]

        def and_sum(own: ParallelPolicy, share: Tensor) -> None:
            left[0] -= 1
            if left[0] == 0:
                reduction.sum_gradients(dict(own.named_parameters()), groups)
            backward(own, share)

        self._summed.clear()
        with mock.patch.object(ParallelPolicy, "_backward", and_sum):
            results = right(self, micros, loss)
        self._summed.extend(groups)
        return results

    patch.setattr(ParallelPolicy, "forward_backward", wrong)


@fault(
    category="D",
    fresh=True,
    source="VeOmni PR#1115",
    variants=("dp2-cp2-packed",),
    first="gradient",
    ranks=(0, 1, 2, 3),
    rules=("reduction", "not-reduced"),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def sequence_ranks_left_out_of_the_sum(patch: Patch) -> None:
    """Gradients are summed over replicas alone, and each has two ranks with parts of its sequences."""
    right: Any = ParallelPolicy._sums

    def wrong(self: ParallelPolicy) -> Any:
        group = self._world.group("dp")
        return [(names, group) for names, _ in right(self)]

    patch.setattr(ParallelPolicy, "_sums", wrong)


@fault(
    category="D",
    fresh=True,
    source="ms-swift PR#10071, LlamaFactory PR#7318",
    variants=("fsdp2-cp2-zigzag",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("positions-not-passed", "context-exchange", "rotary"),
)
def positions_of_a_contiguous_split(patch: Patch) -> None:
    """Columns are dealt out in zigzag, and positions as if they were contiguous."""
    right: Any = ParallelPolicy._run

    def wrong(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        width = micro.input_ids.shape[1]
        here = self._world.mesh.coordinates(self._world.rank)["cp"]
        columns = (torch.arange(width) + here * width).expand_as(micro.input_ids)
        return right(self, model, replace(micro, position_ids=columns), hidden)

    patch.setattr(ParallelPolicy, "_run", wrong)


@fault(
    category="D",
    fresh=True,
    source="Megatron PR#6205",
    cases=("tools",),
    variants=("cp2-packed",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("context-exchange", "packed-leak"),
)
def boundaries_one_column_late(patch: Patch) -> None:
    """The borders of packed samples are taken from another table, one column late."""
    right: Any = visible

    def wrong(layout: Any, queries: Tensor, keys: Tensor) -> Tensor:
        return right(layout, (queries - 1).clamp(min=0), (keys - 1).clamp(min=0))

    patch.setattr(segments, "visible", wrong)


@fault(
    category="R",
    fresh=True,
    source="Liger-Kernel: a last block that is not full",
    variants=("tp2-packed-chunk7",),
    first="logit_gradient logit_gradient",
    rules=("logit-gradient", "logit-gradient-shard"),
)
def last_chunk_without_gradient(patch: Patch) -> None:
    """The last chunk of tokens is projected without a graph, behind a split vocabulary."""
    right: Any = projection._in_chunks

    def wrong(model: Any, hidden: Tensor, targets: Tensor, compute: Any, chunk: int) -> Any:
        found = right(model, hidden, targets, compute, chunk)
        full = len(targets) - (len(targets) % chunk or chunk)
        values = torch.cat([found.log_probs[:full], found.log_probs[full:].detach()])
        return replace(found, log_probs=values)

    patch.setattr(projection, "_in_chunks", wrong)


@fault(
    category="C",
    fresh=True,
    source="Megatron#1446",
    variants=("dp2-tp2-sp-packed",),
    first="gradient",
    names=r".*norm\.weight",
    ranks=(0, 1, 2, 3),
    rules=("norms-not-summed", "reduction"),
    blind=("loss 5 %", "loss 1 %", "allclose", "mean 1e-3"),
)
def norms_summed_over_replicas_alone(patch: Patch) -> None:
    """Gradients of all norms are summed over replicas, and not over the ranks that share their tokens and heads."""
    right: Any = tensor.apply
    patch.setattr(tensor, "apply", lambda *args, **rest: replace(right(*args, **rest), partial=()))


@fault(
    category="O",
    fresh=True,
    kind="precision",
    source="DeepSpeed PR#7985",
    variants=("dp2-tp2",),
    first="gradient",
    # gradients: the sum of what was rounded is not, so that its values fit into no narrower dtype
    rules=("gradient-dtype", "gradients"),
)
def gradients_reduced_in_bfloat16(patch: Patch) -> None:
    """Gradients are rounded to half precision on their way into the sum over ranks."""
    right: Any = reduction.sum_gradients

    def wrong(parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], Any]]) -> None:
        for names, _ in groups:
            for name in names:
                grad = parameters[name].grad
                if grad is not None:
                    own = local(grad)
                    own.copy_(own.bfloat16())
        right(parameters, groups)

    patch.setattr(policy, "sum_gradients", wrong)


@fault(
    category="F",
    fresh=True,
    source="NeMo-RL PR#3208, SkyRL PR#1908",
    cases=("moe",),
    variants=("ep2-cp2-packed",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    # module: it names what ranks exchange within the layer; two kinds of exchange lie in it
    rules=("expert-exchange", "router", "module"),
)
def weights_of_the_next_token(patch: Patch) -> None:
    """Rows come back from experts of other ranks, and are weighted for the token behind theirs."""
    right: Any = expert._added

    def wrong(rows: Tensor, place: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        return right(rows, place, index, weights.roll(1, 0), dtype)

    patch.setattr(expert, "_added", wrong)


@fault(
    category="O",
    fresh=True,
    kind="precision",
    source="hidden states sent in half precision",
    cases=("tied",),
    variants=("tp2-pp2-mbs4",),
    first="activations model.layers.1",
    rules=("module", "pipeline-exchange", "module-dtype"),
)
def hidden_states_sent_in_bfloat16(patch: Patch) -> None:
    """Stages hand hidden states on in half precision, to ranks that share the next layers."""
    right: Any = ParallelPolicy._run

    def wrong(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        return right(self, model, micro, None if hidden is None else rounded(hidden))

    patch.setattr(ParallelPolicy, "_run", wrong)


@fault(
    category="O",
    fresh=True,
    kind="precision",
    source="Megatron#1464, ROCm aiter PR#3334",
    variants=("cp2-ring-packed",),
    first="activations model.layers.0",
    names=AFTER_ATTENTION,
    rules=("context-exchange", "module"),
)
def merged_in_bfloat16(patch: Patch) -> None:
    """The factors that make partial sums of a ring comparable have half precision."""
    right: Any = ring._kept
    patch.setattr(ring, "_kept", lambda maximum, raised: rounded(right(maximum, raised)))
