"""Faults of tensor and sequence parallelism."""

from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import linear

from regress.engine.local_tensor import local
from regress.parallel import parallel_policy, sequence_parallel, vocabulary_embedding
from regress.parallel.tensor_parallel import TensorPlan
from regress.replay.fault_injection import in_place_of
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.ranks.helpers import AFTER_ATTENTION, EMBEDDED, without


@fault("C", "invariants", "split-left-out", on="dense/tp2", names="parts")
@met_in("pytorch#108840")
@in_place_of(parallel_policy, "_tensor_parallel")
def weights_left_whole(*_):
    """No weight is split, and every rank computes everything: all values are right."""
    return TensorPlan((), None, {})


@fault(
    "C",
    "gradient",
    "norms-not-summed",
    on="dense/tp2-sp",
    names=r".*layernorm\.weight|model\.norm\.weight",
    ranks=(0, 1),
    blind=FORWARD_CHECKS,
)
@met_in("Megatron#1446")
def norms_of_columns_not_summed(run):
    """Norms that see a part of the tokens have a part of the gradient."""
    without(run, "layernorm", "model.norm")


@fault(
    "C",
    "gradient",
    "router-gradient",
    on="moe/tp2-sp-left",
    names=r".*\.gate\.weight",
    ranks=(0, 1),
    blind=FORWARD_CHECKS,
)
@met_in("Megatron#599, torchtitan#2387")
def router_not_summed(run):
    """So has a router."""
    without(run, "mlp.gate.")


@fault("C", "gradient", "tied-embeddings", on="tied/tp2", names=rf"{EMBEDDED}|lm_head\.weight", ranks=(0, 1))
@met_in("torch 2.13 parallelize_module unties embeddings")
def untied(run):
    """The output projection gets a parameter of its own."""
    head = run.trainer.policy.model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())


@fault("C", "gradient", "backward-of-a-module", on="dense/tp2", names=r"model\..*", ranks=(0, 1))
@met_in("torchtitan PR#2388")
@in_place_of(vocabulary_embedding, "_project")
def gradient_taken_for_whole(module, mesh, hidden):
    """A part of the gradient of hidden states enters the backward pass as if it were replicated."""
    mine = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local()
    return linear(mine, local(module.weight))


@fault("C", "activations", "tensor-exchange", on="dense/tp2-sp", names=AFTER_ATTENTION, ranks=(0, 1))
@met_in("Megatron#7452 finding 7")
@in_place_of(sequence_parallel, "_own_columns")
def columns_of_the_other_rank(whole, group):
    """Hidden states are scattered in the wrong order."""
    return whole.chunk(group.size(), dim=1)[group.size() - 1 - group.rank()].contiguous()
