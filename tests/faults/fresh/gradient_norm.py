"""Faults of the norm of gradients and of its bound."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.local_tensor import local
from regress.parallel import parallel_policy as parallel_policy
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.fault import EVERY_CHECK, SCALE_BLIND_CHECKS, fault, met_in
from tests.faults.optimizer import EMBEDDING
from tests.faults.ranks.helpers import MOMENTS


@fault(
    "L",
    "optimizer",
    "clip-of-gradients state-of-a-rank-unclipped inputs-hold",
    on="tied/dp2-pp2-mbs2",
    names=MOMENTS,
)
@met_in("a limit that is meant for the gradient of one rank, under a sum over ranks")
@around(LocalPolicy, "clip_grad_norm")
def limit_of_the_norm_shared_by_ranks(right, self, limit):
    """The norm at which gradients are clipped is divided by the number of ranks."""
    return right(self, None if limit is None else limit / dist.get_world_size())


@fault("L", "grad_norm grad_norm", "norm-of-a-part norm inputs-hold", on="gpt2/left-mbs3")
@met_in("DeepSpeed#8475: a group of parameters that the norm does not go through")
@around(LocalPolicy, "_total_norm")
def embeddings_left_out_of_the_norm(right, self, norms):
    """The norm is that of all gradients but those of the embeddings of tokens and positions."""
    return right(self, {n: norm for n, norm in norms.items() if "wte" not in n and "wpe" not in n})


@fault(
    "L", "optimizer", "clip-of-gradients state-of-a-rank-unclipped inputs-hold", on="gpt2/mbs4", names=MOMENTS
)
@met_in("a fused optimizer that is told the factor of a clip which was applied before")
@around(LocalPolicy, "clip_grad_norm")
def factor_of_the_clip_applied_twice(right, self, limit):
    """Gradients are multiplied by the factor that clips them twice."""
    norm = right(self, limit)
    if limit is not None:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)
    return norm


# both name another time
@fault("L", "grad_norm", "norm norm-of-a-part inputs-hold", on="dense/dp4-packed-mbs2", ranks=(0, 1, 2, 3))
@met_in("AReaL#312: a norm that is taken before the gradients of ranks are added")
def norm_before_ranks_are_summed(patch):
    """The norm is that of each rank's own gradient, before the sum over ranks; the gradients themselves are right."""
    kept = []

    def noted(right, parameters, groups):
        own = [local(p.grad) for p in parameters.values() if p.grad is not None]
        kept[:] = [torch.linalg.vector_norm(grad) for grad in own]
        right(parameters, groups)

    patch.around(parallel_policy, "sum_gradients", noted)
    patch.setattr(ParallelPolicy, "_total_norm", lambda *_: torch.linalg.vector_norm(torch.stack(kept)))


# the first one names a part
@fault(
    "L",
    "optimizer",
    "clip-of-gradients state-of-a-rank-unclipped inputs-hold",
    on="moe/ep2",
    names=r".*\.experts\..*/exp_avg(_sq)?",
    ranks=(0, 1),
)
@met_in("DeepSpeed PR#5411: experts that are a group of their own for clipping")
@around(LocalPolicy, "clip_grad_norm")
def experts_clipped_by_their_own_norm(right, self, limit):
    """Gradients of experts are clipped by the norm of all experts, others by the norm of all gradients."""
    found = [p.grad for name, p in self.named_parameters() if ".experts." in name and p.grad is not None]
    before = [grad.clone() for grad in found]
    norm = right(self, limit)
    if limit is not None:
        square = torch.stack([grad.square().sum() for grad in before]).sum()
        dist.all_reduce(square)
        factor = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for grad, known in zip(found, before, strict=True):
            grad.copy_(known * factor)
    return norm


def _scaled_by(patch, factor):
    """Multiply gradients by ``factor(limit, norm)``; the norm is right where it is reported."""
    right = LocalPolicy.clip_grad_norm

    def wrong(self, limit):
        norm = right(self, None)
        for _, parameter in self.named_parameters():
            if limit is not None and parameter.grad is not None:
                local(parameter.grad).mul_(factor(limit, norm))
        return norm

    patch.setattr(LocalPolicy, "clip_grad_norm", wrong)


