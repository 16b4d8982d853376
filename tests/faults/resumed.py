"""Faults between two processes, of which the second goes on from the checkpoint of the first."""

from regress.engine.checkpoint import checkpoint_resume
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import fault, met_in

UNTIL_THE_END = {"steps": None, "variants": ("resume-at2",)}


@fault("N", "optimizer", "step-counter no-update moments-dropped", on="dense/resume-at2", steps=None)
@met_in("the_well#77")
@in_place_of(checkpoint_resume, "load_whole")
def optimizer_not_restored(*_):
    """Weights come from the checkpoint, and the optimizer begins anew."""
    return


@fault("N", "activations", "module-dtype embedding", on="dense/resume-at2", steps=None)
@met_in("OpenTau#185, Megatron#1359")
@around(checkpoint_resume, "load_weights")
def weights_restored_in_bfloat16(right, owner, weights):
    """Weights of a checkpoint are rounded to half precision."""
    right(owner, {name: value.bfloat16().to(value.dtype) for name, value in weights.items()})


@fault("N", "activations", "stale-weights embedding module", on="dense/resume-at2", steps=None)
@met_in("Megatron PR#5071, NeMo-RL PR#2372")
@in_place_of(checkpoint_resume, "load_weights")
def weights_not_restored(*_):
    """The optimizer's state comes from the checkpoint, and the weights are the initial ones."""
    return
