"""Faults of checkpoints, and of runs that go on from them."""

from dataclasses import replace

import torch

from regress.dump.taps import receiving
from regress.engine.checkpoint import checkpoint_resume
from regress.engine.checkpoint.checkpoint_tensors import load_weights
from regress.engine.grpo_trainer import Trainer
from regress.engine.reference_policy import Reference
from regress.grpo.coefficient_controllers import Coefficients
from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import fault, met_in
from tests.faults.harmless.model import modules_of
from tests.faults.optimizer import around_the_update
from tests.faults.ranks.helpers import AFTER_ATTENTION, MOMENTS


# the first mini-batch is trained on three times, and the second once
@fault("N", "coverage", "batch-left-out batch-twice other-samples", on="dapo/resume-at3", steps=None)
@met_in("prime-rl PR#1035: the place in the data is not in the checkpoint")
def epoch_begins_anew_behind_a_checkpoint(patch):
    """Updates that were made are counted, and mini-batches are counted from the first one again."""
    made_before = [0]

    def noted(update, self, work, *rest):
        made_before[0] = len(work.outcomes)
        update(self, work, *rest)

    def wrong(right, self, mini):
        work = self.unfinished
        number = len(work.outcomes) - made_before[0]
        return right(self, work.minis[number % len(work.minis)])

    patch.around(Trainer, "_update", noted)
    patch.around(Trainer, "_train_step", wrong)


# the weights are those of the next pass
@fault(
    "N",
    "old_log_probs",
    "old-is-current old-log-probs on-policy-ratio",
    on="cispo/resume-at3-dp2-to-tp2",
    steps=None,
)
@met_in("old log-probs that a resumed step computes anew, since no checkpoint holds them")
@around(checkpoint_resume, "restored")
def old_log_probs_of_the_resumed_policy(right, trainer, *rest):
    """Old log-probs of an unfinished step are computed by the policy as it comes out of the checkpoint."""
    work = right(trainer, *rest)
    with receiving(None):
        work.minis[:] = [trainer._recorded(mini) for mini in work.minis]
    return work


@fault("N", "sampler_weights", "sampler-mismatch", on="kl_cov/resume-at2", steps=None)
@met_in("this engine: weights of the rollout, normalized before rejection, were in no checkpoint")
@around(checkpoint_resume, "restored")
def sampler_weights_of_what_rejection_left(right, trainer, *rest):
    """Weights of the rollout are not restored, so that those of the tokens that are left take their place."""
    work = right(trainer, *rest)
    work.minis[:] = [replace(mini, tokens=replace(mini.tokens, correction=None)) for mini in work.minis]
    return work


