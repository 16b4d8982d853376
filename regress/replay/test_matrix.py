"""Matrix of tests: every case under every variant, rank by rank, microbatch by microbatch, quantity by quantity.

Enumerated at collection, without torch, from the manifests and the recorded lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from regress.compare.quantities import QUANTITIES, TOKEN_GRADIENTS, Kind
from regress.dump.coordinates import Place
from regress.errors import ConfigError
from regress.golden.golden_case import GoldenCase
from regress.layout import RankLayout
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.replay_request import Replay as Replay
from regress.replay.rollout_judge import quantities_of_rollouts
from regress.replay.variant import LOCAL, Extent, Precision, Variant
from regress.replay.variant_requirements import keeps_microbatches, keeps_ties, refusal


def belongs(replay: Replay) -> bool:
    """Return False for a combination of the matrix that the precisions of the case itself rule out.

    Raises:
        ConfigError: if the case names a precision that is none.
    """
    precisions = replay.case.precisions
    unknown = next((word for word in precisions if word not in [*Precision]), None)
    if unknown is not None:
        raise ConfigError(
            f"case {replay.case.name}: unknown precision {unknown!r}; choose one of {', '.join(Precision)}"
        )
    # those of other trainers are judged in float32 besides, whatever they compute in
    return not precisions or (str(replay.precision) in precisions and replay.variant.trainer == LOCAL)


def left_out(replay: Replay, extent: Extent = Extent.DEFAULT) -> str | None:
    """Return why a replay of the matrix is not made; None if it is.

    Of a variant that is meant for cases of some name the run itself tells.
    """
    if replay.variant.follows_traits and (reason := refusal(replay)) is not None:
        return reason
    if not replay.variant.follows_traits and extent is not Extent.FULL:
        return None
    if not keeps_microbatches(replay):
        return "it makes other microbatches, on which the values of the case depend"
    if not keeps_ties(replay):
        return "rounding decides which of two equal samples is the best of its group, which algorithm.advantage takes"
    return None


@dataclass(frozen=True)
class Item:
    """A quantity at one place of a replay, which is judged."""

    replay: Replay
    place: Place
    quantity: str

    @property
    def id(self) -> str:
        """Full name ``case/variant/step0/rank0/micro1/log_probs``."""
        return f"{self.replay.name}/{self.name}"

    @property
    def name(self) -> str:
        """Name within the replay, ``step0/rank0/micro1/log_probs``."""
        return f"{self.place}/{self.quantity}"


def combinations(
    cases: Sequence[GoldenCase],
    variants: Mapping[str, Variant],
    precisions: Sequence[Precision],
    extent: Extent = Extent.DEFAULT,
) -> Iterator[Replay]:
    """Yield every case under every variant that applies to it, in the precisions asked for, possible or not.

    See `Extent`.
    """
    reduced = _reduced(cases, variants) if extent is Extent.REDUCED else set()
    for case in cases:
        for variant in variants.values():
            if extent is Extent.REDUCED and (case.name, variant.name) not in reduced:
                continue
            precisions_here = [one for one in variant.precisions_on(case, extent) if one in precisions]
            found = [Replay(case, variant, precision) for precision in precisions_here]
            if extent is Extent.REDUCED:
                found = [one for one in found if belongs(one)]
                found = [*found[:1], *(one for one in found[1:] if _tells_more(one))]
            yield from found


def _reduced(cases: Sequence[GoldenCase], variants: Mapping[str, Variant]) -> set[tuple[str, str]]:
    """Return the cases and variants of the reduced matrix; see `Extent`."""
    found = {(case.name, name) for case in cases for name in islice(_own(case, variants), 1)}
    for name, one in variants.items():
        if not one.combines:
            found |= {(case.name, name) for case in one.most_telling(cases, partial(_is_made, one))}
    return found


def _is_made(variant: Variant, case: GoldenCase) -> bool:
    """Return True if the matrix has a variant on a case, in the first of its precisions."""
    return left_out(Replay(case, variant, variant.precisions[0])) is None


def _tells_more(replay: Replay) -> bool:
    """Return True for a further precision on the most telling case.

    Errors of rounding grow on ranks and over a wire as they do in one process, compiling for another dtype takes half a
    minute, and two ranks show as well as more that the same bytes are computed twice.
    """
    variant, ranks = replay.variant, replay.world_size
    if replay.precision is Precision.BITWISE:
        more = ranks <= 2
    elif replay.precision is Precision.MIXED:
        more = True
    else:
        more = ranks == 1 and variant.trainer == LOCAL and "model.compile" not in variant.overrides
    return more and variant.rank(replay.case) == 0


def _own(case: GoldenCase, variants: Mapping[str, Variant]) -> Iterator[str]:
    return (name for name, one in variants.items() if one.applies_to(case))


def replays(
    cases: Iterable[GoldenCase],
    variants: Mapping[str, Variant],
    precisions: Sequence[Precision],
    extent: Extent = Extent.DEFAULT,
    notify: Callable[[Replay, str], None] = lambda *_: None,
) -> Iterator[Replay]:
    """Yield the replays of some cases; see `combinations`.

    Args:
        notify: called with each replay that is not possible, and the reason.
    """
    for found in combinations(list(cases), variants, precisions, extent):
        if not belongs(found):
            continue
        reason = left_out(found, extent)
        if reason is None:
            yield found
        else:
            notify(found, reason)


def items(replay: Replay) -> Iterator[Item]:
    """Yield the tests of a replay, in the order of computation.

    Raises:
        ConfigError: if its optimizer updates are not those that were recorded, so that some would go unjudged, or its
            microbatches are others although the values of the case depend on them.
    """
    require_recorded_plan(replay)
    for step in dict.fromkeys(update.step for update in replay.plan):
        yield Item(replay, Place(step), "trajectory")
        for quantity in quantities_of_rollouts(replay.case, replay.precision):
            if is_judged(replay, quantity):
                yield Item(replay, Place(step), quantity)
        for update in (update for update in replay.plan if update.step == step):
            yield from _items_of_update(replay, update)


def require_recorded_plan(replay: Replay) -> None:
    """Raise `ConfigError` for a replay whose updates, or microbatches that count, are not those that were recorded."""
    planned, recorded = [update.where for update in replay.plan], replay.case.wheres()
    if set(planned) != set(recorded):
        raise ConfigError(f"""{replay.name} makes the optimizer updates {", ".join(planned) or "none"}, but recorded are
        {", ".join(recorded) or "none"}; leave trainer.epochs and trainer.mini_batch_size to the case""")
    if not keeps_microbatches(replay):
        raise ConfigError(f"""{replay.name} makes other microbatches than were recorded, and the objective of the case
        has denominators or statistics of each; leave batching and parallel as they are, or choose another case""")


def place_of_test(place: Place) -> Place:
    """Return the place of the test for a verdict where ranks and microbatches are not ours to plan."""
    return place.of_update


def _items_of_update(replay: Replay, update: PlannedUpdate) -> Iterator[Item]:
    recorded = set(replay.case.quantities(update.where))
    judged = [q for q in QUANTITIES if q.name in recorded and is_judged(replay, q.name)]
    where = update.place
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


def is_judged(replay: Replay, quantity: str) -> bool:
    """Return True if a tolerance exists: where the noise of a precision hides everything there is no test."""
    if replay.precision is Precision.BITWISE:
        return True
    entry = replay.case.tolerance(quantity, replay.precision.measured_as)
    return entry is None or entry.relative is not None
