"""Units of a comparison: one record of the actual dump beside the golden records of the same tokens or tensors.

A unit is small and can be pickled; the process that compares it opens the files by itself. Units do not depend on one
another, so they may be spread over processes and machines in any way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from regress.compare.dumps.opened_dump import Named
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.dumps.tolerance_bounds import Bounds
from regress.dump.coordinates import Place
from regress.layout import SampleKey, TokenFrame


@dataclass(frozen=True)
class Unit:
    """One actual record and its golden counterparts.

    Attributes:
        golden, actual: the two dumps.
        record: name of the actual record; ``records`` names of the golden ones that hold the same, the likeliest first.
        place: place of the verdicts.
        record_type: type of the records.
        frame: the golden samples that have a token here; empty for full tensors.
        golden_of: actual or golden key -> key in the frame.
        telling, actual_telling: records of each side that tell loss tokens and token ids of these samples.
        bounds, only: tolerances, and which tensors are compared.
        suffix: end of a verdict's name, such as ``(golden rank 1)``.
        tensors: those that are compared; by default all.
        elementwise: True if they are compared element by element, because nothing tells their tokens.
        explained: True if a failure tells what is affected, which diagnoses are made of.
        examined: quantity and name of verdicts of which hypotheses are asked what gives their values; nothing else of
            the record is then compared.
        planned: True if a plan says what lies where: golden values tell the loss tokens, and masks count in padding.
    """

    golden: Named
    actual: Named
    record: str
    records: tuple[str, ...]
    place: Place
    record_type: str
    frame: TokenFrame = field(default_factory=lambda: TokenFrame((), ()))
    golden_of: Mapping[SampleKey, SampleKey] = field(default_factory=dict)
    alias: Mapping[SampleKey, SampleKey] = field(default_factory=dict)
    telling: tuple[str, ...] = ()
    actual_telling: tuple[str, ...] = ()
    bounds: Bounds = field(default_factory=Bounds)
    only: Selection = field(default_factory=Selection)
    suffix: str = ""
    tensors: tuple[str, ...] | None = None
    elementwise: bool = False
    explained: bool = True
    examined: frozenset[tuple[str, str]] = frozenset()
    planned: bool = False

    @property
    def golden_names(self) -> tuple[str, ...]:
        """The golden records that are read."""
        return (*self.records, *self.telling)

    @property
    def actual_names(self) -> tuple[str, ...]:
        """The actual records that are read."""
        return (self.record, *self.actual_telling)
