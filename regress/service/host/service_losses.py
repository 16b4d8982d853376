"""Losses of the service by name, in the engine's terms: an objective, and what stands for the advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from regress.errors import ConfigError
from regress.grpo.objective import Objective
from regress.service.service_api import PassRequest, ServiceError

LOG_PROBS = "forward_logprob"
"""Loss of a request for log-probs alone."""
COMMON = ("entropy_coeff", "enable_debug_dump")
"""Settings of every loss."""


@dataclass(frozen=True)
class Loss:
    """Loss of a token: a sum over tokens and datums, without any normalisation.

    Attributes:
        kind: the loss of an `Objective`.
        advantages: array of a datum that stands for the advantages, times ``sign``; None: zeros.
        default: value of that array if it is left out; None: it must be given.
        ratio: True if it compares with ``logprobs``.
        clip: lower and upper bound of the ratio by default.
        settings: settings of its own.
    """

    kind: str
    advantages: str | None
    sign: float = 1.0
    default: float | None = None
    ratio: bool = False
    clip: tuple[float, float] | None = None
    settings: tuple[str, ...] = ()


_CLIP = "clip_low_threshold", "clip_high_threshold"
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss("reinforce", "weights", default=1.0),
    "importance_sampling": Loss("importance_sampling", "advantages", ratio=True),
    "ppo": Loss("ppo_clip", "advantages", ratio=True, clip=(0.8, 1.2), settings=_CLIP),
    "cispo": Loss("cispo", "advantages", ratio=True, clip=(0.0, 4.0), settings=_CLIP),
    "dro": Loss("dro", "advantages", ratio=True, settings=("beta",)),
    "surrogate": Loss("reinforce", "surrogate_weights", sign=-1.0),
    LOG_PROBS: Loss("reinforce", None),
}


def loss_of(request: PassRequest) -> Loss:
    """Return the loss that a request names.

    Raises:
        ServiceError: for an unknown one.
    """
    found = LOSSES.get(request.loss)
    if found is None:
        near = get_close_matches(request.loss, LOSSES, n=1)
        hint = f"did you mean {near[0]}" if near else "choose another one"
        raise ServiceError(
            f"loss_fn={request.loss!r} is none of {', '.join(LOSSES)}; {hint}", code="unknown_loss"
        )
    if request.loss == LOG_PROBS and not request.forward_only:
        raise ServiceError(f"loss_fn={LOG_PROBS} has no gradient; send it as a forward pass")
    return found


def same_loss(one: PassRequest, other: PassRequest) -> bool:
    """Return True if two requests ask for one loss under the same settings, so that one could ask for both."""
    settings = [
        {name: value for name, value in request.config.items() if name != "enable_debug_dump"}
        for request in (one, other)
    ]
    return one.loss == other.loss and settings[0] == settings[1]


def objective_of(request: PassRequest, loss: Loss) -> Objective:
    """Return the objective of a request.

    Raises:
        ServiceError: for a setting that the loss does not have, or a value that it cannot have.
    """
    known = (*COMMON, *loss.settings)
    for name in request.config:
        if name not in known:
            raise ServiceError(
                f"loss_fn_config has {name!r}, which loss_fn={request.loss} does not know; it knows {', '.join(known)}"
            )
    low, high = loss.clip or (0.0, math.inf)
    values: dict[str, float | None] = {
        "clip_low": _number(request, "clip_low_threshold", low),
        "clip_high": _number(request, "clip_high_threshold", high),
        "entropy_coef": _number(request, "entropy_coeff", 0.0),
        "dro_beta": _beta(request) if "beta" in loss.settings else None,
    }
    try:
        return Objective(loss=loss.kind, aggregation="token-sum", clip_bounds="absolute", **values)  # type: ignore[arg-type]  # keyed by field
    except ConfigError as error:
        raise ServiceError(f"loss_fn_config of {request.loss}: {error}") from error


def _beta(request: PassRequest) -> float:
    """Return the weight of the squared log-ratio.

    Raises:
        ServiceError: if it is missing or negative.
    """
    if "beta" not in request.config:
        raise ServiceError(f"""loss_fn={request.loss} weighs the squared log-ratio by beta, for which there is no agreed
        default; send loss_fn_config.beta""")
    beta = _number(request, "beta", 0.0)
    if beta < 0.0:
        raise ServiceError(f"loss_fn_config.beta={beta} is negative; give a number of at least 0")
    return beta


def wants_dump(request: PassRequest) -> bool:
    """Return True if the request asks for a dump."""
    value = request.config.get("enable_debug_dump", False)
    if value not in (True, False):  # wires may carry numbers only
        raise ServiceError(f"loss_fn_config.enable_debug_dump={value!r} is neither true nor false")
    return bool(value)


def _number(request: PassRequest, name: str, default: float) -> float:
    value = request.config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ServiceError(f"loss_fn_config.{name}={value!r} is not a number; give one or leave it out")
    if name in request.config and math.isinf(value):
        raise ServiceError(f"loss_fn_config.{name}={value!r} is not finite; give a finite number")
    return float(value)
