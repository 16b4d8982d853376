"""Faults of pipeline stages: what they hand on, hand back and keep."""

from dataclasses import replace

import torch

from regress.engine.local_tensor import local
from regress.parallel import pipeline_parallel
from regress.parallel.parallel_policy import ParallelPolicy
from regress.parallel.pipeline_parallel import Pipeline, relay
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.ranks.helpers import EMBEDDED, DividedGradient, on_rank


# tokens see samples before them, besides missing some of their own; pipeline-exchange names masks of a stage
@fault(
    "E",
    "activations model.layers.1",
    "module packed-leak pipeline-exchange",
    on="dense/pp2-1f1b-packed-mbs3",
    names=r"model\.layers\.1|model\.norm|lm_head",
    ranks=(1,),
)
@met_in("a mask that a later stage keeps, by the shape of the row")
def mask_of_the_first_microbatch_on_a_later_stage(patch):
    """The second stage masks every packed row as it did the first one of that shape."""
    later = [False]
    known = {}

    def noted(run, self, model, micro, hidden=None):
        later[0] = hidden is not None
        return run(self, model, micro, hidden)

    def wrong(attention, self, micro):
        kept = known.setdefault((id(self), micro.layout.shape), micro) if later[0] else micro
        return attention(self, kept)

    patch.around(ParallelPolicy, "_run", noted)
    patch.around(ParallelPolicy, "_attention", wrong)


# names what it receives from the stage behind it
@fault(
    "E",
    "gradient",
    "gradient-of-a-stage backward-of-a-module gradient-divided-by-microbatches gradient-scale gradients inputs-hold",
    on="dense/pp2-mbs4",
    names=r"model\.(embed_tokens|layers\.0)\..*",
    ranks=(0,),
)
@met_in("torchtitan#1733: scale_grads, where the loss of the last stage is scaled back")
def mean_over_microbatches_handed_back(patch):
    """The last stage divides the gradients that it hands back by the number of microbatches, and keeps its own."""
    counts = [1]

    def begun(passes, self, microbatches, *rest):
        counts[0] = len(microbatches)
        return passes(self, microbatches, *rest)

    def wrong(right, self, model, micro, hidden=None):
        if hidden is not None and hidden.requires_grad:
            hidden = DividedGradient.apply(hidden, counts[0])
        return right(self, model, micro, hidden)

    patch.around(ParallelPolicy, "forward_backward", begun)
    patch.around(ParallelPolicy, "_run", wrong)


# the first one names the dtype
@fault(
    "E", "ref_log_probs", "reference precision inputs-hold", kind="precision", on="dense/pp2-1f1b-packed-mbs3"
)
@met_in("a dtype of stages that is set for inference, which scores the reference, too")
@in_place_of(pipeline_parallel, "relay")
def hidden_states_of_scores_sent_in_bfloat16(ranks, group, count, forward, buffer):
    """In passes without a backward pass, which score the reference, stages send hidden states in half precision."""

    def narrowed(stage, micro, hidden):
        return forward(stage, micro, None if hidden is None else rounded(hidden))

    relay(ranks, group, count, narrowed, buffer)


# the last three name a scale on one tensor, and its factor
@fault(
    "E",
    "gradient",
    "tied-embeddings gradient-averaged-over-ranks gradient-power-of-two gradient-scale gradient-of-one-tensor",
    on="tied/pp2-bfs-left-mbs5",
    names=r"model\.embed_tokens\.weight",
    ranks=(0, 1),
)
@met_in("Megatron#844: an all-reduce of tied embeddings that averages")
@around(Pipeline, "sum_tied")
def tied_gradient_averaged(right, self):
    """The gradient of the tied weight is the mean of those on first and last stage."""
    right(self)
    for name, parameter in self.stages.named_parameters():
        if name in self.stages.tied and parameter.grad is not None:
            local(parameter.grad).mul_(0.5)


class _Late(torch.autograd.Function):
    """Passes hidden states on, and hands back the gradient of those before them."""

    @staticmethod
    def forward(ctx, hidden, kept):
        ctx.kept = kept
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        before = ctx.kept[0] if ctx.kept else grad
        ctx.kept[:] = [grad]
        return before, None


