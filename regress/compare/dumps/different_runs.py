"""Tell dumps of two different runs, with another model, weights or batch, from two computations of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regress.compare.coverage import QUANTITY as COVERAGE
from regress.compare.dumps.comparison import Comparison
from regress.compare.dumps.joined_samples import JOINED
from regress.compare.dumps.opened_dump import Side, open_side
from regress.compare.dumps.record_listing import headers
from regress.compare.quantities import UPDATE_TYPES
from regress.compare.verdicts.verdict import Status, Verdict

APART = "these are dumps of two different runs"
"""Words that such a sentence begins with."""
_ARCHITECTURE = ("family", "config", "tie_word_embeddings")
"""Keys of section ``model`` that change which parameters there are, and not only how they are computed with."""
_FAR = 0.1
"""Relative error that no update makes of parameters, and no rounding of outputs."""
_AT_LEAST = 3
_ONE_SIDED = (Status.SHAPE, Status.MISSING, Status.EXTRA)


def two_runs(comparison: Comparison) -> str:
    """Return a sentence that says by what two dumps that differ are of different runs; empty if nothing proves it."""
    if not comparison.failed:
        return ""
    golden, actual = open_side(comparison.golden), open_side(comparison.actual)
    facts = [*_models(golden, actual, comparison.verdicts), *_samples(golden, actual, comparison)]
    facts = facts or [*_weights(comparison.verdicts)]
    if not facts and (statement := _outputs(comparison.verdicts)):
        return f"{APART} if {statement}"
    return f"{APART}: {'; '.join(facts)}" if facts else ""


def _models(golden: Side, actual: Side, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield how the models differ: by their configuration, else by the parameters that they have."""
    known: list[Mapping[str, Any]] = [side.config.get("model") or {} for side in (golden, actual)]
    differences = [
        f"model.{key} is {known[0][key]!r} and {known[1][key]!r}"
        for key in _ARCHITECTURE
        if key in known[0] and key in known[1] and known[0][key] != known[1][key]
    ]
    if differences:
        yield f"two models ({', '.join(differences)})"
        return
    own = {v.name: v for v in verdicts if v.quantity in UPDATE_TYPES}
    wrong = [v for v in own.values() if v.status in _ONE_SIDED]
    if len(wrong) >= max(_AT_LEAST, len(own) // 2):
        yield f"two models ({len(wrong)} of {len(own)} tensors of parameters are of other shapes or in one dump only)"


def _samples(golden: Side, actual: Side, comparison: Comparison) -> Iterator[str]:
    """Yield how many samples have no counterpart, where most of them have none and none is made of known ones."""
    if any(JOINED in verdict.detail for verdict in comparison.failed if verdict.quantity == COVERAGE):
        return
    alone = len(comparison.golden_only), len(comparison.actual_only)
    if not all(alone):
        return
    count = [_count(side) for side in (golden, actual)]
    if 2 * alone[0] > count[0] and 2 * alone[1] > count[1]:
        yield (
            f"two batches or seeds ({alone[0]} of {count[0]} samples are in the golden dump only, {alone[1]} of "
            f"{count[1]} in the actual one)"
        )


def _count(side: Side) -> int:
    """Return the number of samples of all steps."""
    listed = headers(side, side.entries)
    return len({(side.entries[record.name][1].step, key) for record in listed for key in record.samples})


def _weights(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield that the weights are others: all parameters after the first update, which moves them by little."""
    own = [v for v in _first(verdicts) if v.quantity == "param" and v.count]
    if len(own) >= _AT_LEAST and all(map(_far, own)):
        yield f"one model with other weights (all {len(own)} parameters after the first update are far off)"


def _outputs(verdicts: Sequence[Verdict]) -> str:
    """Return what would prove other weights, where the log-probs and entropies of the first update are all far off."""
    first = _first(verdicts)
    if any(v.quantity == "param" and v.count for v in first):
        return ""
    own = [[v for v in first if v.quantity == q and v.count] for q in ("log_probs", "entropy")]
    if not all(own) or not all(map(_far, [*own[0], *own[1]])):
        return ""
    return (
        "no setting that all tokens share (a temperature) explains it: all log-probs and entropies of the first update "
        "are far off, as those of another model or other weights are"
    )


def _first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on the first update."""
    at = min(((v.place.step or 0, v.place.update or 0) for v in verdicts), default=(0, 0))
    return [v for v in verdicts if (v.place.step or 0, v.place.update or 0) == at]


def _far(verdict: Verdict) -> bool:
    return verdict.status is Status.DRIFT and verdict.relative_l2 > _FAR and 2 * verdict.over > verdict.count
