"""Rollouts that a run has sampled beside the golden ones: the first token of each sample that differs, and why.

A sampled token is the sampler's own output, made of a distribution and a draw from it. The log-probs of the tokens
before it tell whether the distributions agree as far as they are known; what comes in place of it, whether another
token is drawn or the completion ends elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.verdicts.tolerance import Tolerance
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record

SAMPLED = "sampled by this run"
"""Words in the detail of verdicts on rollouts that were sampled, not repeated."""
_SAME = 1e-6
"""Largest difference of log-probs of one distribution, relative to the largest of them; or the given tolerance."""


@dataclass(frozen=True)
class _Sample:
    """One sample of a step: its tokens, which of them were sampled, and the sampler's log-probs."""

    name: str
    prompt: int
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    log_probs: NDArray[np.float64] | None


@dataclass(frozen=True)
class _Differs:
    """First difference of a sample.

    Attributes:
        kind: ``given`` (prompt, or what the environment and the chat template write), ``drawn``, ``shorter``,
            ``longer``, ``marked`` (the same tokens, others of which count as sampled).
        at: position of it.
    """

    sample: _Sample
    other: _Sample
    kind: str
    at: int

    @property
    def before(self) -> NDArray[np.int64]:
        """Positions of the tokens before it that both sides have sampled."""
        stop = min(self.at, len(self.sample.tokens), len(self.other.tokens))
        return np.flatnonzero(self.sample.mask[:stop] & self.other.mask[:stop])

    @property
    def turn(self) -> int:
        """Number of the turn, from 1, in which it lies."""
        mask = np.concatenate([[False], self.sample.mask[: self.at + 1]])
        return max(int((mask[1:] & ~mask[:-1]).sum()), 1)


def draws_that_differ(
    actual: Record, golden: Record, tolerance: Tolerance | None = None, greedy: bool = False
) -> str:
    """Return what the rollouts of a step tell of a sampler, in words.

    Args:
        tolerance: of log-probs, if one was measured.
        greedy: True for completions that must take the most probable token.
    """
    right, found = _samples(golden), _samples(actual)
    if right is None or found is None or right.keys() != found.keys():
        return f"{SAMPLED}: other samples than the golden ones"
    wrong = [one for name, sample in right.items() if (one := _difference(sample, found[name])) is not None]
    if not wrong:
        return f"{SAMPLED}: tokens and masks repeat"
    first = wrong[0]
    where = f"the first of them ({first.sample.name}) at position {first.at} in turn {first.turn}"
    lines = [f"{SAMPLED}: {len(wrong)} of {len(right)} samples differ, {where}, where {_event(first)}"]
    kinds = Counter(one.kind for one in wrong)
    if set(kinds) <= {"shorter", "longer"}:
        lines.append("every one of them by its end alone")
    elif len(kinds) > 1:
        lines.append(", ".join(f"{count} {_KINDS[kind]}" for kind, count in kinds.items()))
    if "marked" in kinds or "given" in kinds:
        return "; ".join(lines)
    return "; ".join([*lines, *_distribution(wrong, tolerance), *(_argmax(wrong) if greedy else ())])


_KINDS = {
    "given": "by tokens that were not sampled",
    "drawn": "by another draw",
    "shorter": "by an earlier end",
    "longer": "by a later end",
    "marked": "by the mask alone",
}


def _event(one: _Differs) -> str:
    if one.kind == "given":
        return _given(one)
    if one.kind == "marked":
        side = (
            "counts as sampled and was not" if one.other.mask[one.at] else "does not count as sampled and was"
        )
        return f"the tokens are the same and one {side}"
    if one.kind == "drawn":
        return f"token {int(one.other.tokens[one.at])} is drawn in place of {int(one.sample.tokens[one.at])}"
    ended = "completion" if _sampled(one.sample, one.at - 1) and _drawn(one) else "conversation"
    return f"the {ended} ends {'earlier' if one.kind == 'shorter' else 'later'}"


def _given(one: _Differs) -> str:
    if one.at < max(one.sample.prompt, one.other.prompt):
        return "the prompt is another"
    event = "an answer of the environment is another"
    drawn = [_sampled(side, one.at) for side in (one.sample, one.other)]
    there = [one.at < len(side.tokens) for side in (one.sample, one.other)]
    if any(drawn) or not all(there):
        ends = "earlier" if drawn[1] or not there[1] else "later"
        return f"{event}: its tokens end {ends}"
    return event


