"""Faults of parameters and optimizer states on several ranks."""

from regress.engine import optimizer
from regress.engine.local_tensor import local
from regress.parallel.parallel_policy import ParallelPolicy
from tests.faults.fault import fault, met_in
from tests.faults.ranks.helpers import AFTER_ATTENTION, exchanged, on_rank


@fault("M", "optimizer", "state-of-a-rank", on="dense/dp2 dense/fsdp2", ranks=(1,))
@met_in("Megatron PR#6920, accelerate#2665")
def update_lost_on_a_rank(patch):
    """One rank does not see what the optimizer has made of its part."""
    if on_rank(1):
        patch.setattr(optimizer, "update", lambda _: None)


@fault("M", "param", "state-of-a-rank weight-decay", on="dense/dp2", ranks=(1,), precisions="float64 float32")
@met_in("verl#5070")
def decay_on_one_rank_only(run):
    if on_rank(1):
        for group in run.trainer.optimizer.param_groups:
            group["weight_decay"] = 0.0


@fault(
    "M",
    "optimizer",
    "step-counter state-of-a-rank",
    on="dense/dp2",
    names=r".*/step",
    ranks=(1,),
    precisions="float64 float32",
)
@met_in("Megatron PR#5976")
def counter_ahead_on_a_rank(run):
    if on_rank(1):
        for state in run.trainer.optimizer.state.values():
            state["step"] += 1


# state-of-a-rank-unclipped: every rank is wrong, and the state that was exchanged is named
@fault(
    "N",
    "optimizer",
    "state-of-a-rank state-of-a-rank-unclipped",
    on="dense/fsdp2",
    names=r".*/exp_avg",
    ranks=(0, 1),
)
@met_in("Megatron PR#6858")
def state_of_another_shard(run):
    """Each rank resumes from the optimizer state of the other."""
    states = run.trainer.optimizer.state
    named = run.trainer.policy.named_parameters()
    exchanged({name: states[parameter]["exp_avg"] for name, parameter in named})


@fault("N", "activations", "module", on="dense/fsdp2", names=AFTER_ATTENTION, ranks=(0, 1))
@met_in("ROCm Megatron-LM PR#63")
def shards_exchanged(run):
    """Two ranks hold each other's part of a weight."""
    name = "model.layers.0.self_attn.v_proj.weight"
    exchanged({name: dict(run.trainer.policy.named_parameters())[name]})


@fault("M", "activations", "stale-weights", on="dapo/fsdp2", ranks=(0, 1), update=1)
@met_in("Megatron#950")
def stale_part_on_a_rank(patch):
    """Forward and backward passes gather what one rank had before the last update."""
    before = {}

    def wrong(right, self, *args):
        parts = {name: local(parameter.data) for name, parameter in self.named_parameters()}
        now = {name: part.clone() for name, part in parts.items()}
        if on_rank(1) and before:
            for name, part in parts.items():
                part.copy_(before[name])
        before.update(now)
        results = right(self, *args)
        for name, parameter in self.named_parameters():
            local(parameter.data).copy_(now[name])
        return results

    patch.around(ParallelPolicy, "forward_backward", wrong)
