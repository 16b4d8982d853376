"""Mapping of a dump's updates to those of a golden case or of another dump, where they are counted otherwise.

Trainers of our own count updates within the step of their rollouts. A captured one does not tell its rollouts, so each
step of its optimizer counts as a step: several updates of a rollout batch are steps of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from regress.compare.dumps.golden_source import GoldenSide
from regress.compare.dumps.opened_dump import Side
from regress.compare.dumps.record_listing import headers
from regress.compare.dumps.sample_contents import tokens_in
from regress.compare.dumps.sample_matching import Tokens
from regress.compare.dumps.source_view import SourceView
from regress.dump.coordinates import Coordinates, Place
from regress.dump.record import Record

_OF_STEPS = ("trajectory", "old_log_probs", "ref_log_probs")


class RenumberedSource(SourceView):
    """A golden case or dump with its updates numbered as those of another dump.

    Args:
        numbers: recorded number -> that of the dump; other updates are not compared.
    """

    def __init__(self, side: Side, numbers: Mapping[Place, Place]) -> None:
        super().__init__(side)
        self._numbers = numbers

    @cached_property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """The records of the updates that are compared."""
        steps = {own.step: number.step or 0 for own, number in reversed([*self._numbers.items()])}
        found = {}
        for name, (type, place) in self.whole.entries.items():
            own = place.of_update
            if type != "trajectory" and own in self._numbers:
                number = self._numbers[own]
                found[name] = type, replace(place, step=number.step or 0, update=number.update)
            elif type in _OF_STEPS and place.update is None and place.step in steps:
                found[name] = type, replace(place, step=steps[place.step])
        return found

    def read(self, name: str) -> Record:
        """Read one record."""
        place = self.entries[name][1]
        return replace(self.whole.read(name), step=place.step, update=place.update)


def counted_otherwise(golden: Side, actual: Side) -> bool:
    """Return True if the actual dump is of a captured trainer, and the golden one counts updates within steps."""
    captured = bool(actual.config.get("capture")) and not golden.config.get("capture")
    within = [any(number.update is not None for number in _numbers(side)) for side in (golden, actual)]
    return captured and within == [True, False]


def numbered_as(golden: Side, actual: Side) -> tuple[Side, list[str]]:
    """Return the golden side numbered as the dump counts updates, and a sentence where the two count differently.

    Numbers are used if the samples agree with them, otherwise the order of the updates; if samples do not agree with
    that either, updates are matched by samples alone.
    """
    known = _known(golden)
    others = _numbers(actual)
    same = {number: number for number in known if number in others}
    if len(same) == len(others) and _agree(golden, actual, same):
        return (golden if len(same) == len(known) else RenumberedSource(golden, same)), _left(
            golden, known, same
        )
    ordered = dict(zip(known, others, strict=False))
    if not _agree(golden, actual, ordered):
        chosen = _by_content(golden, actual, known, others)
        ordered = chosen or same or ordered
    of = "the case" if isinstance(golden, GoldenSide) else "the golden dump"
    if all(own == number for own, number in ordered.items()):
        return RenumberedSource(golden, ordered), _left(golden, known, ordered)
    ranges = ", ".join(f"{number.words} with {own.words} of {of}" for own, number in [*ordered.items()][:4])
    more = " ..." if len(ordered) > 4 else ""
    notes = [
        f"steps are counted otherwise than in {_named(golden)}, so the actual {ranges}{more} were compared"
    ]
    left = [number.words for number in others if number not in ordered.values()]
    if left:
        notes.append(f"{', '.join(left)} of the actual dump has no counterpart in {_named(golden)}")
    return RenumberedSource(golden, ordered), [*notes, *_left(golden, known, ordered)]


def _known(golden: Side) -> list[Place]:
    """Return the updates of a golden case, or of a dump."""
    if isinstance(golden, GoldenSide):
        return [place.of_update for place in golden.places.values()]
    return _numbers(golden)


def _named(golden: Side) -> str:
    return golden.case.name if isinstance(golden, GoldenSide) else "the golden dump"


def _left(golden: Side, known: Sequence[Place], numbers: Mapping[Place, Place]) -> list[str]:
    """Return a sentence on recorded updates that are not compared."""
    left = [number.words for number in known if number not in numbers]
    if not left:
        return []
    more = f" and {len(left) - 4} more" if len(left) > 4 else ""
    return [f"{', '.join(left[:4])}{more} of {_named(golden)} has no counterpart in the actual dump"]


def _numbers(side: Side) -> list[Place]:
    """Return the updates that a dump has, in order."""
    return sorted({place.of_update for type, place in side.entries.values() if type not in _OF_STEPS})


def _agree(golden: Side, actual: Side, numbers: Mapping[Place, Place]) -> bool:
    """Return True unless a pair of updates is known to have no samples in common."""
    pairs = ((_tokens(golden, own), _tokens(actual, number)) for own, number in numbers.items())
    return bool(numbers) and all(not mine or not theirs or mine & theirs for mine, theirs in pairs)


def _by_content(
    golden: Side, actual: Side, known: Sequence[Place], others: Sequence[Place]
) -> dict[Place, Place]:
    """Return updates in order, each with the first remaining one that has samples in common with it."""
    found: dict[Place, Place] = {}
    left = [*known]
    for number in others:
        theirs = _tokens(actual, number)
        at = next((i for i, own in enumerate(left) if _tokens(golden, own) & theirs), None)
        if at is not None:
            found[left[at]] = number
            left = left[at + 1 :]
    return found


def _tokens(side: Side, number: Place) -> frozenset[Tokens]:
    """Return what identifies the samples of an update, as far as records tell it."""
    names = (
        name
        for name, (type, place) in side.entries.items()
        if type in ("batch_inputs", "forward_data") and place.of_update == number
    )
    return frozenset(tokens_in(side, headers(side, names)).values())
