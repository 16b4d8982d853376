"""Faults in the norm of gradients that lie on several ranks."""

import torch

from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.local_tensor import local
from regress.parallel import fsdp
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around
from tests.faults.fault import EVERY_CHECK, fault, met_in
from tests.faults.ranks.helpers import MOMENTS


@fault("L", "grad_norm", "norm-of-a-part", on="dense/fsdp2", ranks=(0, 1))
@met_in("torchtitan#766")
def norm_of_own_shard(patch):
    patch.setattr(ParallelPolicy, "_total_norm", LocalPolicy._total_norm)


@fault("L", "grad_norm", "norm-of-a-part", on="dense/tp2 dense/dp2", ranks=(0, 1))
@met_in("NeMo-RL PR#3788, ROCm TransformerEngine PR#715")
def replicas_counted_each(run):
    """Parameters on several ranks enter the norm once for each of them."""
    model = run.trainer.policy
    model._owned = frozenset(name for name, _ in model.named_parameters())


@fault("L", "grad_norm", "norm-of-a-part norm", on="moe/ep2", ranks=(0, 1))
@met_in("DeepSpeed PR#5411, DeepSpeed#8475")
def experts_left_out_of_the_norm(run):
    model = run.trainer.policy
    model._owned = frozenset(name for name in model._owned if name not in model._experts)


@fault(
    "L",
    "optimizer",
    "clip-of-gradients state-of-a-rank-unclipped",
    on="tied/fsdp2",
    names=MOMENTS,
    ranks=(0, 1),
)
@met_in("AReaL#312")
@around(ParallelPolicy, "clip_grad_norm")
def clipped_by_own_norm(right, self, max_norm):
    """The norm is right where it is reported, and that of the rank's own part where it is used."""
    norm = right(self, None)
    grads = [local(p.grad) for _, p in self.named_parameters() if p.grad is not None]
    own = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
    for grad in grads:
        grad.mul_((max_norm / own).clamp(max=1.0))
    return norm


@fault(
    "L",
    "optimizer",
    "clip-of-gradients",
    on="tied/fsdp2",
    names=MOMENTS,
    ranks=(0, 1),
    silent={"tied/fsdp2-fp32": "3e-7 of the gradient is less than the noise of float32"},
    blind=EVERY_CHECK,
)
@met_in("pytorch#149768")
@around(ParallelPolicy, "clip_grad_norm")
def epsilon_of_every_rank(right, self, max_norm):
    """norm + 1e-6 on a partial sum adds it once for each rank."""
    return right(self, max_norm - 1e-6 * max_norm / right(self, None).item())


@fault(
    "O",
    "activations",
    "dtype",
    on="tied/fsdp2",
    status="dtype",
    says="golden bfloat16, actual float32",
    precisions="mixed",
)
@met_in("accelerate on CPUs: the precision policy never reaches FSDP")
@around(fsdp, "MixedPrecisionPolicy")
def precision_policy_ignored(policy, **_):
    """Blocks compute in the dtype of the weights, not in that of the precision policy."""
    return policy()
