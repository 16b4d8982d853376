"""Faults of sums of gradients over ranks: rows that stay away, means in place of sums, and compression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine.build import Run
from regress.engine.local import local
from regress.parallel import policy
from regress.parallel.reduction import sum_gradients
from tests.faults.fault import fault
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import EMBEDDED, HEAD_NORMS
from tests.faults.rounding import rounded

Groups = Iterable[tuple[Sequence[str], ProcessGroup]]
EMBEDDINGS = "model.embed_tokens.weight"


@fault(
    category="B",
    fresh=True,
    source="sparse gradients of embeddings, of which a rank takes the rows that it has sent",
    variants=("dp4-packed-mbs2",),
    first=f"gradient {EMBEDDINGS}",
    names=EMBEDDED,
    rules=(
        "gradient-of-one-tensor",  # names a part of the gradient that is not added
        "reduction",
        "gradients",  # names a sum that is left out
        "inputs-hold",
    ),
)
def rows_of_own_tokens_alone_received(patch: Patch) -> None:
    """A rank has no gradient for the embeddings of tokens that its own samples lack, and other samples have."""

    def wrong(parameters: Mapping[str, nn.Parameter], groups: Groups) -> None:
        grad = parameters[EMBEDDINGS].grad
        assert grad is not None
        touched = local(grad).ne(0).any(1, keepdim=True)
        sum_gradients(parameters, groups)
        local(grad).mul_(touched)

    patch.setattr(policy, "sum_gradients", wrong)


@fault(
    category="B",
    kind="precision",
    fresh=True,
    source="torch: DistributedDataParallel with bf16_compress_hook",
    variants=("dp2-ddp",),
    first="gradient",
    rules=("gradient-dtype", "precision", "gradients", "inputs-hold"),
)
def buckets_compressed_by_ddp(run: Run) -> None:
    """DDP sends its buckets of gradients in half precision."""

    module: Any = vars(run.trainer.policy)["_replicas"].module

    def compressed(bucket: Any) -> Any:
        group: ProcessGroup = module.process_group
        own = rounded(bucket.buffer() / group.size())
        work: Any = dist.all_reduce(own, group=group, async_op=True)
        return work.get_future().then(lambda done: rounded(done.value()[0]))

    # torch reads the annotations of a hook, which a lambda has not
    module.register_comm_hook(None, lambda _, bucket: compressed(bucket))


@fault(
    category="C",
    fresh=True,
    source="gradients of replicated norms that are averaged over tensor-parallel ranks, as replicas are",
    variants=("tp2-mbs3",),
    first="gradient",
    names=HEAD_NORMS,
    ranks=(0, 1),
    rules=(
        "gradient-averaged-over-ranks",
        "norms-not-summed",  # what is due is a sum over ranks with heads of their own
        "gradient-power-of-two",
        "gradient-scale",
        "gradients",
        "inputs-hold",
    ),
)
def norms_of_heads_averaged_over_their_ranks(patch: Patch) -> None:
    """Each rank has a part of the heads, and gradients of their norms are averaged over ranks, not summed."""

    def wrong(parameters: Mapping[str, nn.Parameter], groups: Groups) -> None:
        found = [(names, group) for names, group in groups]
        sum_gradients(parameters, found)
        averaged = [
            (name, group) for names, group in found for name in names if "k_norm" in name or "q_norm" in name
        ]
        assert averaged
        for name, group in averaged:
            grad: Tensor | None = parameters[name].grad
            assert grad is not None
            with torch.no_grad():
                local(grad).div_(group.size())

    patch.setattr(policy, "sum_gradients", wrong)