def _drawn(one: _Differs) -> bool:
    return _sampled(one.sample, one.at) or _sampled(one.other, one.at)


def _sampled(side: _Sample, at: int) -> bool:
    """Return True where a sample has a token that was sampled."""
    return 0 <= at < len(side.tokens) and bool(side.mask[at])


def _samples(record: Record) -> dict[str, _Sample] | None:
    """Return the samples of a record by name; None for one that lacks what tells them."""
    rows: Any = record.meta.get("samples")
    tensors = record.tensors
    if (
        not isinstance(rows, list)
        or not {"lengths", "tokens", "run_id", "loss_mask", "prompt_length"} <= tensors.keys()
    ):
        return None
    ends = np.cumsum(tensors["lengths"]).tolist()
    values: Array | None = tensors.get("log_probs")
    found = {}
    for row, run, prompt, length, end in zip(
        rows,
        tensors["run_id"].tolist(),
        tensors["prompt_length"].tolist(),
        tensors["lengths"].tolist(),
        ends,
        strict=True,
    ):
        part = slice(end - length, end)
        name = f"{row.get('group_id')}/{run}"
        own = None if values is None or len(values) < end else values[part].astype(np.float64)
        found[name] = _Sample(
            name, int(prompt), tensors["tokens"][part], tensors["loss_mask"][part].astype(bool), own
        )
    return found


def _difference(golden: _Sample, actual: _Sample) -> _Differs | None:
    size = min(len(golden.tokens), len(actual.tokens))
    tokens = np.flatnonzero(golden.tokens[:size] != actual.tokens[:size])
    marks = np.flatnonzero(golden.mask[:size] != actual.mask[:size])
    at = min((int(found[0]) for found in (tokens, marks) if len(found)), default=size)
    if at == size and len(golden.tokens) == len(actual.tokens):
        return None
    return _Differs(golden, actual, _kind(golden, actual, at), at)


def _kind(golden: _Sample, actual: _Sample, at: int) -> str:
    """Return what the first difference is made of; behind a token that nobody sampled no completion can end."""
    sampled = [_sampled(one, at) for one in (golden, actual)]
    there = [at < len(one.tokens) for one in (golden, actual)]
    if np.array_equal(golden.tokens, actual.tokens):
        return "marked"
    if at < max(golden.prompt, actual.prompt):
        return "given"
    if all(sampled):
        return "drawn"
    behind_a_draw = _sampled(golden, at - 1)
    if all(there) and not (behind_a_draw and any(sampled)):
        return "given"  # the environment's tokens are others, or end elsewhere
    if not behind_a_draw and not any(sampled):
        return "given"  # its tokens are cut
    return "longer" if sampled[1] or not there[0] else "shorter"


def _distribution(wrong: Sequence[_Differs], tolerance: Tolerance | None) -> list[str]:
    """Return whether the log-probs of the tokens before the first difference of each sample agree."""
    known = [one for one in wrong if one.sample.log_probs is not None and one.other.log_probs is not None]
    sides = [(one.sample.log_probs[one.before], one.other.log_probs[one.before]) for one in known]  # type: ignore[index]  # asked above
    count = sum(len(golden) for golden, _ in sides)
    if not count:
        return [
            "no sampled token with a log-prob lies before it, so nothing tells whether the distributions agree"
        ]
    largest = max(float(np.abs(golden).max(initial=0.0)) for golden, _ in sides)
    allowed = 0.0 if tolerance is None else tolerance.relative * largest + tolerance.absolute
    slack = max(allowed, _SAME * largest)
    off = [~(np.abs(actual - golden) <= slack) for golden, actual in sides]
    if not any(found.any() for found in off):
        return [f"log-probs of the {count} tokens that were sampled before agree"]
    lines = [
        f"log-probs of {sum(int(found.sum()) for found in off)} of the {count} tokens that were sampled before differ"
    ]
    firsts = [bool(found[0]) for found in off if len(found)]
    if not any(firsts):
        lines.append("those of the first token of each completion agree")
    return lines


def _argmax(wrong: Sequence[_Differs]) -> list[str]:
    """Return whether greedy completions take tokens of a lower probability than the golden ones."""
    drawn = [one for one in wrong if one.kind == "drawn"]
    pairs = [
        (one.sample.log_probs[one.at], one.other.log_probs[one.at])
        for one in drawn
        if one.sample.log_probs is not None and one.other.log_probs is not None
    ]
    if pairs and all(actual < golden for golden, actual in pairs):
        return ["a token of lower probability is taken where the most probable one must be"]
    return []
