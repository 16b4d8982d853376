"""Experts that the two sides chose for a token: near-ties that rounding decides, told apart from wrong choices.

A router takes the experts with the largest logits, so rounding may take another one where two logits nearly tie. The
margin of such a flip is the distance, on the golden side, between the logits of the expert that was lost and of the one
that was taken. A margin beyond what logits are rounded by is a wrong choice. After a flip the token, and those that
attend to it, have other values: their choice in later routers has to follow their own logits, and is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from regress.compare.alignment.aligned_tensor import Aligned
from regress.compare.alignment.canonical_projection import Projection
from regress.compare.dumps.canonical_values import golden_update
from regress.compare.dumps.frame_mapping import in_frame, numbers
from regress.compare.dumps.opened_dump import Named
from regress.compare.dumps.scaled_verdicts import Finding
from regress.compare.dumps.tolerance_bounds import spacing
from regress.compare.dumps.unit_work import UnitWork
from regress.compare.quantities import OTHER, QuantitySource, quantity_named
from regress.compare.verdicts.verdict import Status
from regress.layout import SampleKey, TokenFrame

Array: TypeAlias = NDArray[Any]
Bools: TypeAlias = NDArray[np.bool_]

QUANTITY = "activations"
EXPERTS, WEIGHTS = "/experts", "/weights"


@dataclass(frozen=True, eq=False)
class Choice:
    """A router's logits ``[n, E]`` and chosen experts ``[n, k]`` of the tokens of an update; -1 where not recorded."""

    logits: Array
    experts: Array

    @cached_property
    def taken(self) -> Bools:
        """Experts of each token, ``[n, E]``."""
        found = np.zeros(self.logits.shape, bool)
        known = np.flatnonzero((self.experts >= 0).all(axis=1))
        found[known[:, None], self.experts[known]] = True
        return found

    def follows(self, slack: float) -> Bools:
        """Return the tokens whose choice is that of the largest logits."""
        least = np.where(self.taken, self.logits, np.inf).min(axis=1)
        most = np.where(self.taken, -np.inf, self.logits).max(axis=1)
        return np.asarray(least >= most - slack, bool)


@dataclass(frozen=True, eq=False)
class Flips:
    """Tokens of a router whose experts differ.

    Attributes:
        admitted: those of a near-tie, or after another flip; ``wrong`` all others.
        margin: of each token, ``[n]``, relative to the largest logit.
        before: tokens that an earlier router's flip reaches.
    """

    admitted: Bools
    wrong: Bools
    margin: Array
    before: Bools


@dataclass(frozen=True, eq=False)
class Routes:
    """The routers of an update on both sides, in the order of the model.

    Attributes:
        dtype: the coarsest of the two sides.
        forced: the golden side computed with the experts that the actual side chose, so that no flip has an effect.
    """

    frame: TokenFrame
    golden: Mapping[str, Choice]
    actual: Mapping[str, Choice]
    dtype: str
    forced: bool = False
    _found: dict[str, Flips] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        paths: tuple[Named, Named],
        records: tuple[str, str],
        names: Mapping[SampleKey, SampleKey],
        dtype: str,
        forced: bool = False,
    ) -> Routes:
        """Return the routers of the update that two records belong to.

        Args:
            paths, records: golden and actual source, and a record of each.
            names: actual key of a sample -> golden key.
        """
        golden = golden_update(paths[0], paths[1], records[0])
        actual = golden_update(paths[1], paths[0], records[1])
        frame = golden.frame
        own, theirs = _choices(golden, None, frame), _choices(actual, names, frame)
        order = sorted(own.keys() & theirs.keys(), key=_natural)
        return cls(frame, {n: own[n] for n in order}, {n: theirs[n] for n in order}, dtype, forced)

    def flips(self, router: str) -> Flips | None:
        """Return the flips of a router; None unless both sides tell its choice."""
        if router not in self.golden:
            return None
        if not self._found:
            before = np.zeros(self.frame.size, bool)
            for name in self.golden:
                found = self._flips(name, before)
                self._found[name] = found
                if not self.forced:
                    before = before | self._reached(found.admitted)
        return self._found[router]

    def _flips(self, name: str, before: Bools) -> Flips:
        golden, actual = self.golden[name], self.actual[name]
        known = golden.taken.any(axis=1) & actual.taken.any(axis=1)
        scale = float(np.nanmax(np.abs(golden.logits), initial=0.0)) or 1.0
        other = quantity_named(OTHER)
        multiple = other.coarse if spacing(self.dtype) > spacing("float32") else other.eps
        rounded = multiple * spacing(self.dtype)
        lost, new = golden.taken & ~actual.taken, actual.taken & ~golden.taken
        flipped = known & lost.any(axis=1)
        margin = np.where(lost, golden.logits, np.inf).min(axis=1) - np.where(
            new, golden.logits, -np.inf
        ).max(axis=1)
        margin = np.where(flipped, margin, 0.0) / scale
        tie = golden.follows(0.0) & (margin <= 2 * rounded)
        after = before & actual.follows(spacing(self.dtype) * scale)
        admitted = flipped & (tie | after)
        return Flips(admitted, flipped & ~admitted, margin, before)

    def _reached(self, flipped: Bools) -> Bools:
        """Return the tokens that flips reach: they and all later ones of the sample."""
        found = np.zeros(self.frame.size, bool)
        for start, stop in zip(self.frame.offsets[:-1], self.frame.offsets[1:], strict=True):
            found[start:stop] = np.logical_or.accumulate(flipped[start:stop])
        return found

    def numbers(self, tokens: NDArray[np.int64], frame: TokenFrame) -> NDArray[np.int64]:
        """Return the numbers that tokens of another frame have here, -1 for those without one."""
        return numbers(tokens, frame, self.frame)


