"""Datums of microbatches: rows of tokens and the values of their loss, each at the position that predicts it.

Of what is known of a datum, the arrays that a loss of Weaver's protocol takes are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regress.engine.mini_batch import Microbatch
from regress.layout import SampleKey
from regress.service.client.service_backend import LossConfig
from regress.service.service_api import Array, Datum, ServiceError


@dataclass(frozen=True)
class DatumRow:
    """Place of a sample in a microbatch: its row, its first column and its number of tokens."""

    key: SampleKey
    row: int
    column: int
    length: int


def rows_of(micro: Microbatch) -> list[DatumRow]:
    """Return where the samples of a microbatch lie, which are whole because the client is one rank."""
    return [
        DatumRow(micro.keys[segment.sample], segment.row, segment.col, segment.stop - segment.start)
        for segment in micro.layout.segments
    ]


def datums_of(micro: Microbatch, values: Mapping[str, Tensor]) -> list[Datum]:
    """Return the datums of a microbatch: ``tokens[:-1]`` as input, ``tokens[1:]`` as targets, and float32 values.

    Args:
        values: name -> ``[K]`` values of the loss tokens; other positions get 0. ``loss_mask`` is added to them.
    """
    named = {name: _grid(micro, value) for name, value in values.items()}
    named["loss_mask"] = _grid(micro, torch.ones(len(micro.local)))
    ids = micro.input_ids.cpu().numpy()
    found = []
    for place in rows_of(micro):
        first, last = place.column, place.column + place.length
        tokens = ids[place.row, first:last].astype(np.int64)
        inputs: dict[str, Array] = {"target_tokens": tokens[1:]}
        inputs |= {name: grid[place.row, first + 1 : last] for name, grid in named.items()}
        found.append(Datum(tokens[:-1], inputs, f"{place.key[0]}/{place.key[1]}"))
    return found


def loss_token_values(micro: Microbatch, outputs: Sequence[Array], dtype: torch.dtype) -> Tensor:
    """Return values of each datum's positions, ``[T]`` a datum, as ``[K]`` values of the loss tokens.

    Raises:
        ServiceError: if the service returned values of another length.
    """
    rows = rows_of(micro)
    grid = np.zeros(micro.place.targets.shape, np.float64)
    for place, values in zip(rows, outputs, strict=True):
        if np.shape(values) != (place.length - 1,):
            raise ServiceError(
                f"""the service returned log-probs of shape {list(np.shape(values))} for the datum
                {place.key[0]}/{place.key[1]} of {place.length - 1} tokens; its version does not fit this client""",
                code="unexpected_reply",
                category="server",
            )
        grid[place.row, place.column + 1 : place.column + place.length] = values
    return torch.from_numpy(grid.reshape(-1)[micro.local.cpu().numpy()]).to(dtype)


def gradients_of(micro: Microbatch, gradient: Tensor) -> list[Array]:
    """Return the derivative of the loss by each log-prob, ``[K]``, as ``[T]`` float32 values of each datum."""
    grid = _grid(micro, gradient)
    return [grid[place.row, place.column + 1 : place.column + place.length] for place in rows_of(micro)]


def _grid(micro: Microbatch, values: Tensor) -> Array:
    """Return ``[K]`` values at the tokens' places, in float32, which is what the wires carry."""
    return micro.scatter(values.detach().to(torch.float32)).cpu().numpy()


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
