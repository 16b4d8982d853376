"""Matrix of tests: every case under every variant, rank by rank, microbatch by microbatch, quantity by quantity.

Enumerated at collection, without torch, from the manifests and the recorded lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from regress.compare.quantities import QUANTITIES, TOKEN_GRADIENTS, Kind
from regress.compare.verdicts.verdict import Place
from regress.errors import ConfigError
from regress.golden.case import GoldenCase
from regress.layout import RankLayout
from regress.replay.coverage import section_values
from regress.replay.partition import depends_on_microbatches, same_microbatches
from regress.replay.plan import PlannedUpdate, plan_replay
from regress.replay.read_once import trajectories_of
from regress.replay.remote_variants import quantities
from regress.replay.rollouts import quantities_of_rollouts
from regress.replay.size import world_size
from regress.replay.variants import Extent, Precision, Variant


@dataclass(frozen=True)
class Replay:
    """A case under a variant in one precision: runs once, however many tests use it."""

    case: GoldenCase
    variant: Variant
    precision: Precision

    @property
    def name(self) -> str:
        """Name as in test ids: ``case/variant``, with the precision unless it is float64."""
        return f"{self.case.name}/{self.variant.name}{self.precision.suffix}"

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return max(world_size(self.case.config, overrides) for overrides in self.processes)

    @property
    def processes(self) -> tuple[Mapping[str, Any], ...]:
        """Overrides of each of the processes that make it one after the other."""
        variant = self.variant
        return (variant.overrides,) if variant.before is None else (variant.before, variant.overrides)

    @cached_property
    def plan(self) -> list[PlannedUpdate]:
        """Updates that it computes, and the microbatches of every rank."""
        rollouts, config = trajectories_of(self.case), self.case.config
        plans = [plan_replay(rollouts, config, overrides) for overrides in self.processes]
        return (
            [*plans[0][: self.variant.resume_at], *plans[-1][self.variant.resume_at :]]
            if plans[1:]
            else plans[0]
        )


def belongs(replay: Replay, extent: Extent) -> bool:
    """Return False for a combination of the matrix that the case itself rules out: by its precisions or, where all
    cases meet all variants, by values that depend on other microbatches.

    Raises:
        ConfigError: if the case names a precision that is none.
    """
    wanted = replay.case.precisions
    unknown = next((word for word in wanted if word not in [*Precision]), None)
    if unknown is not None:
        raise ConfigError(
            f"case {replay.case.name}: its precisions name {unknown!r}, which is none; choose of {', '.join(Precision)}"
        )
    if wanted and (
        str(replay.precision) not in wanted or replay.variant.wire is not None
    ):  # wires round to float32
        return False
    return extent is not Extent.FULL or keeps_microbatches(replay)


def keeps_microbatches(replay: Replay) -> bool:
    """Return True unless the values of a case depend on its microbatches, and the variant makes others."""
    if not depends_on_microbatches(section_values(replay.case.config, {}, "algorithm")):
        return True
    recorded = plan_replay(trajectories_of(replay.case), replay.case.config, {})
    return same_microbatches(recorded, replay.plan)


@dataclass(frozen=True)
class Item:
    """One test: a quantity at one place of a replay."""

    replay: Replay
    place: Place
    quantity: str

    @property
    def id(self) -> str:
        """Test id ``case/variant/step0/rank0/micro1/log_probs``."""
        return f"{self.replay.name}/{self.place}/{self.quantity}"


def combinations(
    cases: Sequence[str],
    variants: Mapping[str, Variant],
    precisions: Sequence[Precision],
    extent: Extent = Extent.DEFAULT,
) -> Iterator[tuple[str, Variant, Precision]]:
    """Yield every case, by its name, under every variant that applies to it, in the precisions asked for.

    See `Extent`.
    """
    reduced = _reduced(cases, variants) if extent is Extent.REDUCED else set()
    for case in cases:
        for variant in variants.values():
            wanted = [precision for precision in variant.precisions if precision in precisions]
            if extent is Extent.REDUCED:
                wanted = wanted[:1] if (case, variant.name) in reduced else []
            elif not variant.applies_to(case, extent):
                wanted = []
            for precision in wanted:
                yield case, variant, precision


def _reduced(cases: Sequence[str], variants: Mapping[str, Variant]) -> set[tuple[str, str]]:
    """Return the cases and variants of the reduced matrix: no case is left out, and no variant but combinations."""
    variants = {name: one for name, one in variants.items() if not one.combines}
    found = {(first, name) for name, one in variants.items() if (first := one.first_of(cases)) is not None}
    for case in {*cases} - {case for case, _ in found}:
        own = (name for name, one in variants.items() if one.applies_to(case))
        found |= {(case, name) for name in islice(own, 1)}
    return found


def replays(
    cases: Iterable[GoldenCase],
    variants: Mapping[str, Variant],
    precisions: Sequence[Precision],
    extent: Extent = Extent.DEFAULT,
) -> Iterator[Replay]:
    """Yield the replays of some cases; see `combinations`."""
    known = {case.name: case for case in cases}
    for name, variant, precision in combinations(list(known), variants, precisions, extent):
        found = Replay(known[name], variant, precision)
        if belongs(found, extent):
            yield found


def items(replay: Replay) -> Iterator[Item]:
    """Yield the tests of a replay, in the order of computation.

    Raises:
        ConfigError: if its optimizer updates are not those that were recorded, so that some would go unjudged, or its
            microbatches are others although the values of the case depend on them.
    """
    planned, recorded = [update.where for update in replay.plan], replay.case.wheres()
    if set(planned) != set(recorded):
        raise ConfigError(
            f"{replay.name} makes the optimizer updates {', '.join(planned) or 'none'}, but recorded are "
            f"{', '.join(recorded) or 'none'}; leave trainer.epochs and trainer.mini_batch_size to the case"
        )
    if not keeps_microbatches(replay):
        raise ConfigError(
            f"{replay.name} makes other microbatches than were recorded, and the objective of the case has "
            "denominators or statistics of each; leave batching and parallel as they are, or choose another case"
        )
    if replay.variant.wire is not None:
        yield from _items_over_a_wire(replay)
        return
    for step in dict.fromkeys(update.step for update in replay.plan):
        yield Item(replay, Place(step), "trajectory")
        for quantity in quantities_of_rollouts(replay.case, replay.precision):
            if _judged(replay, quantity):
                yield Item(replay, Place(step), quantity)
        for update in (update for update in replay.plan if update.step == step):
            yield from _items_of_update(replay, update)


def _items_over_a_wire(replay: Replay) -> Iterator[Item]:
    """Yield the tests of a replay through a service, whose ranks and microbatches are its own."""
    for update in replay.plan:
        place, recorded = Place(update.step, update.update), {*replay.case.quantities(update.where)}
        for quantity in (q.name for q in QUANTITIES):
            over_wire = quantity in quantities(replay.precision) and quantity in recorded
            if quantity == "coverage" or (over_wire and _judged(replay, quantity)):
                yield Item(replay, place, quantity)


def place_of_test(place: Place) -> Place:
    """Return the place of the test for a verdict where ranks and microbatches are not ours to plan."""
    return Place(place.step, place.update)


def _items_of_update(replay: Replay, update: PlannedUpdate) -> Iterator[Item]:
    recorded = set(replay.case.quantities(update.where))
    judged = [q for q in QUANTITIES if q.name in recorded and _judged(replay, q.name)]
    where = Place(update.step, update.update)
    for rank, layouts in enumerate(update.layouts):
        for micro, layout in enumerate(layouts):
            place = Place(update.step, update.update, rank, micro)
            kinds = _kinds(update, rank, layout)
            for quantity in judged:
                kind = Kind.TOKEN if quantity.name in TOKEN_GRADIENTS else quantity.kind
                if quantity.per_microbatch and kind in kinds:
                    yield Item(replay, place, quantity.name)
    yield Item(replay, where, "coverage")
    for rank in range(len(update.layouts)):
        place = Place(update.step, update.update, rank)
        for quantity in judged:
            if not quantity.per_microbatch:
                yield Item(replay, place, quantity.name)
    if len(update.layouts) > 1:
        yield Item(replay, where, "replicas")
    yield Item(replay, where, "invariants")


def _kinds(update: PlannedUpdate, rank: int, layout: RankLayout) -> set[Kind]:
    """Return the kinds of quantities that could be wrong in a rank's microbatch."""
    kinds = {Kind.EXACT}  # masks say that padding is padding
    if layout.tokens.num_tokens:
        kinds.add(Kind.HIDDEN)
    if rank not in update.records.without_loss:
        kinds.add(Kind.SHARE)  # that of no token is 0
        if update.loss_tokens(layout.targets):
            kinds.add(Kind.TOKEN)
    return kinds


def _judged(replay: Replay, quantity: str) -> bool:
    """Return True if a tolerance exists: where the noise of a precision hides everything there is no test."""
    if replay.precision is Precision.BITWISE:
        return True
    entry = replay.case.tolerance(quantity, replay.precision.measured_as)
    return entry is None or entry.relative is not None