@fault("L", f"optimizer {EMBEDDING}/exp_avg", "clip-of-gradients state-of-a-rank-unclipped")
@met_in("a clip by max_norm / norm without its limit of 1")
@by(_scaled_by)
def gradients_raised_to_the_limit(limit, norm):
    """A gradient below the limit is scaled up to it, too."""
    return limit / (norm + 1e-6)


# names what several ranks hold, and is counted more than once
@fault("L", "grad_norm", "norm-of-a-part", on="tied/pp2-mbs4", ranks=(0, 1))
@met_in("Megatron: shared parameters that the norm counts on first and last stage")
def tied_weight_in_the_norm_of_both_stages(run):
    """The gradient of the tied weight enters the norm once on each of the stages that hold it."""
    model = run.trainer.policy
    assert model._stages.tied
    model._owned = model._owned | set(model._stages.tied)


# gradients of norms, which are whole on every rank, are not clipped
@fault(
    "L",
    "optimizer",
    "clip-of-gradients-left-out clip-of-gradients state-of-a-rank-unclipped",
    on="tied/tp2-pp2-mbs4",
    names=r".*norm\.weight/exp_avg(_sq)?",
)
@met_in("torchtitan#766: clipping of the list of split parameters alone")
@around(LocalPolicy, "clip_grad_norm")
def whole_parameters_not_clipped(right, self, limit):
    """All gradients enter the norm, and only those of parameters that are split over ranks are clipped by it."""
    found = [p for _, p in self.named_parameters() if p.grad is not None and not isinstance(p, DTensor)]
    before = [(p.grad, p.grad.clone()) for p in found if p.grad is not None]
    norm = right(self, limit)
    for grad, known in before:
        grad.copy_(known)
    return norm


@fault("L", "grad_norm", "norm-of-a-part", on="dense/dp2-fsdp2-tp2", blind=SCALE_BLIND_CHECKS)
@met_in("torchtitan#766, NeMo-RL PR#3788")
@in_place_of(ParallelPolicy, "_total_norm")
def norm_over_tensor_ranks_alone(self, norms):
    """Squares of norms are summed over the ranks that share matrices, and not over those that share shards."""
    squares = [norm.double().square() for norm in norms.values()]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum()
    group = self._world.group("tp")
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt().to(self.log_prob_dtype)


@fault("L", "grad_norm", "norm-of-a-part", on="dense/fsdp2-pp2-budget72", blind=SCALE_BLIND_CHECKS)
@met_in("Megatron#7452 finding 8, DeepSpeed#8475")
@around(ParallelPolicy, "_total_norm")
def shards_counted_by_name(right, self, norms):
    """Only the shard on the lowest rank enters the norm, of all that a parameter has."""
    known = self._owned
    earlier = [name for part in self._world.gather(list(known))[: self._world.rank] for name in part]
    self._owned = known - set(earlier)
    try:
        return right(self, norms)
    finally:
        self._owned = known


@fault("L", "grad_norm grad_norm", "norm", blind=SCALE_BLIND_CHECKS)
@met_in("AReaL#312: a sum of squares without its root")
@around(LocalPolicy, "_total_norm")
def root_of_the_norm_not_taken(right, self, norms):
    """The squares of all gradients are added, and their sum stands for the norm."""
    return right(self, norms).square()


@fault("L", "optimizer model.embed_tokens.weight/exp_avg", "clip-of-gradients", steps=None, blind=EVERY_CHECK)
@met_in("pytorch#149768")
@around(LocalPolicy, "clip_grad_norm")
def thousandth_added_to_the_norm(right, self, limit):
    """Gradients are divided by their norm and a thousandth, in place of a millionth."""
    norm = right(self, None)
    if limit is not None:
        for _, parameter in self.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_((limit / (norm + 1e-3)).clamp(max=1.0))
    return norm
