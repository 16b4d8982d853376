"""The proof that some rank holds each element of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from regress.compare.alignment.keys import Key
from regress.compare.alignment.local_shard import others, uncovered
from regress.compare.alignment.locate import Locator
from regress.compare.quantities import MICRO_STAGES, OPEN_STAGES, UPDATE_STAGES
from regress.compare.updates.coverage import QUANTITY
from regress.compare.updates.plan import Groups
from regress.compare.verdicts.case import element
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.dump.arrays import Array


def judge_elements(
    groups: Groups, golden: Mapping[str, Mapping[str, Array]], locator: Locator, place: Place
) -> Iterator[Verdict]:
    """Yield verdicts on the coverage of full tensors of an update, and of each microbatch's module outputs.

    There is no verdict where one rank holds the whole tensor: elements that it lacks are missing at its place.

    Args:
        golden: ``stage -> tensor name -> golden values``, other stages than those of open names are left out.
        place: place of the update.
    """
    for stage, quantity in (*((stage, stage) for stage in OPEN_STAGES), ("token_gradient", "logit_gradient")):
        names, found = golden.get(quantity, {}), groups.of(stage)
        if not names or not found or not _several(groups, found):
            continue
        verdicts = [v for keys in found for v in _covered(groups, stage, keys, names, locator, place)]
        if groups.plan.divided and stage in OPEN_STAGES:
            recorded = {name for keys in found for name in groups.names(keys)}
            verdicts += [
                Verdict(Status.MISSING, QUANTITY, f"{stage}/{name}", place, f"no rank holds {name}")
                for name in names
                if name not in recorded
            ]
        yield from verdicts
        if not verdicts and stage in UPDATE_STAGES:
            elements = sum(math.prod(array.shape) for array in names.values())
            yield Verdict(Status.OK, QUANTITY, stage, place, count=elements)


def _several(groups: Groups, found: list[list[Key]]) -> bool:
    shards = (groups.record(key).meta.get("shards") for keys in found for key in keys)
    return len(groups.plan.ranks) > 1 or any(shards)


def _covered(
    groups: Groups, stage: str, keys: list[Key], golden: Mapping[str, Array], locator: Locator, place: Place
) -> Iterator[Verdict]:
    if len({groups.layout(key) for key in keys}) > 1:
        return  # other places are not comparable here; replicas have a verdict on them
    for name, values in golden.items():
        parts = [*groups.held(name, keys)]
        if not parts:
            continue  # a tensor that nobody holds, or holds in another shape, has a verdict of its own
        shape = values.shape if stage in UPDATE_STAGES else parts[0].layout.shape
        missing = uncovered(shape, (part.layout for part in parts if part.layout.shape == shape))
        if missing is None:
            continue
        count, index = missing
        words = groups.placed.words(keys[0], stage, shape, locator) if stage in MICRO_STAGES else None
        where = element(index, shape, name) if words is None else f"{words(index)} of {name}"
        yield Verdict.fault(
            Status.COVERAGE,
            QUANTITY,
            f"{stage}/{name}",
            place,
            f"{where} is held by no rank{others(count)}",
            count,
            count=math.prod(shape),
            reason="each element of a tensor is held by some rank",
        )
