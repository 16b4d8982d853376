"""Faults of low-rank adapters."""

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import linear

from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.checkpoint import checkpoint_resume
from regress.parallel import adapter_factor_styles
from regress.parallel.adapter_factor_styles import InputFactor
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import fault, met_in
from tests.faults.harmless.model import modules_of
from tests.faults.optimizer import around_the_update
from tests.faults.ranks.helpers import AFTER_ATTENTION


# the first one names a sum left out
@fault(
    "S",
    "activations model.layers.0",
    "tensor-exchange module",
    on="lora/tp2",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
)
@met_in("a row-parallel layer whose adapter skips the reduction of its base layer")
@in_place_of(InputFactor, "_forward")
def values_between_factors_not_summed(self, module, mesh, x):
    """Each rank multiplies the second factor by what its own columns of the first have made."""
    return linear(x, adapter_factor_styles._weight(module))


@fault(
    "S",
    "activations model.layers.0",
    "tensor-exchange module precision",
    kind="precision",
    on="lora/tp2-sp",
    names=AFTER_ATTENTION,
)
@met_in("peft: autocast_adapter_dtype, and sums in the dtype of the adapter")
@in_place_of(InputFactor, "_forward")
def values_between_factors_in_bfloat16(self, module, mesh, x):
    """Each rank rounds its part of the values between the factors to half precision before they are scattered."""
    own = rounded(linear(x, adapter_factor_styles._weight(module)))
    partial = DTensor.from_local(own, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[self.output_layout]).to_local()


TIMES = 16.0
"""Ratio of the learning rates of factors in LoRA+ (arXiv 2402.12354)."""


@fault("S", "param", "learning-rate optimizer-settings inputs-hold", on="lora/mbs4", names=r".*\.lora_B\..*")
@met_in("LoRA+ that is switched on by default")
@by(around_the_update)
@torch.no_grad()
def second_factors_learn_faster(optimizer, update):
    """The factors B are a group of parameters with 16 times the learning rate."""
    found = [
        (parameter, parameter.clone())
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group["param_names"], strict=True)
        if "lora_B" in name
    ]
    assert found
    update()
    for parameter, before in found:
        parameter.copy_(before + TIMES * (parameter - before))


@fault(
    "S",
    "activations model.layers.0",
    "stale-weights module inputs-hold",
    on="lora/resume-at2",
    names=AFTER_ATTENTION,
    steps=None,
)
@met_in("ms-swift PR#8275: an adapter of which a resumed run loads one factor")
@around(checkpoint_resume, "load_weights")
def second_factors_not_restored(right, owner, weights):
    """The factors A come from the checkpoint, and the factors B are those that the run was built with."""
    own = {name: p.detach().clone() for name, p in owner.named_parameters() if "lora_B" in name}
    assert own
    right(owner, {**weights, **own})


@fault("S", "activations model.layers.0", "module inputs-hold", on="lora/packed-mbs3", names=AFTER_ATTENTION)
@met_in("adapters that are made for completions (activated LoRA, arXiv 2504.12397)")
def adapters_off_at_prompts(run):
    """Adapters are applied at tokens that the loss is taken over, and at no others."""
    policy = run.trainer.policy

    def wrong(module, args, out):
        counted = policy.running.response_mask.bool()[..., None]
        return torch.where(counted, out, module.base_layer(args[0]))

    for layer in modules_of(run, lambda one: hasattr(one, "lora_A") and hasattr(one, "base_layer")):
        layer.register_forward_hook(wrong)


@fault(
    "S",
    "activations model.layers.0",
    "module inputs-hold",
    on="lora/mbs4",
    names=AFTER_ATTENTION,
    place="step0/rank0/micro0",
)
@met_in("an adapter that is switched off for the reference, and on again when the next pass has begun")
def adapters_off_in_the_first_microbatch(patch):
    """The first microbatch of an update is computed without adapters, and all others with them."""
    first = []

    def begun(passes, self, microbatches, *rest):
        first[:] = microbatches[:1]
        return passes(self, microbatches, *rest)

    def wrong(right, self, model, micro, *rest):
        off = torch.is_grad_enabled() and bool(first) and micro is first[0]
        layers = [one for one in model.modules() if hasattr(one, "lora_A") and hasattr(one, "scaling")]
        assert layers
        kept = [layer.scaling for layer in layers]
        for layer in layers if off else ():
            layer.scaling = dict.fromkeys(layer.scaling, 0.0)
        try:
            return right(self, model, micro, *rest)
        finally:
            for layer, known in zip(layers, kept, strict=True):
                layer.scaling = known

    patch.around(LocalPolicy, "forward_backward", begun)
    patch.around(LocalPolicy, "_run", wrong)