@fault(
    "E",
    "gradient",
    "gradient-of-a-stage backward-of-a-module gradients inputs-hold",
    on="dense/pp2-1f1b-packed-mbs3",
    names=r"model\.embed_tokens\..*|model\.layers\.0\..*",
    ranks=(0,),
)
@met_in("a buffer of gradients to send that is filled behind the send")
def gradient_of_the_microbatch_before_handed_back(patch):
    """The last stage hands back the gradient of the hidden states of the microbatch before, from the second one on."""
    kept = []

    def begun(passes, self, *args):
        kept.clear()
        return passes(self, *args)

    def wrong(right, self, model, micro, hidden=None):
        if hidden is not None and hidden.requires_grad:
            hidden = _Late.apply(hidden, kept)
        return right(self, model, micro, hidden)

    patch.around(ParallelPolicy, "forward_backward", begun)
    patch.around(ParallelPolicy, "_run", wrong)


# optimizer-settings: names what is done to parameters afterwards
@fault(
    "E",
    f"param {EMBEDDING}",
    "no-update state-of-a-rank optimizer-settings inputs-hold",
    on="tied/pp2",
    names=EMBEDDED,
    ranks=(1,),
)
@met_in("Megatron#656: a copy of the embeddings on the last stage that nobody refreshes")
@by(around_the_update)
@torch.no_grad()
def tied_weight_of_the_last_stage_left_behind(optimizer, update):
    """The last stage keeps the tied weight as it was before the update."""
    pairs = [
        (parameter, parameter.clone())
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group["param_names"], strict=True)
        if name == EMBEDDING
    ]
    update()
    if on_rank(1):
        for parameter, before in pairs:
            parameter.copy_(before)


# both exchanges name positions that a stage or rank makes itself
@fault(
    "E",
    "activations model.layers.1",
    "pipeline-exchange tensor-exchange module rotary inputs-hold",
    on="dense/tp2-pp2-1f1b-packed-mbs3",
    names=r"model\.layers\.1|model\.norm|lm_head",
    ranks=(2, 3),
)
@met_in("position ids that the first stage alone is given")
@around(ParallelPolicy, "_run")
def later_stages_without_positions(right, self, model, micro, hidden=None):
    """A later stage takes every token for the first one of its sample: its buffer of position ids holds zeros."""
    if hidden is not None:
        micro = replace(micro, position_ids=torch.zeros_like(micro.position_ids))
    return right(self, model, micro, hidden)


# the last one names what stages hand to each other, and microbatches in another order
@fault("E", "ref_log_probs", "reference pipeline-exchange", on="tied/pp2-mbs4")
@met_in("a buffer of received hidden states that is read one microbatch late")
@around(pipeline_parallel, "relay")
def hidden_states_of_the_microbatch_before(right, ranks, group, count, forward, buffer):
    """In passes without a backward pass a later stage reads the hidden states that arrived before the present ones."""
    known = {}

    def late(stage, micro, hidden):
        before = hidden
        if hidden is not None:
            before = known.get(stage, hidden)
            known[stage] = hidden
        return forward(stage, micro, before)

    right(ranks, group, count, late, buffer)


# one rank alone stays away from the sum
@fault(
    "E",
    "gradient",
    "tied-embeddings not-reduced",
    on="tied/tp2-pp2-mbs4",
    names=EMBEDDED,
    blind=FORWARD_CHECKS,
)
@met_in("Megatron#844, Megatron#656")
def tied_gradient_summed_on_one_tensor_rank(patch):
    """Stages exchange the gradients of one part of the tied weight, and keep their own of the other."""
    place = [0]

    def noted(right, self, *args):
        place[0] = self._world.mesh.coordinates(self._world.rank)["tp"]
        return right(self, *args)

    patch.around(ParallelPolicy, "forward_backward", noted)
    patch.around(Pipeline, "sum_tied", lambda sums, self: sums(self) if place[0] == 0 else None)