def router_of(name: str) -> str:
    """Return the name of the router that a tensor may belong to."""
    for end in (EXPERTS, WEIGHTS):
        name = name.removesuffix(end)
    return name


@dataclass(frozen=True)
class ExpertRouting:
    """Activations of routers, whose choice of experts rounding decides where two are nearly tied."""

    work: UnitWork

    def admit(self, source: QuantitySource, finding: Finding, found: Aligned) -> Finding:
        """Return the finding on a router without the choices that rounding decides, and what follows from them."""
        name, rows, routes = source.name, found.tokens, self._routes
        failing = finding.verdict.status in (Status.DRIFT, Status.MASK) and self.work.by_table
        if not failing or rows is None or routes is None:
            return finding
        flips = routes.flips(router_of(name))
        if flips is None:
            return finding
        choice, unit = name.endswith(EXPERTS), self.work.unit
        tokens = routes.numbers(rows.part.rows[rows.selected], unit.frame)
        others = flips.before if routes.forced else flips.admitted | flips.before
        left_out = flips.admitted if choice else others
        kept = rows.selected[(tokens < 0) | ~left_out[tokens]]
        if kept.size == rows.selected.size:
            return finding
        anew = self.work.judged(source, found.among(replace(rows, selected=kept)))
        statement = words(flips, name, tokens[tokens >= 0], unit.place, forced=routes.forced)
        return replace(anew, note=statement if choice else "")

    @cached_property
    def _routes(self) -> Routes | None:
        """The routers of the update; None where nothing tells their choice."""
        records, unit = self.work.records, self.work.unit
        if not any(name.endswith(EXPERTS) for name in records.actual.tensors):
            return None
        forced = any(record.meta.get("forced_routing") for record in records.golden.values())
        paths, names = (unit.golden, unit.actual), (unit.records[0], unit.record)
        dtype = self.work.dtype(*records.actual.tensors.values())
        return Routes.of(paths, names, unit.golden_of, dtype, forced)


def words(flips: Flips, name: str, here: NDArray[np.int64], place: object, *, forced: bool) -> str:
    """Return the note on the admitted flips of a record's tokens."""
    ties = flips.admitted[here] & ~flips.before[here]
    after = int((flips.admitted[here] & flips.before[here]).sum())
    count, largest = int(ties.sum()), float(flips.margin[here][ties].max(initial=0.0))
    tokens = f"{count} token{'s' * (count != 1)}"
    follow = f"; {after} more differ after flips of earlier routers, as their own logits do" if after else ""
    return (
        f"{place}: {router_of(name)} chose other experts for {tokens}, near-ties that rounding decides, with margins "
        f"of at most {largest:.2g} of the largest logit{follow}; "
        + ("all values are judged" if forced else "regress oracle judges all values")
        + " under the recorded choice"
    )


def _choices(
    known: Projection, names: Mapping[SampleKey, SampleKey] | None, frame: TokenFrame
) -> dict[str, Choice]:
    """Return the choice of each router of an update in the order of a frame."""
    tensors = known.truth.get(QUANTITY, {})
    found = {}
    for name in [name.removesuffix(EXPERTS) for name in tensors if name.endswith(EXPERTS)]:
        logits, experts = tensors.get(name), tensors.get(name + EXPERTS)
        if logits is None or experts is None or logits.ndim != 2 or experts.ndim != 2:
            continue
        if logits.shape[0] == experts.shape[0] == known.frame.size:
            placed = [in_frame(values, known.frame, names, frame, -1) for values in (logits, experts)]
            found[name] = Choice(placed[0], placed[1].astype(np.int64))
    return found


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts the numbers in names as numbers."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
