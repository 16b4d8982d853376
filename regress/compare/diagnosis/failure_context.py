"""The context of a failing tensor besides its golden values, read only when it fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.failure_extent import (
    LIMIT,
    affected_tokens,
    blocks,
    constant_offset,
    of_samples,
    one_value,
    rounded_to,
)
from regress.compare.diagnosis.group_patterns import of_groups, of_tokens, of_zeros
from regress.compare.diagnosis.hypotheses import CHANCE, Hypothesis, explains, fitted, permuted, says_nothing
from regress.compare.diagnosis.logit_temperature import log_sum_exp, temperature
from regress.compare.diagnosis.term_decomposition import Term, Terms
from regress.compare.diagnosis.token_attributes import TokenAttributes
from regress.compare.verdicts.affected_elements import Affected, Count
from regress.dump.numpy_arrays import Array, is_float
from regress.layout import ShardLayout

_SPEAKS = 8
"""Fewest affected elements that rule out the changes which do not explain them."""


@dataclass(frozen=True)
class FailureContext:
    """Token attributes of the elements of a local tensor, and hypotheses about their values.

    Attributes:
        traits: attributes of the tokens at the places of its leading dimensions; None for a tensor without tokens.
        leading: shape of those dimensions.
        guesses: hypotheses with arrays in the shape of the whole tensor; asked with its affected elements, if known.
        sums: decompositions of the whole tensor into known parts.
        logits: ``(logits, targets)`` of the places, ``[P, V]`` and ``[P]``; for log-probs and entropies. Rows of
            places without logits are NaN. ``entropy`` is True for entropies.
        pool: all golden values of the quantity in this update.
        shards: the part of the tensor that is at hand; None for all of it.
        usual: ``[*leading]`` places that count while no other is affected; None for all that are compared.
        grouped: True for values that are made of statistics of groups.
        explained: called with the ids of the changes of a formula that explain the tensor; no other explains all.
    """

    traits: Callable[[], TokenAttributes] | None = None
    leading: tuple[int, ...] = ()
    guesses: Callable[[NDArray[np.bool_] | None], Iterable[Hypothesis]] = lambda _: ()
    sums: Callable[[], Iterable[Terms]] = tuple
    logits: Callable[[], tuple[NDArray[np.float64], NDArray[np.int64]] | None] = lambda: None
    entropy: bool = False
    pool: Callable[[], NDArray[np.float64] | None] | None = None
    shards: ShardLayout | None = None
    usual: NDArray[np.bool_] | None = None
    grouped: bool = False
    explained: Callable[[Collection[str]], None] = lambda _: None

    def without_hypotheses(self) -> FailureContext:
        """Return the context that tells what is affected, and asks nothing what gives the values."""
        none = FailureContext()
        return replace(
            self,
            guesses=none.guesses,
            sums=none.sums,
            logits=none.logits,
            pool=None,
            explained=none.explained,
        )

    def part(self, shards: ShardLayout) -> FailureContext:
        """Return the context of a part of the tensor."""
        own, leading = self.traits, self.leading
        traits = None if own is None else lambda: own().part(shards, leading)
        return replace(self, traits=traits, shards=shards, logits=lambda: None, usual=None)

    def affected(
        self,
        actual: Array,
        golden: Array,
        over: NDArray[np.bool_],
        compared: NDArray[np.bool_] | None,
        bound: float,
    ) -> Affected | None:
        """Return the affected part of a tensor that fails; None for one of more than `LIMIT` elements.

        Args:
            over: elements beyond the tolerance, outside of the mask, too.
            compared: ``[*leading]`` the mask; None for all.
        """
        if golden.size > LIMIT or not golden.size:
            return None
        if compared is not None:
            over = over & compared.reshape(*compared.shape, *[1] * (over.ndim - compared.ndim))
        if not over.any():
            return None
        if self.usual is not None and not (over & ~self.usual).any():
            compared = self.usual
        found = self._units(over, compared)
        first = 0 if self.traits is None else len(self.leading)
        found["parts"] = tuple(blocks(over, first))
        found["offset"] = constant_offset(actual, golden, over, bound)
        found["rounded"] = rounded_to(actual, golden, over) if is_float(golden.dtype) else None
        patterns, hits = self._held(actual, golden, over, bound, _spread(compared, golden.ndim))
        found["held"] = patterns | self._summed(actual, golden, compared, bound)
        if self.traits is not None and golden.shape == self.leading and is_float(golden.dtype):
            found["held"] |= of_samples(actual, golden, compared, self.traits().sample)
            found["held"] |= self._grouped(actual, golden, over, compared)
        if (value := one_value(actual, golden, over)) is not None:
            found["held"] |= {"constant": {"value": value}}
        found["hits"] = hits
        return Affected(**found)

    def _grouped(
        self, actual: Array, golden: Array, over: NDArray[np.bool_], compared: NDArray[np.bool_] | None
    ) -> dict[str, Mapping[str, Any]]:
        """Return how advantages differ group by group; nothing for other values."""
        if not self.grouped or self.traits is None:
            return {}
        traits = self.traits()
        groups = np.unique([name.rpartition("/")[0] for name in traits.names], return_inverse=True)[1]
        there = traits.sample >= 0
        there = there if compared is None else there & compared.reshape(-1)
        values, right = (array.reshape(-1)[there].astype(np.float64) for array in (actual, golden))
        own = traits.sample[there]
        wrong = of_zeros(right, over.reshape(-1)[there])
        return {**of_groups(values, right, groups[own]), **of_tokens(values, right, own), **wrong}

    def _units(self, over: NDArray[np.bool_], compared: NDArray[np.bool_] | None) -> dict[str, Any]:
        if self.traits is None:
            return {"unit": "element", "total": Count(int(over.sum()), over.size, 0, 0)}
        traits = self.traits()
        places = np.ones(len(traits.sample), bool) if compared is None else compared
        return affected_tokens(over, places, traits)

    def _held(
        self,
        actual: Array,
        golden: Array,
        over: NDArray[np.bool_],
        bound: float,
        compared: NDArray[np.bool_] | None,
    ) -> tuple[dict[str, Mapping[str, Any]], dict[str, int]]:
        """Return the hypotheses that explain the affected values, with their numbers, and on how many elements."""
        known: dict[str, Mapping[str, Any]] = {}
        hits: dict[str, int] = {}
        for guess in self.guesses(over if self.shards is None else None):
            if guess.id in known and guess.id != "formula":
                continue
            if guess.rows is not None:  # a few rows are asked first: there may be hundreds of changes
                fits = self.shards is not None or _fits_rows(guess, actual, golden, over, bound)
                whole = guess.whole() if fits else None
                if whole is None:
                    continue
                guess = whole
            if (local := self._local(guess, golden.shape)) is None:
                continue
            found = fitted(local, actual, over)
            if says_nothing(found, actual, over, bound, compared):
                known[found.id], hits[found.id] = dict(found.numbers), 0
                continue
            if not explains(found, actual, golden, over, bound, compared):
                continue
            hits[found.id] = int((over & np.isfinite(found.values)).sum())
            if found.id == "formula":  # several that say the same of these values: any may be meant
                said = known.get("formula", {"changes": {}})["changes"]
                known["formula"] = {"changes": {**said, found.numbers["what"]: _change(found)}}
            else:
                known[found.id] = dict(found.numbers)
        if int(over.sum()) >= _SPEAKS:
            self.explained([id for _, id in known.get("formula", {"changes": {}})["changes"].values()])
        if "formula" in known:  # which says the same without a number that was fitted
            known.pop("fitted", None)
        pool = None if self.pool is None or known else self.pool()
        if pool is not None and permuted(actual, golden, pool, over, bound):
            known["permuted"] = {}
        tempered = self._tempered(actual, golden, over, bound)
        if tempered is not None:
            known["tempered"] = tempered
        elif {*known} <= {"formula"} and self._of_other_targets(actual, golden, over, bound):
            known["targets"] = {}
        return known, hits

    def _summed(
        self, actual: Array, golden: Array, compared: NDArray[np.bool_] | None, bound: float
    ) -> dict[str, Mapping[str, Any]]:
        """Return the first sum whose parts explain the tensor, by id, with the count of each that counts wrongly."""
        places, mask = np.ones(golden.shape, bool), _spread(compared, golden.ndim)
        places = places if mask is None else places & mask
        for found in self.sums():
            local = self._own_terms(found, golden.shape)
            counts = None if local is None else local.counts(actual, golden, places, bound)
            if counts:
                return {found.id: {**found.numbers, "counts": counts}}
        return {}

    def _own_terms(self, found: Terms, shape: tuple[int, ...]) -> Terms | None:
        """Return the parts of a sum that lie at hand; None for those of another shape."""
        terms: list[Term] = []
        for term in found.terms:
            values = term.values
            if self.shards is not None and values.shape == self.shards.shape:
                values = self.shards.project(values)
            if values.shape != shape:
                return None
            terms.append(replace(term, values=values))
        return replace(found, terms=tuple(terms))

    def _local(self, guess: Hypothesis, shape: tuple[int, ...]) -> Hypothesis | None:
        """Return the part of a hypothesis that lies at hand; None for one of another shape."""
        arrays = [guess.values] if guess.direction is None else [guess.values, guess.direction]
        if self.shards is not None:
            arrays = [self.shards.project(a) for a in arrays if a.shape == self.shards.shape]
        if not arrays or any(array.shape != shape for array in arrays):
            return None
        return replace(guess, values=arrays[0], direction=arrays[1] if len(arrays) > 1 else None)

    def _tempered(
        self, actual: Array, golden: Array, over: NDArray[np.bool_], bound: float
    ) -> Mapping[str, Any] | None:
        """Return the temperatures of the actual and of the golden values, where the logits explain both."""
        found = self.logits()
        if found is None or int(over.sum()) < 3:
            return None
        logits, targets = found
        rows = np.flatnonzero(over.reshape(-1) & np.isfinite(logits[:, 0]))
        if len(rows) < 3:
            return None
        temperatures = []
        for values in (actual, golden):
            flat = values.reshape(-1)[rows].astype(np.float64)
            if not np.isfinite(flat).all():
                return None
            t, error = temperature(flat, logits[rows], targets[rows], entropy=self.entropy)
            if error > max(8 * bound, 1e-9 * float(np.abs(flat).max(initial=1.0))):
                return None
            temperatures.append(float(f"{t:.6g}"))
        return (
            {"actual": temperatures[0], "golden": temperatures[1]}
            if temperatures[0] != temperatures[1]
            else None
        )

    def _of_other_targets(self, actual: Array, golden: Array, over: NDArray[np.bool_], bound: float) -> bool:
        """Return True if every affected log-prob is that of another token under the recorded logits."""
        found = None if self.entropy else self.logits()
        if found is None:
            return False
        logits, targets = found
        rows = np.flatnonzero(over.reshape(-1))
        if not np.isfinite(logits[rows]).all():
            return False
        wrong, right = (array.reshape(-1)[rows].astype(np.float64) for array in (actual, golden))
        t, error = temperature(right, logits[rows], targets[rows])
        slack = max(8 * bound, 1e-9 * float(np.abs(wrong).max(initial=1.0)))
        if error > slack or not np.isfinite(wrong).all():
            return False
        known = logits[rows] / t - log_sum_exp(logits[rows] / t)[:, None]
        if not (np.abs(known - wrong[:, None]) <= slack).any(axis=1).all():
            return False
        chance = min(2 * slack * logits.shape[1] / max(float(np.ptp(known)), 1e-300), 1.0)
        return np.unique(wrong).size * math.log(max(chance, 1e-300)) < math.log(CHANCE)


def _fits_rows(
    guess: Hypothesis, actual: Array, golden: Array, over: NDArray[np.bool_], bound: float
) -> bool:
    """Return True if some rows of a tensor are as a hypothesis says, and not as they must be."""
    shape = (-1, *guess.values.shape[1:])
    wrong, right, beyond = (array.reshape(shape)[guess.rows] for array in (actual, golden, over))
    return explains(replace(guess, partial=True), wrong, right, beyond, bound, beyond)


def _change(found: Hypothesis) -> list[Any]:
    """Return how far a formula is changed, and the id of its change."""
    return [found.numbers.get("change", 0), found.numbers.get("id", found.numbers["what"])]


def _spread(compared: NDArray[np.bool_] | None, ndim: int) -> NDArray[np.bool_] | None:
    """Return a mask of places as one of elements, able to be broadcast."""
    return None if compared is None else compared.reshape(*compared.shape, *[1] * (ndim - compared.ndim))
