"""Faults of routers and experts."""

import torch
import torch.distributed as dist
from torch import stack
from torch.nn import functional
from torch.nn.functional import one_hot

from regress.errors import ReplayError
from regress.parallel import expert_parallel
from regress.replay.fault_injection import around, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import FORWARD_CHECKS, fault, met_in
from tests.faults.harmless.model import modules_of
from tests.faults.ranks.helpers import AFTER_ATTENTION, EXPERTS, without


def routers_of(run):
    """Yield the routers of the policy; there have to be some."""
    found = [module for module in run.trainer.policy.model.modules() if hasattr(module, "norm_topk_prob")]
    if not found:
        raise ReplayError("there is no router")
    yield from found


@fault("F", "activations model.layers.0", "router module", on="moe/packed-pad16", names=AFTER_ATTENTION)
@met_in("DeepSeek-V3: a bias that balances experts, which must choose and not weigh")
def bias_of_the_balance_weighs_experts(run):
    """The chosen experts are weighted by their scores and the bias that balances their loads."""

    def wrong(router, _, out):
        logits, weights, chosen = out
        bias = torch.linspace(-0.05, 0.05, router.num_experts, dtype=logits.dtype)
        scores = (logits.softmax(-1) + bias).clamp(min=0.0).gather(-1, chosen)
        return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), chosen

    for router in routers_of(run):
        router.register_forward_hook(wrong)


# names rows that are weighted other than the router says
@fault(
    "F",
    "activations model.layers.0",
    "expert-exchange router module",
    on="moe/ep2-pp2-mbs3",
    names=AFTER_ATTENTION,
)
@met_in("SkyRL PR#1908: rows and weights of choices in two orders")
@in_place_of(expert_parallel, "_added")
def weights_in_the_order_of_choice(returned, place, index, weights, dtype):
    """Rows of a token come in the order of their experts, and their weights in that of the router's choice."""
    ascending = index.argsort(dim=1)
    weighted = returned[place.gather(1, ascending)] * weights.unsqueeze(-1)
    return weighted.sum(1).to(dtype)


# the first names a collective without its gradient
@fault(
    "F",
    "gradient",
    "backward-of-a-module gradients",
    on="moe/ep2-cp2-packed",
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(?!mlp\.gate).*",
)
@met_in("transformers#48687, torchtitan#2387: an all-to-all without autograd, joined with a rank's own rows")
@around(expert_parallel, "exchange")
def rows_of_other_ranks_without_gradient(right, rows, sent, received, group):
    """Rows that travel between ranks have no gradient; those that stay on their rank have."""
    out = right(rows, sent, received, group)
    own = dist.get_rank(group)
    before, here, behind = out.split([sum(received[:own]), received[own], sum(received[own + 1 :])])
    return torch.cat([before.detach(), here, behind.detach()])


@fault(
    "F",
    "activations model.layers.0",
    "expert-exchange module precision",
    kind="precision",
    on="moe/ep4-packed",
    names=AFTER_ATTENTION,
)
@met_in("DeepEP: a dispatch of rows with fewer bits")
@around(expert_parallel, "exchange")
def rows_travel_in_bfloat16(right, rows, *rest):
    """Rows are rounded to half precision on their way to experts and back."""
    return right(rounded(rows), *rest)


@fault(
    "F",
    "activations model.layers.0",
    "expert-exchange router module inputs-hold",
    on="moe/ep2",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
)
@met_in("an expert-parallel combine that normalizes the weights that it has received")
@around(expert_parallel, "_travelling")
def weights_normalized_on_each_owner(right, group, ranks):
    """Weights of the chosen experts are divided by the sum of those that one rank owns, not by the sum of all."""
    forward = right(group, ranks)

    def changed(self, hidden, index, weights):
        owner = index // self.num_experts
        same = (owner[:, :, None] == owner[:, None, :]).to(weights.dtype)
        return forward(self, hidden, index, weights / (same * weights[:, None, :]).sum(-1))

    return changed


# the second names a detach
@fault(
    "F",
    "gradient",
    "router-gradient backward-of-a-module gradients inputs-hold",
    on="moe/packed-pad16",
    names=r"model\.(embed_tokens|layers\.0)\..*|model\.layers\.1\.(?!mlp\.experts).*",
)
@met_in("a combine that adds the first expert's rows in place, and all others behind no_grad")
def weight_of_the_second_expert_detached(run):
    """The router learns from the weight of a token's first expert, and that of its second one has no gradient."""

    def wrong(_, args):
        hidden, index, weights = args
        first, *others = weights.unbind(1)
        return hidden, index, stack([first, *(other.detach() for other in others)], 1)

    for module in modules_of(run, lambda one: hasattr(one, "has_gate") and hasattr(one, "num_experts")):
        module.register_forward_pre_hook(wrong)


EXPERT_COUNT = 4
"""Experts of a layer of the case ``moe``."""


