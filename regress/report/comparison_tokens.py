"""Token values of two dumps at their first differences, for the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from regress.compare.dumps.columns import Column, columns
from regress.compare.dumps.options import Options
from regress.compare.dumps.planning import plan_units
from regress.compare.dumps.session import Comparison
from regress.compare.dumps.unit import Unit
from regress.compare.quantities import QUANTITIES, UPDATE_STAGES, Kind, quantity_named
from regress.compare.verdicts.verdict import Place, Verdict
from regress.layout import SampleKey, TokenFrame
from regress.report.tokens import Columns, TokenTable, table_of

UPDATES, PLACES = 2, 8
"""Number of updates whose tokens a report shows, and of microbatches in each."""


def comparison_tables(where: str, comparison: Comparison, options: Options) -> list[TokenTable]:
    """Return the tokens of the microbatches that differ first, or of the closest one if none does.

    Args:
        where: name of the comparison.
        options: options of the comparison.
    """
    found: dict[tuple[int, int | None], dict[Place, None]] = {}
    for verdict in _telling(comparison):
        place = verdict.place
        if place.step is not None:
            found.setdefault((place.step, place.update), {})[place] = None
    return [
        table
        for (step, update), places in [*found.items()][:UPDATES]
        for table in _table(
            where, comparison, replace(options, steps=(step, step)), Place(step, update), [*places]
        )
    ]


def _telling(comparison: Comparison) -> Iterable[Verdict]:
    if comparison.failed:
        return comparison.failed
    near = [v for v in comparison.verdicts if quantity_named(v.quantity).kind is Kind.TOKEN]
    return sorted(near, key=lambda verdict: -verdict.multiple)[:1]


def _table(
    where: str, comparison: Comparison, options: Options, update: Place, places: Sequence[Place]
) -> list[TokenTable]:
    units = [
        unit
        for unit in plan_units(comparison.golden, comparison.actual, options).units
        if isinstance(unit, Unit) and not unit.elementwise and unit.stage not in UPDATE_STAGES
        if unit.place.update == update.update
    ]
    there = dict.fromkeys(unit.place for unit in units)
    chosen = [*dict.fromkeys(place for place in [*places, *there] if place in there)][:PLACES]
    merged = _Merged([unit for unit in units if unit.place in chosen])
    return (
        [table_of(where, update, merged.frame, merged.ids, merged.mask, merged.columns)]
        if merged.columns
        else []
    )


class _Merged:
    """Columns of several records, over all of their samples.

    Attributes:
        frame: the samples; ``ids`` their tokens, None where those of a sample are unknown; ``mask`` loss
            tokens.
        columns: values in the order of computation; of several values of a token the one furthest off.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        lengths: dict[SampleKey, int] = {}
        for unit in units:
            for key, length in zip(unit.frame.samples, unit.frame.lengths, strict=True):
                lengths[key] = max(lengths.get(key, 0), length)
        self.frame = TokenFrame(tuple(lengths), tuple(lengths.values()))
        self.mask = np.zeros(self.frame.size, bool)
        self.columns: Columns = {}
        ids = np.full(self.frame.size, -1, np.int64)
        index = {key: number for number, key in enumerate(lengths)}
        for unit in units:
            own = _canonical(unit.frame, index, self.frame)
            told, loss, found = columns(unit)
            if told is not None:
                ids[own] = np.maximum(ids[own], told)
            if loss is not None:
                self.mask[own[loss]] = True
            for column in found:
                self._add(column, own[column.tokens])
        self.ids = ids if bool((ids >= 0).any()) else None
        self.columns = {q.name: self.columns[q.name] for q in QUANTITIES if q.name in self.columns}

    def _add(self, column: Column, tokens: NDArray[np.int64]) -> None:
        nothing = np.full(self.frame.size, np.nan)
        golden, actual, _ = self.columns.setdefault(
            column.quantity, (nothing, nothing.copy(), column.tolerance)
        )
        self.mask[tokens] = True
        off = np.nan_to_num(np.abs(column.actual - column.golden), nan=np.inf)
        known = np.nan_to_num(np.abs(actual[tokens] - golden[tokens]), nan=-1.0)
        worse = off > known
        golden[tokens[worse]], actual[tokens[worse]] = column.golden[worse], column.actual[worse]


def _canonical(frame: TokenFrame, index: dict[SampleKey, int], whole: TokenFrame) -> NDArray[np.int64]:
    """Return the flat index in the whole frame of each token, ``[frame.size]``."""
    runs = [
        np.arange(length) + whole.offsets[index[key]]
        for key, length in zip(frame.samples, frame.lengths, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *runs])
