"""Variants that train through a service: the same case, asked for over HTTP.

A wire carries float32 whatever the service computes in, so in float64 and bit for bit the reference is the engine's own
step on the datums that the client sent. In float32 it is the truth, with the tolerances measured for the case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regress.replay.variant import BOTH, Precision, Variant

SAME = ("batch_inputs", "log_probs", "entropy", "gradient", "grad_norm", "param")
"""Quantities that are the same whichever loss of a wire an objective became: the wires' losses have no denominators,
and the custom loss has no ratio."""
OF_THE_LOSS = ("advantages", "token_loss", "loss")
"""Quantities that are those of the loss that was asked for."""


def quantities(precision: Precision) -> tuple[str, ...]:
    """Return the quantities that a replay over a wire is judged by in a precision, none of which may be missing."""
    return SAME if precision is Precision.FLOAT32 else (*SAME, *OF_THE_LOSS)


def _remote(wire: str, **overrides: Any) -> dict[str, Any]:
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return {"trainer.type": "remote", "service.train_service.backend": wire, **named}


_ROWS = (
    Variant(
        "remote-weaver",
        "datums, losses and settings of the optimizer as JSON",
        _remote("weaver"),
        (*BOTH, Precision.BITWISE),
        ("@grpo",),
        "base",
    ),
    Variant(
        "remote-tinker",
        "the same as protobuf, and the other sign of the custom loss",
        _remote("tinker"),
        (*BOTH, Precision.BITWISE),
        ("@cispo",),
        "base",
    ),
    Variant(
        "remote-weaver-dp2",
        "requests split over the ranks of a service",
        _remote("weaver", parallel__dp=2),
        cases=("@cispo",),
    ),
)

REMOTE: Mapping[str, Variant] = {row.name: row for row in _ROWS}
"""Variants that train through a service, by name."""
