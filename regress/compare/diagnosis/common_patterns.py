"""Patterns common to all failures of a quantity: places, tokens, parts and numbers, each proven by the data.

A pattern with one counter-example is not stated, and neither is one that chance could produce.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce

from regress.compare.diagnosis.dataflow import depth
from regress.compare.diagnosis.failure_extent import by_chance
from regress.compare.diagnosis.failure_pattern import Pattern as Pattern
from regress.compare.diagnosis.layer_names import layer_of
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.diagnosis.token_attributes import CLASSES, OF_LAYOUTS, OF_SAMPLES
from regress.compare.diagnosis.value_patterns import value_patterns
from regress.compare.quantities import UPDATE_TYPES
from regress.compare.verdicts.affected_elements import Affected, Count
from regress.compare.verdicts.verdict import Status, Verdict

CHANCE = 1e-4
"""Largest probability that chance produced a pattern of tokens."""
CHANCE_OF_SAMPLES = 5e-3
"""The same for patterns of whole samples, of which a golden case has a dozen."""
CHANCE_OF_LAYOUTS = 0.1
"""The same where every token of a class of places in a row is affected, and no other: a row has few samples."""


def find_patterns(failed: Sequence[Verdict], judged: Sequence[Verdict], scene: RunContext) -> list[Pattern]:
    """Return the patterns common to the failing tensors.

    Args:
        failed: verdicts on one quantity of one update; those on the tensor that failed first tell the tokens.
        judged: all verdicts on that quantity and update, failed ones included.
        scene: context of the run.
    """
    if not failed:
        return []
    same = decisive_verdicts(failed)
    return [
        *_precisions(scene),
        *_places(failed, judged, scene),
        *_names(failed, judged),
        *_tokens([verdict.affected for verdict in same if verdict.affected is not None]),
        *_parts(same),
        *value_patterns(same, failed, judged, scene),
        *_nonfinite(same),
    ]


def decisive_verdicts(failed: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on the tensor that failed first; on the moment beside it, if that is a number of updates."""
    name = failed[0].name
    moment = f"{name.removesuffix('step')}exp_avg" if name.endswith("/step") else name
    return [v for v in failed if v.name == moment] or [v for v in failed if v.name == name]


def _precisions(scene: RunContext) -> Iterator[Pattern]:
    golden, actual = scene.precisions
    if golden is not None and actual is not None and golden != actual:
        words = f"the golden run computes in {golden}, the actual one in {actual}"
        yield Pattern("precision", words, {"golden": golden, "actual": actual})


def _places(failed: Sequence[Verdict], judged: Sequence[Verdict], scene: RunContext) -> Iterator[Pattern]:
    for key, word, plural in (("rank", "rank", "s"), ("micro", "microbatch", "es")):
        hit = sorted({value for v in failed if (value := getattr(v.place, key)) is not None})
        there = sorted({value for v in judged if (value := getattr(v.place, key)) is not None})
        if not hit or len(hit) == len(there):
            continue
        listed = ", ".join(map(str, hit))
        yield Pattern(
            key, f"only {word}{plural if len(hit) > 1 else ''} {listed}", {"which": hit, "of": len(there)}
        )
        if key == "micro" and hit == there[-1:]:
            yield Pattern("last_micro", "only the last microbatch")
        if key == "micro" and hit == there[:1]:
            yield Pattern("first_micro", "only the first microbatch")
        if key == "rank":
            yield from _coordinates(hit, there, scene)
            yield from _copies(failed, judged)


def _copies(failed: Sequence[Verdict], judged: Sequence[Verdict]) -> Iterator[Pattern]:
    """Yield a pattern where every failing tensor of an update holds on another rank, or another part of it does."""
    if failed[0].quantity not in UPDATE_TYPES:
        return
    agreeing = {verdict.name: verdict.place.rank for verdict in judged if verdict.ok and verdict.count}
    if all(verdict.name in agreeing for verdict in failed):
        names = {verdict.name for verdict in failed}
        where = ", ".join(map(str, sorted({rank for n in names if (rank := agreeing[n]) is not None})))
        yield Pattern("copies", f"the same tensors hold on rank {where}", {"tensors": len(names)})


def _coordinates(hit: Sequence[int], there: Sequence[int], scene: RunContext) -> Iterator[Pattern]:
    """Yield a pattern where the failing ranks are all those with one coordinate of the mesh."""
    for dimension, size in scene.mesh.items():
        if size < 2:
            continue
        values = {scene.coordinate(rank, dimension) for rank in hit}
        members = [rank for rank in there if scene.coordinate(rank, dimension) in values]
        if len(values) < size and sorted(members) == sorted(hit):
            listed = ", ".join(map(str, sorted(values)))
            words = f"only ranks whose coordinate {dimension} is {listed}"
            yield Pattern(f"mesh:{dimension}", words, {"dimension": dimension, "which": sorted(values)})


