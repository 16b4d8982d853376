"""Precision faults of values that lie on several ranks."""

import torch
from torch.distributed.tensor import DTensor, Partial
from transformers.models.qwen3 import modeling_qwen3

from regress.engine.local_tensor import local
from regress.parallel import (
    all_gather_attention,
    conv1d_styles,
    expert_parallel,
    fsdp,
    ring_attention,
    sequence_parallel,
    ulysses_attention,
    vocabulary_log_probs,
)
from regress.parallel import parallel_policy as parallel_policy
from regress.parallel.conv1d_styles import RowwiseConv
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import fault, met_in
from tests.faults.fresh.context_parallel import AFTER_BLOCK_0
from tests.faults.ranks.helpers import AFTER_ATTENTION


@fault(
    "O",
    "activations model.layers.0",
    "rotary module precision",
    kind="precision",
    on="tied/packed-mbs3",
    names=AFTER_ATTENTION,
)
@met_in("TransformerEngine#1245: a table of rotary embeddings in half precision")
def rotary_tables_in_bfloat16(run):
    """Sines and cosines are rounded to half precision; the frequencies are not."""
    model = run.trainer.policy.model
    model.model.rotary_emb.register_forward_hook(lambda _, __, out: tuple(rounded(table) for table in out))


@fault(
    "O",
    "activations model.layers.0",
    "expert-exchange router module precision inputs-hold",
    kind="precision",
    on="moe/ep2-cp2-packed",
    names=AFTER_ATTENTION,
    ranks=(0, 1, 2, 3),
)
@met_in("DeepEP: rows that are combined in half precision")
@around(expert_parallel, "_run")
def rows_return_from_experts_in_bfloat16(right, *args):
    """Return the outputs of experts to the ranks of their tokens in half precision."""
    return rounded(right(*args))


# accepted after the first run: names what ranks of a sequence exchange, and a dtype
@fault(
    "O",
    "activations model.layers.0",
    "module precision context-exchange",
    kind="precision",
    on="dense/dp2-cp2-packed",
    names=AFTER_ATTENTION,
)
@met_in("an all-to-all of attention's output in half precision")
@around(ulysses_attention, "attend")
def heads_return_in_bfloat16(right, *args):
    """Outputs of heads for all columns are rounded to half precision before they go back to their columns."""
    return rounded(right(*args))


@fault(
    "O",
    "activations model.layers.0",
    "module precision",
    kind="precision",
    on="dense/packed-eager",
    names=AFTER_ATTENTION,
)
@met_in("softmax of attention in the dtype of half-precision queries")
@in_place_of(modeling_qwen3, "eager_attention_forward")
def attention_weights_in_bfloat16(module, query, key, value, mask, scaling, dropout=0.0, **_):
    """Eager attention rounds its weights to half precision before they meet the values."""
    times = module.num_key_value_groups
    scores = query @ modeling_qwen3.repeat_kv(key, times).mT * scaling
    weights = rounded((scores if mask is None else scores + mask).softmax(-1))
    out = weights @ modeling_qwen3.repeat_kv(value, times)
    return out.transpose(1, 2).contiguous(), weights


# gradients of weights are sums over what was rounded, which fit into no narrower dtype
@fault(
    "O",
    "gradient",
    "backward-of-a-module precision gradients inputs-hold",
    kind="precision",
    on="dense/cp2-ring-packed",
    ranks=(0, 1),
)
@met_in("gradients of keys and values that are compressed on their way round the ring")
@around(ring_attention, "_Shift")
def gradients_of_keys_travel_in_bfloat16(right, travelling, context):
    """Gradients of keys and values have half precision on every hop, and the keys and values themselves have not."""
    if len(travelling) == 4:  # on the way back: keys, values and their gradients
        travelling = torch.cat((travelling[:2], rounded(travelling[2:])))
    return right(travelling, context)


# the second one names the sum over ranks
@fault(
    "O", "ratio", "ratio ratio-of-a-part precision inputs-hold", kind="precision", on="gspo/cp2", ranks=(0, 1)
)
@met_in("a sum over context-parallel ranks under autocast")
@around(ParallelPolicy, "sum_over_context_parallel")
def log_ratios_completed_in_bfloat16(right, self, values):
    """Each rank rounds its part of the log-ratio of a sample to half precision before the parts are added."""
    return right(self, rounded(values) if values.is_floating_point() else values)


@fault(
    "O",
    "activations model.layers.0",
    "context-exchange module precision",
    kind="precision",
    on="dense/dp2-cp2-gather-ddp-packed",
    names=AFTER_ATTENTION,
)
@met_in("keys and values that are compressed on their way")
@around(all_gather_attention, "gather")
def keys_gathered_in_bfloat16(right, tensor, *rest):
    """Keys and values of all ranks are gathered in half precision, within replicas and packed rows."""
    return right(rounded(tensor), *rest)


