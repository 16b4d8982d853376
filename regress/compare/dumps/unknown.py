"""Facts that two sources do not tell, and the causes that can therefore not be named."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regress.compare.dumps.sides import Side

_OF_LOGITS = frozenset(("log_probs", "entropy"))


def unknown(golden: Side, actual: Side, failed: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each missing fact that would tell more about the failures.

    Args:
        failed: quantities of which something is wrong.
    """
    if not failed:
        return
    if not golden.config and not actual.config:
        yield (
            "no configuration is known: causes that depend on coefficients, clip ranges or optimizer settings cannot "
            "be named, and invariants of the objective were not asked"
        )
    ranks = {place.rank for _, place in actual.entries.values() if place.rank is not None}
    if len(ranks) > 1 and not actual.mesh:
        yield (
            "the mesh of the actual ranks is unknown: patterns along its dimensions cannot be named, and a rank that "
            "is missing is not noticed"
        )
    if not _OF_LOGITS.isdisjoint(failed) and not _has_logits(golden):
        yield "the golden side has no logits: neither a temperature nor shifted targets can be named"


def _has_logits(side: Side) -> bool:
    names = (name for name, (type, _) in side.entries.items() if type == "activations")
    return any(tensor.endswith("lm_head") for name in names for tensor in side.read(name).tensors)