NAMES = {
    "norms of heads": r"\.(q|k)_norm\b",
    "norms": r"norm|\bln_",
    "norms of hidden states": r"(?<!\b[qk]_)norm\b|layernorm|\bln_",
    "biases": r"\.bias\b",
    "embeddings": r"embed|\bwte\b|\bwpe\b",
    "the output projection": r"lm_head",
    "embeddings and the output projection": r"embed_tokens|lm_head|\bwte\b",
    "routers": r"\.(gate|router)\.weight",
    "experts": r"\.experts\.",
    "weights of attention": r"(?<!linear_)attn\.",
    "recurrent layers": r"\b(linear_attn|mamba\w*|ssm|rg_?lru|short_conv|conv1d|A_log|dt_bias|time_mix\w*)\b",
    "weights of MLPs": r"\.mlp\.",
    "first moments": r"/exp_avg$",
    "second moments": r"/exp_avg_sq$",
    "moments": r"/exp_avg(_sq)?$",
    "step counters": r"/step$",
}
"""Kinds of modules, parameters and states by their names."""


def kinds_of(names: Collection[str]) -> tuple[str, ...]:
    """Return the kinds of tensors that any of these names belongs to."""
    return tuple(kind for kind, known in NAMES.items() if any(re.search(known, name) for name in names))


def _names(failed: Sequence[Verdict], judged: Sequence[Verdict]) -> Iterator[Pattern]:
    """Yield a pattern where the failing tensors are exactly those of one layer, expert or kind."""
    hit = {verdict.name for verdict in failed}
    there = {verdict.name for verdict in judged}
    if len(hit) == len(there) or len(there) < 3:
        return
    if failed[0].quantity == "gradient":
        yield from _from_a_module(hit, there)
        compared = {verdict.name for verdict in judged if verdict.count}
        if not any("lm_head" in name for name in compared) and kinds_of(compared & hit):
            yield Pattern("tied", "no output projection of its own")
    found: list[tuple[int, Pattern]] = []
    for title, expression in NAMES.items():
        members = {name for name in there if re.search(expression, name)}
        if members == hit:
            found.append((len(expression), Pattern(f"names:{title}", f"only {title}", {"tensors": len(hit)})))
    layers = {layer_of(name) for name in hit}
    number = next(iter(layers))
    if (
        len(layers) == 1
        and number is not None
        and number.isdigit()
        and len({layer_of(name) for name in there}) > 2
    ):
        found.append((0, Pattern("layer", f"only layer {number}", {"layer": int(number)})))
    experts = {match[1] for name in hit if (match := re.search(r"\.experts\.(\d+)\b", name))}
    if len(experts) == 1 and all(".experts." in name for name in hit):
        found.append((0, Pattern("expert", f"only expert {min(experts)}", {"expert": int(min(experts))})))
    yield from (pattern for _, pattern in found)


def _from_a_module(hit: Collection[str], there: Collection[str]) -> Iterator[Pattern]:
    """Yield a pattern where all parameters from a module back to the input have wrong gradients, and none behind it.

    Those of one module are not evidence: it must be several layers, or a layer and the embeddings. Modules of its own
    layer that lie before it may hold, since not all of them feed it.
    """
    agreeing = {*there} - {*hit}
    if not agreeing or len({depth(name)[:2] for name in hit}) < 2:
        return
    last = max(hit, key=depth)
    if all(depth(name) >= depth(last) or depth(name)[:2] == depth(last)[:2] for name in agreeing):
        yield Pattern("from_module", f"all tensors from {last} back to the input, and none behind it")


def _tokens(found: Sequence[Affected]) -> Iterator[Pattern]:
    """Yield patterns of the affected tokens, over all microbatches that have any."""
    known = [item for item in found if item.unit == "token"]
    if not known:
        return
    total = _sum(item.total for item in known)
    if total.hits == total.size:
        yield Pattern("all_tokens", f"all {total.size} compared tokens there", {"tokens": total.size})
        return
    yield from _classes(known, total)
    yield from _positions(known, total)
    yield from _lengths(known, total)
    if total.hit_samples == 1 and total.samples > 2:
        sample = next(item.samples[0] for item in known if item.samples)
        yield Pattern("sample", f"only sample {sample}", {"sample": sample})