# both name weights: those that are loaded anew, and those that a stage holds
@fault(
    "N",
    "activations model.layers.0",
    "stale-weights pipeline-exchange module inputs-hold",
    on="dense/resume-at2-fsdp2-to-pp2",
    names=AFTER_ATTENTION,
    steps=None,
)
@met_in("shards of a fused matrix that are joined in the order of their files' names")
@in_place_of(checkpoint_resume, "load_weights")
def shards_of_gates_joined_in_reverse(owner, weights):
    """A resumed run has the two halves of each gate's weight in the reverse order."""
    found = {name: w.roll(len(w) // 2, 0) for name, w in weights.items() if "gate_proj" in name}
    assert found
    load_weights(owner, {**weights, **found})


@fault(
    "N",
    "ref_log_probs",
    "reference precision inputs-hold",
    kind="precision",
    on="cispo_kl/resume-at2",
    steps=None,
    precisions="float64",
)
@met_in("OpenTau#185: a frozen model that a checkpoint holds in half precision")
@around(Reference, "load")
def reference_restored_in_bfloat16(right, self, weights):
    """The reference, which had moved, comes out of the checkpoint in half precision."""
    right(self, {name: rounded(value) for name, value in weights.items()})


# the first one names the parameters that it begins with
@fault("N", "param", "optimizer-settings inputs-hold", on="dense/resume-at2", steps=None)
@met_in("Megatron-Bridge PR#4082, NeMo-RL PR#2372: master weights that loading does not refresh")
def update_from_weights_of_before_the_checkpoint(patch):
    """The model has the weights of the checkpoint, and the first update starts from the initial ones."""
    masters = {}

    def noted(right, owner, weights):
        masters.update({parameter: parameter.detach().clone() for _, parameter in owner.named_parameters()})
        right(owner, weights)

    @torch.no_grad()
    def wrong(_, update):
        for parameter, master in masters.items():
            parameter.copy_(master)
        masters.clear()
        update()

    patch.around(checkpoint_resume, "load_weights", noted)
    around_the_update(patch, wrong)


# the first one names states that are exchanged
@fault(
    "N",
    "optimizer",
    "state-of-a-rank-unclipped inputs-hold",
    on="dense/resume-at2",
    names=r".*\.[kv]_proj\.weight/exp_avg(_sq)?",
    steps=None,
)
@met_in("an optimizer whose state is matched by place, with parameters in another order than before")
@around(checkpoint_resume, "load_whole")
def moments_of_keys_and_values_exchanged(right, optimizer, policy, *rest):
    """The projections of keys and values, which have one shape, resume from each other's moments."""
    right(optimizer, policy, *rest)
    named = dict(policy.named_parameters())
    for name, keys in named.items():
        if name.endswith("k_proj.weight"):
            values = named[name.replace("k_proj", "v_proj")]
            optimizer.state[keys], optimizer.state[values] = (optimizer.state[values], optimizer.state[keys])


# the second one names the state added to
@fault(
    "N",
    "optimizer",
    "precision state-of-a-rank-unclipped inputs-hold",
    kind="precision",
    on="dense/resume-at2",
    names=MOMENTS,
    steps=None,
    precisions="float64",
)
@met_in("Megatron#1359: moments that a checkpoint holds in half precision")
@around(checkpoint_resume, "load_whole")
def moments_restored_in_bfloat16(right, optimizer, *rest):
    """Moments come out of the checkpoint with the bits of half precision; what is added to them has all of its own."""
    right(optimizer, *rest)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(rounded(state[key]))


@fault(
    "N",
    "gradient",
    "backward-of-a-module precision gradients inputs-hold",
    kind="precision",
    on="dense/fsdp2-checkpointing-mbs4",
    names=r"model\.(embed_tokens|layers)\..*",
    ranks=(0, 1),
)
@met_in("pytorch#190758: activation checkpointing that recomputes under autocast")
def norms_recomputed_in_bfloat16(run):
    """Outputs of the norms of a layer have half precision when the backward pass computes them again."""

    def wrong(_, __, out):
        backwards = torch._C._current_graph_task_id() != -1
        return rounded(out) if backwards else None

    layers = modules_of(run, lambda one: hasattr(one, "post_attention_layernorm"))
    for layer in layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(wrong)


@fault("N", "param", "learning-rate", on="on_policy/resume-at2", steps=None)
@met_in("the_well#77")
@in_place_of(checkpoint_resume, "_restore_scheduler")
def schedule_begins_anew(*_):
    """Weights and moments come from the checkpoint, and the learning rate begins to rise again."""
    return


# the last one names the reference that the penalty compares
@fault("N", "ref_log_probs", "reference advantage-penalty", on="cispo_kl/resume-at2", steps=None)
@met_in("ms-swift PR#8275")
@in_place_of(checkpoint_resume, "_restore_reference")
def reference_not_restored(*_):
    """The reference, which had moved, is the initial one again."""
    return


# names the coefficient
@fault("N", "advantages", "advantage-penalty", on="cispo_kl/resume-at2", steps=None)
@met_in("the_well#77: a controller whose state is not kept")
@in_place_of(Coefficients, "load_state_dict")
def coefficients_not_restored(*_):
    """The coefficient of the KL, which had been adapted, is the configured one again."""
    return
