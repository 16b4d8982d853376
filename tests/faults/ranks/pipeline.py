"""Faults of pipelines."""

from regress.parallel import pipeline_parallel, pipeline_stages
from regress.parallel.pipeline_parallel import Pipeline
from regress.replay.fault_injection import around, in_place_of
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.ranks.helpers import AFTER_ATTENTION, EMBEDDED, on_rank


@fault("E", "gradient", "tied-embeddings", on="tied/pp2", names=EMBEDDED, ranks=(0, 1), blind=FORWARD_CHECKS)
@met_in("Megatron#844")
@in_place_of(Pipeline, "sum_tied")
def tied_gradient_not_summed(self):
    return None


@fault("E", "gradient", "tied-embeddings gradient-power-of-two", on="tied/pp2", names=EMBEDDED, ranks=(0, 1))
@met_in("Megatron#844: in the hook and after it")
@around(Pipeline, "sum_tied")
def tied_gradient_summed_twice(right, self):
    right(self)
    right(self)


@fault("A", "gradient", "gradient-divided-by-microbatches", on="tied/pp2-mbs4", ranks=(0, 1))
@met_in("torchtitan#1733")
@around(pipeline_parallel, "runner")
def averaged_over_microbatches(right, *args):
    """``scale_grads=True``, as torch has it by default."""
    made = right(*args)
    made.scale_grads = True
    return made


@fault(
    "E",
    "activations",
    "pipeline-exchange",
    on="tied/pp2-mbs4",
    names=r"model\.layers\.1|model\.norm|lm_head",
    ranks=(1,),
)
@met_in("verl#2185, SkyRL PR#2096")
@around(Pipeline, "forward_backward")
def microbatches_swapped_at_the_end(right, self, micros, loss, project, visit):
    """The last stage takes the first two microbatches for each other."""
    first, second, *rest = micros
    taken = {id(micro): other for micro, other in zip(micros, (second, first, *rest), strict=True)}
    return right(
        self,
        micros,
        lambda micro, out: loss(taken[id(micro)], out),
        lambda model, micro, hidden: project(model, taken[id(micro)], hidden),
        visit,
    )


@fault("E", "activations", "pipeline-exchange", on="dense/pp2", names=AFTER_ATTENTION, ranks=(1,))
@met_in("transformers PR#24381")
@around(pipeline_stages, "blocks_of_stage")
def layer_on_two_stages(right, blocks, stage, count):
    """Stages begin one layer too early."""
    found = right(blocks, stage, count)
    return range(max(found.start - 1, 0), found.stop)


@fault(
    "E",
    "coverage",
    "part-not-held",
    on="dense/pp2",
    names=r"\w+/model\.layers\.1\b.*",
    ranks=(),
    status="missing",
    says="no rank holds model.layers.1",
)
@met_in("mlx-lm#1688, Megatron#1304")
@around(pipeline_stages, "blocks_of_stage")
def layer_on_no_stage(right, blocks, stage, count):
    """The last stage begins one layer too late."""
    found = right(blocks, stage, count)
    return range(found.start + (stage == count - 1), found.stop)


@fault(
    "E",
    "gradient",
    "accumulation",
    on="dense/pp2-1f1b-packed-mbs3",
    names=r"model\.(embed_tokens|layers\.0)\..*",
    ranks=(0,),
    blind=FORWARD_CHECKS,
)
@met_in("Fast-LLM#550, NeMo Automodel PR#3530")
def last_microbatch_survives_on_a_stage(run):
    """Gradients of the first stage are overwritten, not added to."""
    kept = {}

    def keep(parameter):
        before = kept.get(parameter)
        grad = parameter.grad
        own = grad.clone() if before is None else grad - before
        grad.copy_(own)
        kept[parameter] = own

    if on_rank(0):
        for _, parameter in run.trainer.policy.named_parameters():
            parameter.register_post_accumulate_grad_hook(keep)