def _sum(counts: Iterable[Count]) -> Count:
    return reduce(Count.and_, counts)


def _classes(known: Sequence[Affected], total: Count) -> Iterator[Pattern]:
    """Yield the smallest token classes that hold every affected token."""
    nobody = Count(0, 0, 0, 0)
    names = dict.fromkeys(name for item in known for name in item.classes)
    merged = {name: _sum(item.classes.get(name, nobody) for item in known) for name in names}
    only = [(name, count) for name, count in merged.items() if _only(name, count, total)]
    if not only:
        return
    least = min(count.size for _, count in only)
    for name, count in only:
        if count.size == least:
            much = (
                f"all {count.size} of them" if count.hits == count.size else f"{count.hits} of {count.size}"
            )
            numbers = {"hits": count.hits, "size": count.size}
            yield Pattern(f"class:{name}", f"only {CLASSES[name]} ({much})", numbers)


def _only(name: str, count: Count, total: Count) -> bool:
    """Return True if all affected tokens belong to a class, and neither trivially nor by chance."""
    if count.hits != total.hits or count.size == total.size:
        return False
    if by_chance(count.size, total.size, total.hits) > CHANCE:
        return False
    if name not in OF_SAMPLES:
        return True
    # tokens of one sample share its class, so samples are counted
    exact = name in OF_LAYOUTS and count.hits == count.size
    chance = by_chance(count.samples, total.samples, total.hit_samples)
    return chance <= (CHANCE_OF_LAYOUTS if exact else CHANCE_OF_SAMPLES)


def _ends(known: Sequence[tuple[int, int, int, int] | None]) -> tuple[int, int, int, int] | None:
    """Return the ends of what is affected, and of what holds, over all tensors; None where one has none."""
    ends = [end for end in known if end is not None]
    if len(ends) < len(known):
        return None
    first, last, held_first, held_last = zip(*ends, strict=True)
    return min(first), max(last), min(held_first), max(held_last)


def _positions(known: Sequence[Affected], total: Count) -> Iterator[Pattern]:
    """Yield a pattern where exactly the tokens from a position on, or before one, are affected."""
    ends = _ends([item.positions for item in known])
    if ends is None or total.size * by_chance(total.hits, total.size, total.hits) > CHANCE:
        return
    low, high, held_low, held_high = ends
    if low > held_high:
        yield Pattern("positions_from", f"only positions >= {low}", {"position": low})
        if low == 1:
            yield Pattern("beyond_first", "every sample's first position, which sees no other, holds")
        else:
            yield Pattern("beyond_a_position", f"every position before {low} holds", {"position": low})
    elif high < held_low:
        yield Pattern("positions_below", f"only positions < {high + 1}", {"position": high + 1})


def _lengths(known: Sequence[Affected], total: Count) -> Iterator[Pattern]:
    """Yield a pattern where exactly the samples longer (or shorter) than some length are affected."""
    ends = _ends([item.lengths for item in known])
    chance = by_chance(total.hit_samples, total.samples, total.hit_samples)
    if ends is None or total.samples * chance > CHANCE_OF_SAMPLES:
        return
    low, high, intact_low, intact_high = ends
    if low > intact_high:
        words = f"only sequences longer than {intact_high} (from {low} on)"
        yield Pattern("long_samples", words, {"longer": intact_high})
    elif high < intact_low:
        words = f"only sequences shorter than {intact_low} (up to {high})"
        yield Pattern("short_samples", words, {"shorter": intact_low})


def _parts(failed: Sequence[Verdict]) -> Iterator[Pattern]:
    """Yield a pattern where one block of a dimension is affected, the same in all failing tensors."""
    parts = [verdict.affected.parts for verdict in failed if verdict.affected is not None]
    if not parts or len(parts) < len(failed):
        return
    for part in set(parts[0]).intersection(*parts[1:]):
        dimension, start, stop, size = part
        width = stop - start
        share = size // width if size % width == 0 and start % width == 0 and width > 1 else None
        numbers = {"dimension": dimension, "start": start, "stop": stop, "size": size, "parts": share}
        words = f"only {start}:{stop} of the {size} entries of dimension {dimension}"
        if share is not None:
            words += f" (part {start // width} of {share} equal ones: a head or a shard)"
        if share is not None or width * 2 <= size:
            yield Pattern("block" if share is None else "shard", words, numbers)


def _nonfinite(failed: Sequence[Verdict]) -> Iterator[Pattern]:
    if failed[0].status is Status.NONFINITE:
        inside = "padding" not in failed[0].detail
        yield Pattern("nonfinite" if inside else "nonfinite_padding", failed[0].detail)
