"""Judgement of a replay through a training service: by the truth, and by the engine's step on what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regress.compare.dumps.session import Comparison
from regress.compare.request import compare_sources
from regress.compare.verdicts.verdict import Verdict
from regress.errors import CompareError
from regress.golden.case import GoldenCase
from regress.replay.remote import RemoteReplay
from regress.replay.variants import Precision

SAME = ("batch_inputs", "log_probs", "entropy", "gradient", "grad_norm", "param")
"""Quantities that are the same whichever loss of a wire an objective became: the wires' losses have no denominators,
and the custom loss has no ratio."""
MASK = "response_mask"
"""Tensor of the inputs that no wire carries for the custom loss: a weight of 0 leaves a token out."""
SEMANTICS = 1e-12


@dataclass(frozen=True)
class RemoteVariant:
    """One way to train a golden case through the service.

    Attributes:
        wire: protocol between client and service.
        parallel: ranks of the service.
    """

    name: str
    why: str
    wire: str
    parallel: Mapping[str, Any] = field(default_factory=dict)


REMOTE_VARIANTS: Mapping[str, RemoteVariant] = {
    variant.name: variant
    for variant in (
        RemoteVariant("remote-weaver", "datums, losses and settings of the optimizer as JSON", "weaver"),
        RemoteVariant(
            "remote-tinker", "the same as protobuf, and the other sign of the custom loss", "tinker"
        ),
        RemoteVariant(
            "remote-weaver-dp2", "requests split over the ranks of a service", "weaver", {"parallel.dp": 2}
        ),
    )
}
"""Variants of the golden cases over the wire, by name."""


def by_truth(case: GoldenCase, replay: RemoteReplay) -> list[Verdict]:
    """Judge what a float32 service computed by the case's truth, within measured tolerances."""
    found = compare_sources(f"golden:{case.name}", replay.service, golden_dir=case.folder.parent)
    return _complete(found, SAME)


def by_reference(
    reference: str, replay: RemoteReplay, precision: Precision, *, same_layout: bool
) -> list[Verdict]:
    """Judge what a service computed by the engine's step on the same datums: every quantity of both.

    In the same layout every byte has to be the same, whatever the precision; under other ranks float64 agrees within
    1e-12.

    Raises:
        CompareError: if a quantity that both have was not compared, or for other ranks in another precision.
    """
    if not same_layout and precision is not Precision.FLOAT64:
        raise CompareError(
            f"a service on other ranks rounds otherwise in {precision}; judge it in float64, or by the truth"
        )
    found = (
        compare_sources(reference, replay.service, bitwise=True)
        if same_layout
        else compare_sources(reference, replay.service, rtol=SEMANTICS)
    )
    return _complete(found, (*SAME, "advantages", "token_loss", "loss"), every=True)


def _complete(found: Comparison, wanted: Sequence[str], *, every: bool = False) -> list[Verdict]:
    """Return the verdicts on these quantities, or all, none of which may be missing."""
    if found.problems:
        raise CompareError(found.problems[0])
    kept = (*wanted, "coverage")
    verdicts = [v for v in found.verdicts if every or (v.quantity in kept and v.name != MASK)]
    missing = {*wanted} - {verdict.quantity for verdict in verdicts}
    if missing:
        raise CompareError(
            f"{min(missing)} was not compared: the service's dump {found.actual} has none of it; dump it with "
            "WEAVER_DEBUG_DUMP_OPTIONS"
        )
    return verdicts