# the first one names rows that are dropped
@fault("F", "activations model.layers.0", "expert-exchange module", on="moe/dp2-ep2", names=AFTER_ATTENTION)
@met_in("DeepSpeed-MoE: a capacity factor of 1")
@around(expert_parallel, "_travelling")
def rows_beyond_the_capacity_dropped(right, group, ranks):
    """An expert takes no more rows of a rank than its even share; later ones count as nothing."""
    forward = right(group, ranks)

    def dropping(self, hidden, index, weights):
        chosen = one_hot(index.flatten(), EXPERT_COUNT)
        place = (chosen.cumsum(0) * chosen).sum(-1).view_as(index)
        capacity = -(-index.numel() // EXPERT_COUNT)
        return forward(self, hidden, index, weights * (place <= capacity))

    return dropping


@fault("F", "activations model.layers.0", "router module", on="moe/mbs4", names=AFTER_ATTENTION)
@met_in("DeepSeek-V3: scores by a sigmoid, of a model that was trained with a softmax")
def router_scores_by_sigmoid(run):
    """The right experts are chosen, and weighted by normalized sigmoids of their logits."""

    def wrong(_, __, out):
        logits, weights, chosen = out
        scores = torch.sigmoid(logits).gather(-1, chosen)
        return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), chosen

    for router in routers_of(run):
        router.register_forward_hook(wrong)


@fault(
    "F",
    "activations model.layers.0",
    "router module precision",
    kind="precision",
    on="moe/packed-mbs3",
    names=AFTER_ATTENTION,
)
@met_in("routers under autocast: logits in half precision")
def router_logits_in_bfloat16(run):
    """Routers choose and weigh experts by logits that were rounded to half precision."""

    def wrong(router, _, out):
        logits, weights, _ = out
        narrow = rounded(logits)
        scores, chosen = narrow.softmax(-1).topk(router.top_k, dim=-1)
        return narrow, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), chosen

    for router in routers_of(run):
        router.register_forward_hook(wrong)


# the last one names rows sent to the wrong expert
@fault(
    "F",
    "activations model.layers.1",
    "router module expert-exchange",
    on="moe/fsdp2-ep2",
    names=r"model\.layers\.1|model\.norm|lm_head",
)
@met_in("NeMo-RL PR#3208: routing that is replayed for another layer")
def experts_chosen_by_the_layer_before(run):
    """The second layer sends a token to the experts that the first one has chosen, weighted by its own scores."""
    kept = []

    def keep(_, __, out):
        kept[:] = [out[2]]

    def wrong(_, __, out):
        logits, weights, _own = out
        scores = logits.softmax(-1).gather(-1, kept[0])
        return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), kept[0]

    first, second = routers_of(run)
    first.register_forward_hook(keep)
    second.register_forward_hook(wrong)


@fault(
    "F",
    "gradient",
    "experts-reduced not-reduced reduction gradients",
    on="moe/dp2-ep2",
    names=EXPERTS,
    ranks=(0, 1, 2, 3),
    blind=FORWARD_CHECKS,
)
@met_in("Megatron PR#5916")
def experts_not_summed_over_replicas(run):
    """Gradients of experts stay with the rank that owns them, and each expert has an owner in each replica."""
    without(run, ".experts.")


class _WithAnotherLoss(torch.autograd.Function):
    """Passes a tensor on, and gives another loss the gradient of 1."""

    @staticmethod
    def forward(ctx, tensor, other):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_ones(())


@fault(
    "F",
    "gradient",
    "router-gradient backward-of-a-module",
    on="moe/mbs4",
    names=r"model\.(embed_tokens|layers\.0|layers\.1\.(self_attn|.*layernorm|mlp\.gate))\..*",
    blind=FORWARD_CHECKS,
)
@met_in("Megatron PR#5694")
def load_balancing_loss_on(run):
    """The auxiliary loss of the model's configuration acts on the routers, and is in no loss that is reported."""

    def add(_, __, out):
        logits, weights, chosen = out
        share = functional.one_hot(chosen, logits.shape[-1]).to(logits.dtype).mean((0, 1))
        own = 1e-3 * logits.shape[-1] * (share * logits.softmax(-1).mean(0)).sum()
        return logits, _WithAnotherLoss.apply(weights, own), chosen

    found = [m for m in run.trainer.policy.model.modules() if hasattr(m, "norm_topk_prob")]
    if not found:
        raise ReplayError("there is no router")
    for module in found:
        module.register_forward_hook(add)


# module: it names what ranks exchange within the layer; two kinds of exchange lie in it
@fault(
    "F",
    "activations model.layers.0",
    "expert-exchange router module",
    on="moe/ep2-cp2-packed",
    names=AFTER_ATTENTION,
)
@met_in("NeMo-RL PR#3208, SkyRL PR#1908")
@around(expert_parallel, "_added")
def weights_of_the_next_token(right, rows, place, index, weights, dtype):
    """Rows come back from experts of other ranks, and are weighted for the token behind theirs."""
    return right(rows, place, index, weights.roll(1, 0), dtype)
