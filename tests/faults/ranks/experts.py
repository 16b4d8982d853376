"""Faults of expert parallelism."""

import torch
import torch.distributed as dist

from regress.parallel import expert_parallel
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.ranks.helpers import AFTER_ATTENTION, EXPERTS, on_rank, sums_of


def weighted(patch, change):
    """Change the weights by which the rows of experts are added."""
    right = expert_parallel._added
    patch.setattr(
        expert_parallel,
        "_added",
        lambda rows, place, index, weights, dtype: right(rows, place, index, change(weights), dtype),
    )


@fault("F", "invariants", "split-left-out", on="moe/ep2", names="parts")
@met_in("SpecForge#226, of parameters")
@in_place_of(expert_parallel, "apply")
def experts_left_whole(*_):
    """Every rank keeps all experts, and its tokens: all values are right."""
    return expert_parallel.ExpertPlan({})


@fault("F", "activations", "expert-exchange", on="moe/ep2", names=AFTER_ATTENTION, ranks=(0, 1))
@met_in("xtuner PR#2053")
@around(expert_parallel, "_run")
def rows_to_the_wrong_expert(right, module, rows, experts):
    """Each rank counts its experts from the other end."""
    return right(module, rows, module.num_experts - 1 - experts)


@fault("F", "activations", "expert-exchange", on="moe/ep2", names=AFTER_ATTENTION, ranks=(0, 1))
@met_in("vllm-gaudi PR#1796")
@around(expert_parallel, "_run")
def rows_of_later_experts_dropped(right, *args):
    """Ids count all experts, and a rank other than the first finds none of them in its own list."""
    return right(*args) * float(on_rank(0))


@fault("F", "activations", "expert-exchange", on="moe/ep2", names=AFTER_ATTENTION, ranks=(0, 1))
@met_in("PaddleFormers PR#3452")
def combined_without_weights(patch):
    weighted(patch, torch.ones_like)


@fault("F", "activations", "expert-exchange", on="moe/ep2", names=AFTER_ATTENTION, ranks=(0, 1))
@met_in("PaddleFormers PR#3452: before and after the way")
def weighted_twice(patch):
    """By the sender, and by the combine."""
    weighted(patch, torch.square)


@fault(
    "F",
    "gradient",
    "router-gradient",
    on="moe/ep2",
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(?!mlp\.experts).*",
    ranks=(0, 1),
    blind=FORWARD_CHECKS,
)
@met_in("transformers#48687")
def router_without_gradient(patch):
    """The loss is right, and the router learns nothing from it."""
    weighted(patch, torch.detach)


@fault("F", "gradient", "experts-reduced", on="moe/ep2", names=EXPERTS, ranks=(0, 1), blind=FORWARD_CHECKS)
@met_in("Megatron#1628")
def experts_summed_over_their_owners(run):
    """Different experts of several ranks are added as if they were replicas."""
    model = run.trainer.policy
    found = sums_of(run)
    (group,) = {id(group): group for _, group in found}.values()
    found.append((sorted(model._experts), group))


@fault("F", "gradient", "experts-reduced", on="moe/ep2", names=EXPERTS, ranks=(0, 1), blind=FORWARD_CHECKS)
@met_in("pytorch#160285, DeepSpeed PR#5259")
def experts_times_ranks(run):
    """An expert has met the tokens of all ranks, and its gradient is multiplied for them once more."""
    model = run.trainer.policy
    right = model.forward_backward

    def wrong(*args):
        results = right(*args)
        for name, parameter in model.named_parameters():
            if name in model._experts:
                parameter.grad *= dist.get_world_size()
        return results

    model.forward_backward = wrong
