"""Arrays that the losses of Weaver's protocol take: of what is known of a datum, those are sent."""

from __future__ import annotations

from collections.abc import Sequence

from regress.service.api import Array, Datum
from regress.service.client.backend import LossConfig

INPUTS = {
    "forward_logprob": ("target_tokens",),
    "surrogate": ("target_tokens", "surrogate_weights"),
    "cross_entropy": ("target_tokens", "weights"),
}
"""Arrays of each loss; those of ratios take `RATIO_INPUTS`."""
RATIO_INPUTS = ("target_tokens", "logprobs", "loss_mask", "advantages")


def taken(data: Sequence[Datum], loss: str, config: LossConfig) -> list[Datum]:
    """Return datums with the arrays that a loss takes alone.

    Where entropies are rewarded, the mask tells those of which tokens. The weights of cross entropy are the advantages.
    """
    names = INPUTS.get(loss, RATIO_INPUTS)
    if "entropy_coeff" in config:
        names = tuple(dict.fromkeys((*names, "loss_mask")))
    if loss == "cross_entropy":
        data = with_array(data, "weights", [datum.inputs["advantages"] for datum in data])
    return [
        Datum(datum.tokens, {name: datum.inputs[name] for name in names if name in datum.inputs}, datum.id)
        for datum in data
    ]


def with_array(data: Sequence[Datum], name: str, values: Sequence[Array]) -> list[Datum]:
    """Return datums with one more array, ``[T]`` each."""
    return [
        Datum(datum.tokens, {**datum.inputs, name: own}, datum.id)
        for datum, own in zip(data, values, strict=True)
    ]
