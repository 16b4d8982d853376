"""Patterns of wrong values: factors, offsets, formulas and sums that explain all failing tensors alike.

A factor or formula is stated only where it leaves next to nothing of the error, and of many elements or several
tensors: one number is always some multiple of another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from regress.compare.diagnosis.failure_pattern import Pattern
from regress.compare.diagnosis.group_patterns import BY_TOKEN, WITHIN, ZEROS, group_patterns
from regress.compare.diagnosis.group_patterns import KEY as GROUPS
from regress.compare.diagnosis.hypotheses import LEFT
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.diagnosis.share_patterns import KEY as MICROBATCHES
from regress.compare.diagnosis.share_patterns import share_patterns
from regress.compare.verdicts.affected_elements import Affected
from regress.compare.verdicts.verdict import Status, Verdict

EXPLAINED = LEFT
"""Largest part of an error that a scale factor may leave if it is to explain it."""
AT_LEAST = 8
"""Fewest elements of one tensor that prove a factor, offset or formula; less of each of several tensors will do."""
_ALIKE = 1e-4
_ADAPTER = re.compile(r"\blora_(embedding_)?[AB]\b")
"""Names of the factors of low-rank adapters, which are multiplied by a scale of their own."""
_TOLD = 3  # formulas that are named
_FEW = 8
"""Elements of a tensor below which it need not speak for a hypothesis that all others prove."""


def value_patterns(
    same: Sequence[Verdict], failed: Sequence[Verdict], judged: Sequence[Verdict], scene: RunContext
) -> Iterator[Pattern]:
    """Yield patterns of the wrong values.

    Args:
        same: failing verdicts on the tensor that failed first.
        failed: those on all tensors of its quantity; ``judged`` all verdicts on these.
    """
    found = [verdict.affected for verdict in same if verdict.affected is not None]
    complete = bool(found) and len(found) == len(same)
    rounded = found[0].rounded if complete and len({item.rounded for item in found}) == 1 else None
    if rounded is None:  # which leaves equal values with equal errors, as a factor does
        yield from _scaled(same, failed, judged, scene)
    yield from _adds_up(same, failed, scene)
    if not complete:
        return
    offsets = [item.offset for item in found]
    first = offsets[0]
    alike = first is not None and all(o is not None and math.isclose(o, first, rel_tol=1e-5) for o in offsets)
    if alike and sum(item.total.hits for item in found) >= AT_LEAST:
        yield Pattern("offset", f"constant offset {first:.6g}", {"offset": first})
    if rounded is not None:
        yield Pattern("rounded", f"rounded to {rounded}", {"dtype": rounded})
    yield from _held(found)
    yield from group_patterns(found)
    yield from share_patterns(same, scene)


def _held(found: Sequence[Affected]) -> Iterator[Pattern]:
    """Yield the hypotheses that explain every failing tensor, and in the same way."""
    for key in dict.fromkeys(
        key
        for item in found
        for key in item.held
        if key not in (MICROBATCHES, GROUPS, WITHIN, BY_TOKEN, ZEROS)
    ):
        own = [item for item in found if key in item.held]
        if any(key not in item.held and item.total.size >= _FEW for item in found):
            continue
        if key != "targets" and not proven([item.hits.get(key, item.total.hits) for item in own]):
            continue  # a log-prob of another token is none by chance
        if key == "formula":
            yield from _formulas([item.held[key]["changes"] for item in own])
            continue
        numbers = own[0].held[key]
        if all(item.held[key] == numbers for item in own):
            yield Pattern(key, _words(key, numbers), numbers)
        elif key == "fitted" and len({item.held[key]["what"] for item in own}) == 1:
            values = dict.fromkeys(item.held[key]["value"] for item in own)
            listed = ", ".join(f"{value:g}" for value in values)
            words = f"equal to {numbers['what']} a number of its own ({listed})"
            yield Pattern("fitted_each", words, {"what": numbers["what"], "values": [*values]})


def _formulas(found: Sequence[Mapping[str, Sequence[Any]]]) -> Iterator[Pattern]:
    """Yield the formulas that explain every tensor, of several the simplest: they say the same of all values."""
    common = {words: pair for words, pair in found[0].items() if all(words in others for others in found)}
    if common:
        least = min(change for change, _ in common.values())
        changes = {words: id for words, (change, id) in common.items() if change == least}
        what = ", or ".join([*changes][:_TOLD])
        yield Pattern("formula", f"equal to {what}", {"what": what, "changes": [*changes.values()]})


def proven(hits: Sequence[int]) -> bool:
    """Return True if as many elements, tensor by tensor, prove a formula."""
    return sum(hits) >= AT_LEAST or (len(hits) > 1 and sum(hits) >= AT_LEAST // 2)


_HELD = {
    "shifted": "shifted by one position (each holds what belongs {by:+d} position on)",
    "equals": "equal to {what}",
    "formula": "equal to {what}",
    "fitted": "equal to {what} {value:g}",
    "targets": "each that of another token of the vocabulary under the logits that hold",
    "permuted": "each equal to the value of another token",
    "columns": "equal to the columns of the row",
    "per_sample": "each sample multiplied by a number of its own",
    "constant": "all equal to {value:g}",
    "tempered": "those of the recorded logits at temperature {actual:g}, golden {golden:g}",
}


def _words(key: str, numbers: Mapping[str, Any]) -> str:
    if "counts" not in numbers:
        return _HELD[key].format(**numbers)
    counts = numbers["counts"]
    factors = ", ".join(f"{name} counts {_times(count)}" for name, count in counts.items())
    return f"a sum in which {factors}"


def _times(count: float) -> str:
    return {0.0: "not at all", 1.0: "once", 2.0: "twice", -1.0: "with the other sign"}.get(
        count, f"{count:.5g} times"
    )


def _scaled(
    same: Sequence[Verdict], failed: Sequence[Verdict], judged: Sequence[Verdict], scene: RunContext
) -> Iterator[Pattern]:
    """Yield a pattern where a scale factor explains the tensor that failed first, wherever it fails."""
    alphas = _factors(same)
    if alphas is None:
        return
    alpha = alphas[0]
    if not _alike(alphas):
        listed = ", ".join(f"{a:.4g}" for a in alphas[:4])
        yield Pattern("factors", f"each scaled by a factor of its own ({listed})", {"alphas": alphas})
        return
    every = _factors(failed)
    whole = every is not None and _alike(every)
    if not _independent(failed if whole else same):
        return
    if whole and all(v in failed or not v.scale for v in judged):
        yield Pattern("everywhere", "the same factor in every tensor", {"tensors": len(failed)})
        if all(_ADAPTER.search(verdict.name) for verdict in failed):
            yield Pattern("adapters", "every tensor with a gradient is a factor of an adapter")
    residual = max((v.residual or 0.0) for v in same)
    if abs(alpha) < 1e-12:
        yield Pattern("zero", "all zero")
        return
    numbers = {"alpha": alpha, "residual": residual}
    if math.isclose(alpha, -1.0, rel_tol=_ALIKE):
        yield Pattern("sign", "sign flipped", numbers)
        return
    exact, names = scene.named_factor(alpha)
    words = f"scaled by {exact or f'{alpha:.6g}'} (alpha={alpha:.6g}, residual {residual:.1g})"
    yield Pattern("scaled", words, numbers)
    unproven = _counts_that_do_not_reach(alpha, same, judged, scene)
    for name, what in names:
        if name not in unproven:
            yield Pattern(f"scaled:{name}", f"that factor is {what}", numbers)


def _counts_that_do_not_reach(
    alpha: float, same: Sequence[Verdict], judged: Sequence[Verdict], scene: RunContext
) -> frozenset[str]:
    """Return the names of numbers of ranks or microbatches that a factor does not come from.

    Such a number enters a sum or a mean over all of them, so that one place that holds is a counter-example, unless its
    tolerance is too wide to tell. Ranks with other numbers of microbatches would have other factors.
    """
    hit = {id(verdict) for verdict in same}
    alike = [verdict for verdict in judged if verdict.name == same[0].name]
    others = [v.alpha for v in alike if id(v) not in hit]
    if any(factor is not None and not _alike([alpha, factor]) for factor in others):  # None: values of zero
        return frozenset(scene.extents)
    micros: dict[int | None, set[int]] = {}
    for place in (verdict.place for verdict in alike):
        if place.micro is not None:
            micros.setdefault(place.rank, set()).add(place.micro)
    return frozenset(["micros"] if len({len(own) for own in micros.values()}) > 1 else ())


def _factors(verdicts: Sequence[Verdict]) -> list[float] | None:
    """Return the factor that explains each tensor; None where one is not explained."""
    found = []
    for verdict in verdicts:
        alpha, left = verdict.alpha, verdict.residual
        if verdict.status is not Status.DRIFT or alpha is None or left is None:
            return None
        if left > EXPLAINED * max(verdict.relative_l2, 1e-300):
            return None
        found.append(alpha)
    return found if sum(verdict.count for verdict in verdicts) > 1 else None


def _alike(alphas: Iterable[float]) -> bool:
    known = [*alphas]
    return all(math.isclose(a, known[0], rel_tol=_ALIKE, abs_tol=1e-9) for a in known)


def _independent(verdicts: Sequence[Verdict]) -> bool:
    """Return True for enough elements, or several tensors that are not copies of one another."""
    if any(verdict.count >= AT_LEAST for verdict in verdicts):
        return True
    return len({(verdict.scale, verdict.max_error) for verdict in verdicts}) > 1


def _adds_up(same: Sequence[Verdict], failed: Sequence[Verdict], scene: RunContext) -> Iterator[Pattern]:
    """Yield a pattern where ranks hold parts of a gradient that add up to the golden one, in every tensor.

    The factor of closest approach is linear in a tensor, so those of the parts add up to that of their sum, 1. Shards
    of one tensor have the same name: where all ranks together tell nothing, those with one coordinate of the mesh do.
    """
    if same[0].quantity != "gradient" or _factors(same) is not None:
        return
    for dimension in ("", *(name for name, size in scene.mesh.items() if size > 1)):
        several = _copies(failed, dimension, scene)
        factor = _sum_of_parts(several)
        if factor is not None:
            times = "" if factor == 1.0 else f" times {factor:g}"
            among = f" over the ranks of one coordinate {dimension}" if dimension else ""
            words = f"parts on each rank, which add up to the golden ones{times}{among}"
            yield Pattern("parts", words, {"tensors": len(several), "factor": factor})
            return


def _copies(failed: Sequence[Verdict], dimension: str, scene: RunContext) -> list[list[Verdict]]:
    """Return the verdicts on each tensor, or on each of its shards along a dimension, that several ranks hold."""
    copies: dict[tuple[str, float, int, int], list[Verdict]] = {}
    for verdict in failed:
        rank = verdict.place.rank
        if verdict.status is Status.DRIFT and rank is not None:
            shard = scene.coordinate(rank, dimension) if dimension else 0
            copies.setdefault((verdict.name, verdict.scale, verdict.count, shard), []).append(verdict)
    return [own for own in copies.values() if len(own) > 1]


def _sum_of_parts(several: Sequence[Sequence[Verdict]]) -> float | None:
    """Return the number of times that the parts of each tensor add up to the golden one; None if they do not."""
    if not several or sum(own[0].count for own in several) < AT_LEAST:
        return None
    if not any(len(_different(own)) > 1 for own in several):
        return None
    totals = [_total(own) for own in several]
    ranks = len(several[0])
    return next((k for k in (1.0, float(ranks), 1.0 / ranks) if all(_is(t, k) for t in totals)), None)


def _is(total: float | None, factor: float) -> bool:
    return total is not None and math.isclose(total, factor, rel_tol=1e-6)


def _total(own: Sequence[Verdict]) -> float | None:
    """Return the sum of the factors of the different tensors among these."""
    alphas = [verdict.alpha for verdict in _different(own)]
    return None if None in alphas else math.fsum(a or 0.0 for a in alphas)


def _different(own: Sequence[Verdict]) -> list[Verdict]:
    """Return one of the verdicts on each different tensor: ranks that share it hold the same."""
    return [*{(verdict.alpha, verdict.max_error): verdict for verdict in own}.values()]
