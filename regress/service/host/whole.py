"""Gradients of a step as a function of the datums alone, however clients have cut them into requests.

On one process with one datum a microbatch, passes one after another are the pass over all of their datums bit for bit.
Elsewhere the plan of the microbatches, and the order in which ranks sum, depend on the datums that lie in one request:
requests of one loss that follow each other are then made again before the step, as the one request that they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regress.engine.gradients import added
from regress.engine.world import World
from regress.service.api import PassRequest
from regress.service.host.losses import same_loss
from regress.service.host.model import Model
from regress.service.host.passes import accumulate_whole


def merged(requests: Sequence[PassRequest]) -> list[PassRequest]:
    """Return the requests with those of one loss and its settings, as far as they follow each other, made one."""
    found: list[PassRequest] = []
    for request in requests:
        if found and same_loss(found[-1], request):
            found[-1] = replace(found[-1], data=[*found[-1].data, *request.data])
        else:
            found.append(request)
    return found


def complete(model: Model, world: World) -> None:
    """Make the gradients of a model those of whole passes, by all ranks together.

    Raises:
        RegressError: if that fails; the gradients since the last step are dropped then.
    """
    whole = merged(model.passes)
    if model.cut_anywhere or len(whole) == len(model.passes):
        return
    try:
        model.policy.zero_grad()
        for request in whole:
            with added(model.policy):
                accumulate_whole(model, request, world)
    except BaseException:
        model.drop_gradients()
        raise
    model.passes = whole