# gradients: the sum over tensor ranks of what was rounded is not, so that its values fit into no narrower dtype
@fault("O", "gradient", "gradient-dtype precision gradients", kind="precision", on="dense/fsdp2-tp2-mbs3")
@met_in("FSDP: reduce_dtype of another configuration")
@around(fsdp, "apply")
def shards_reduced_in_bfloat16(right, *args, **rest):
    """Gradients of parts of matrices are summed over shards in half precision."""
    right(*args, **{**rest, "reduce_dtype": torch.bfloat16})


class _BackInHalf(torch.autograd.Function):
    """Passes a tensor on, and its gradient back in half precision."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad.bfloat16().to(grad.dtype)


def back_in_half(tensor):
    """Return the tensor; what comes back to it is rounded to half precision."""
    return _BackInHalf.apply(tensor)


# the last one names what ranks hand back
@fault(
    "O",
    "gradient",
    "gradient-of-a-stage precision backward-of-a-module",
    kind="precision",
    on="tied/dp2-pp2-mbs2",
)
@met_in("gradients of hidden states sent in half precision")
@around(ParallelPolicy, "_run")
def gradients_handed_back_in_bfloat16(right, self, model, micro, hidden=None):
    """The last stage hands gradients of hidden states back in half precision, within replicas."""
    return right(self, model, micro, None if hidden is None else back_in_half(hidden))


# the last one names sums of parts and the dtype
@fault(
    "O",
    "log_probs",
    "softmax-dtype precision vocabulary-parts",
    kind="precision",
    on="dense/tp2-packed-chunk7",
)
@met_in("TransformerEngine: a vocabulary-parallel sum in half precision")
@around(vocabulary_log_probs, "_local_sums")
def sums_of_the_vocabulary_in_bfloat16(right, *args):
    """Sums of exponentials of parts of the vocabulary are joined in half precision, chunk by chunk."""
    maximum, sums = right(*args)
    return maximum, torch.cat([rounded(sums[:1]), sums[1:]])


@fault(
    "O",
    "activations model.norm",
    "tensor-exchange module-dtype precision",
    kind="precision",
    on="dense/dp2-tp2-sp-packed",
)
@met_in("sequence parallelism that gathers in half precision")
@around(sequence_parallel, "_all_columns")
def columns_gathered_in_bfloat16(right, part, group):
    """Columns of hidden states are gathered behind the last norm in half precision."""
    return right(part.bfloat16().to(part.dtype), group)


@fault(
    "O",
    "activations transformer.h.0",
    "tensor-exchange module precision",
    kind="precision",
    on="gpt2/tp2-sp-pp2",
    names=AFTER_BLOCK_0,
)
@met_in("a sum over tensor-parallel ranks in half precision")
@in_place_of(RowwiseConv, "_forward")
def parts_of_products_summed_in_bfloat16(self, module, mesh, x):
    """Each rank rounds its part of a product to half precision before parts are summed and scattered."""
    own = rounded(conv1d_styles._product(x, conv1d_styles._plain(module.weight)))
    partial = DTensor.from_local(own, mesh, [Partial()], run_check=False)
    whole = partial.redistribute(placements=[self.output_layout]).to_local()
    return whole + conv1d_styles._plain(module.bias)


# gradients: the sum of what was rounded is not, so that its values fit into no narrower dtype
@fault("O", "gradient", "gradient-dtype gradients", kind="precision", on="dense/dp2-tp2")
@met_in("DeepSpeed PR#7985")
@around(parallel_policy, "sum_gradients")
def gradients_reduced_in_bfloat16(right, parameters, groups):
    """Gradients are rounded to half precision on their way into the sum over ranks."""
    for names, _ in groups:
        for name in names:
            grad = parameters[name].grad
            if grad is not None:
                own = local(grad)
                own.copy_(own.bfloat16())
    right(parameters, groups)


@fault(
    "O",
    "activations model.layers.1",
    "module pipeline-exchange module-dtype",
    kind="precision",
    on="tied/tp2-pp2-mbs4",
)
@met_in("hidden states sent in half precision")
@around(ParallelPolicy, "_run")
def hidden_states_sent_in_bfloat16(right, self, model, micro, hidden=None):
    """Stages hand hidden states on in half precision, to ranks that share the next layers."""
    return right(self, model, micro, None if hidden is None else rounded(hidden))


@fault(
    "O",
    "activations model.layers.0",
    "context-exchange module",
    kind="precision",
    on="dense/cp2-ring-packed",
    names=AFTER_ATTENTION,
)
@met_in("Megatron#1464, ROCm aiter PR#3334")
@around(ring_attention, "_kept")
def merged_in_bfloat16(right, maximum, raised):
    """The factors that make partial sums of a ring comparable have half precision."""
    return rounded(right(maximum, raised))
