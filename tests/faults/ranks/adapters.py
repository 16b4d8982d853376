"""Faults of adapters on several ranks."""

from torch.nn.functional import linear

from regress.engine.local_tensor import local
from regress.parallel.adapter_factor_styles import OutputFactor
from regress.parallel.model_families import Family
from regress.replay.fault_injection import around, in_place_of
from tests.faults import adapter
from tests.faults.fault import fault, met_in
from tests.faults.ranks.helpers import on_rank, without


@fault(
    "S",
    "activations",
    "weights-of-a-rank",
    on="lora/dp2",
    names=r"model\.layers\..|model\.norm|lm_head",
    ranks=(1,),
)
@met_in("verl#7495")
def adapter_off_on_one_rank(run):
    """One rank computes with the base model."""
    if on_rank(1):
        adapter.adapter_switched_off(run)


@fault("S", "gradient", "reduction not-reduced", on="lora/dp2", names=r".*\.lora_A\..*", ranks=(0, 1))
@met_in("VeOmni PR#1115")
def factors_a_not_summed(run):
    """Replicas keep their own gradients of the factors A."""
    without(run, ".lora_A.")


@fault("S", "gradient", "reduction backward-of-a-module", on="lora/tp2", ranks=(0, 1))
@met_in("torchtitan PR#2388")
@in_place_of(OutputFactor, "_forward")
def gradient_between_factors_not_summed(self, module, mesh, x):
    """A gets from each rank the gradient through that rank's outputs alone."""
    return linear(x, local(module.weight))


@fault("S", "gradient", "reduction", on="lora/tp2-sp", names=r".*\.(o|down)_proj\.lora_B\..*", ranks=(0, 1))
@met_in("Megatron#1446")
@around(Family, "partial")
def factors_b_of_own_tokens(right, *args):
    """Under sequence parallelism the whole factors B keep the gradients of a rank's own tokens."""
    return (name for name in right(*args) if ".lora_B." not in name)


# gradient-averaged-over-ranks: it says that what is whole on each rank is summed over them
@fault(
    "S",
    "gradient",
    "gradient-power-of-two gradient-averaged-over-ranks",
    on="lora/tp2-sp",
    names=r".*\.(q|v|gate)_proj\.lora_A\..*",
    ranks=(0, 1),
)
@met_in("Megatron#1446, the reverse")
@in_place_of(Family, "_factors_of_gathered")
def factors_a_of_gathered_tokens_summed(*args):
    """Gradients of factors A, which saw all tokens on every rank, are summed over the ranks."""
    return iter(())
