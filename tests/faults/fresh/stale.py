"""Faults of ranks, stages and layers that compute with what belongs to another update, microbatch or layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from regress.engine.build import Run
from regress.parallel import pipeline, policy, reduction
from regress.parallel.relay import relay
from tests.faults.fault import fault
from tests.faults.fresh.routers import routers_of
from tests.faults.patch import Patch
from tests.faults.ranks.helpers import on_rank


@fault(
    category="B",
    fresh=True,
    source="Megatron PR#4609: a buffer that is sent before this update's gradient is in it",
    cases=("dapo",),
    variants=("dp2",),
    first="gradient",
    ranks=(0, 1),
    update=1,
    rules=(  # names what becomes of gradients over ranks
        "backward-or-accumulation",
        "gradients",  # accepted after the first run: names the sum over ranks, of which token gradients leave no doubt
    ),
)
def gradient_of_a_rank_one_update_late(patch: Patch) -> None:
    """One rank enters the sum with its gradient of the update before, from the second update on."""
    right: Any = reduction.sum_gradients
    kept: dict[str, Tensor] = {}

    def wrong(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        known = list(groups)
        if on_rank(1):
            own = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
            for name, late in kept.items():
                parameters[name].grad = late
            kept.update(own)
        right(parameters, known)

    patch.setattr(policy, "sum_gradients", wrong)


@fault(
    category="E",
    fresh=True,
    source="a buffer of received hidden states that is read one microbatch late",
    cases=("tied",),
    variants=("pp2-mbs4",),
    first="ref_log_probs",
    rules=(
        "reference",
        "pipeline-exchange",
    ),  # the last one names what stages hand to each other, and microbatches in another order
)
def hidden_states_of_the_microbatch_before(patch: Patch) -> None:
    """In passes without a backward pass a later stage reads the hidden states that arrived before the present ones."""
    right: Any = relay

    def wrong(ranks: Any, group: Any, count: int, forward: Any, buffer: Any) -> None:
        known: dict[int, Tensor] = {}

        def late(stage: int, micro: int, hidden: Tensor | None) -> Tensor | None:
            before = hidden
            if hidden is not None:
                before = known.get(stage, hidden)
                known[stage] = hidden
            found: Tensor | None = forward(stage, micro, before)
            return found

        right(ranks, group, count, late, buffer)

    patch.setattr(pipeline, "relay", wrong)


@fault(
    category="F",
    fresh=True,
    source="NeMo-RL PR#3208: routing that is replayed for another layer",
    cases=("moe",),
    variants=("fsdp2-ep2",),
    first="activations model.layers.1",
    names=r"model\.layers\.1|model\.norm|lm_head",
    rules=("router", "module", "expert-exchange"),  # the last one names rows sent to the wrong expert
)
def experts_chosen_by_the_layer_before(run: Run) -> None:
    """The second layer sends a token to the experts that the first one has chosen, weighted by its own scores."""
    kept: list[Tensor] = []

    def keep(_: Any, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        kept[:] = [out[2]]

    def wrong(_: Any, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _own = out
        scores = logits.softmax(-1).gather(-1, kept[0])
        return logits, (scores / scores.sum(-1, keepdim=True)).to(weights.dtype), kept[0]

    first, second = routers_of(run)
    first.register_forward_hook(keep)
    second.register_forward_hook(wrong)
