"""First backward pass of a policy without an effect, for wrappers that arrange themselves by it."""

from __future__ import annotations

from regress.dump.trajectory import Trajectory
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.engine_ranks import World
from regress.engine.mini_batch import Microbatch, TokenBatch
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import BatchPlan


def rehearse(policy: LocalPolicy, world: World) -> None:
    """Run one backward pass for wrappers that arrange themselves by the first one, as they had done before.

    DistributedDataParallel groups gradients anew after it, and the groups decide the order of sums.
    """
    if not policy.rearranges:
        return
    count = 2 * world.plan.mesh.world_size
    samples = [Trajectory(f"rehearsal-{i:04d}", 0, [0] * 8, [0] * 4 + [1] * 4, 0.0, 4) for i in range(count)]
    batch = TokenBatch(samples, device=policy.device)

    def loss(_: Microbatch, out: TokenLogProbs) -> tuple[object, None]:
        return out.log_probs.sum() * 0.0, None

    policy.zero_grad()
    micros = batch.microbatches(BatchPlan(), world.plan, world.rank)
    policy.forward_backward(micros, loss)  # type: ignore[arg-type]  # nothing is handed back
    policy.zero_grad()
