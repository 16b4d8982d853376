"""Abstain where the baseline does not agree with itself: a second recording of it says how far it is from the first.

The largest difference of the two, relative to the scale of each tensor, is the noise of a quantity. Noise within the
tolerance changes nothing. Of a quantity beyond it, a difference that is no larger than the noise is neither equal nor
wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from regress.compare.dumps.comparison import Comparison
from regress.compare.verdicts.verdict import Status, Verdict

_MEASURED = (Status.DRIFT, Status.OK)


@dataclass(frozen=True)
class _Noise:
    """Measure how far two recordings of a baseline lie apart.

    Attributes:
        relative: quantity -> largest error over the scale of its tensor.
        beyond: quantities in which they differ by more than the tolerance.
        other: status, quantity and tensor of all other failures.
    """

    relative: Mapping[str, float]
    beyond: frozenset[str]
    other: frozenset[tuple[Status, str, str]]

    @classmethod
    def of(cls, found: Comparison) -> _Noise:
        relative: dict[str, float] = {}
        for verdict in found.verdicts:
            if verdict.status in _MEASURED and verdict.max_error:
                relative[verdict.quantity] = max(verdict.relative, relative.get(verdict.quantity, 0.0))
        failed = found.failed
        beyond = frozenset(verdict.quantity for verdict in failed if verdict.status is Status.DRIFT)
        other = frozenset(_key(verdict) for verdict in failed if verdict.status is not Status.DRIFT)
        return cls(relative, beyond, other)

    def hides(self, verdict: Verdict) -> bool:
        """Return True if the baseline differs from itself by as much."""
        if verdict.status not in _MEASURED:
            return _key(verdict) in self.other
        inside = verdict.max_error > 0 and verdict.relative <= self.relative.get(verdict.quantity, 0.0)
        return verdict.quantity in self.beyond and inside


def judged_beside_noise(found: Comparison, again: Comparison) -> Comparison:
    """Return a comparison without the verdicts that noise hides; each of their quantities is a problem.

    Args:
        again: the same golden side beside a second recording of it.
    """
    noise = _Noise.of(again)
    hidden = [verdict for verdict in found.verdicts if noise.hides(verdict)]
    kept = [verdict for verdict in found.verdicts if not noise.hides(verdict)]
    problems = [*found.problems, *_problems(hidden, noise)]
    return replace(found, verdicts=kept, problems=problems, notes=[*found.notes, *_notes(noise, again)])


def _problems(hidden: list[Verdict], noise: _Noise) -> Iterator[str]:
    for quantity in dict.fromkeys(verdict.quantity for verdict in hidden):
        own = [verdict for verdict in hidden if verdict.quantity == quantity]
        measured = [verdict.relative for verdict in own if verdict.status in _MEASURED]
        if measured:
            yield (
                f"{quantity} cannot be judged: it differs by up to {max(measured):.2g} of its scale, and two "
                f"recordings of the baseline by {noise.relative[quantity]:.2g}; make the baseline deterministic"
            )
        others = [verdict for verdict in own if verdict.status not in _MEASURED]
        if others:
            yield (
                f"{quantity} {others[0].name} cannot be judged: two recordings of the baseline differ in it, too "
                f"({others[0].detail or others[0].status})"
            )


def _notes(noise: _Noise, again: Comparison) -> Iterator[str]:
    if not noise.relative and not noise.other:
        yield f"two recordings of the baseline are the same: {again.golden} and {again.actual}"
        return
    largest = ", ".join(f"{quantity} {value:.2g}" for quantity, value in noise.relative.items() if value)
    yield f"noise of the baseline, relative to the scale of each tensor: {largest or 'none in values'}"


def _key(verdict: Verdict) -> tuple[Status, str, str]:
    return verdict.status, verdict.quantity, verdict.name
