"""Verification of the bytes that a comparison reads: each file once, in parts that are spread like all other work.

A mapped file is not verified as it is read (see `Source.spans`). Verification is planned after the comparison, from the
records that its units read, and done before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from regress.compare.dumps.opened_dump import Side, open_side
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.quantities import UPDATE_TYPES, source_or_other
from regress.dump.chunk_checksums import Span
from regress.dump.source_readers import spans_of, verify_span

PART = 1 << 26
"""Bytes that one unit verifies, about."""

NOT_VERIFIED = "the bytes of the files were not verified, as --no-verify asked"


class Reads(Protocol):
    """Unit of a comparison: the records that it reads."""

    @property
    def golden_names(self) -> tuple[str, ...]:
        """Golden ones."""

    @property
    def actual_names(self) -> tuple[str, ...]:
        """Actual ones."""


@dataclass(frozen=True)
class IntegrityUnit:
    """Parts of files of both dumps: name of the record, and its bytes."""

    golden: str
    actual: str
    golden_parts: tuple[tuple[str, Span], ...] = ()
    actual_parts: tuple[tuple[str, Span], ...] = ()

    @property
    def golden_names(self) -> tuple[str, ...]:
        """Golden records of which something is verified."""
        return tuple(dict.fromkeys(name for name, _ in self.golden_parts))

    @property
    def actual_names(self) -> tuple[str, ...]:
        """Actual records of which something is verified."""
        return tuple(dict.fromkeys(name for name, _ in self.actual_parts))


def verify_parts(unit: IntegrityUnit) -> None:
    """Raise `DumpError` naming the first file whose bytes are not those that were written."""
    for path, parts in ((unit.golden, unit.golden_parts), (unit.actual, unit.actual_parts)):
        side = open_side(path)
        for name, span in parts:
            verify_span(side, name, span)


def integrity_units(golden: str, actual: str, units: Iterable[Reads], only: Selection) -> list[IntegrityUnit]:
    """Return the verification of the records that the units of a comparison read, each byte of a file once.

    Args:
        only: selected tensors, of which alone the records of an update are verified.
    """
    read = [*units]
    found = [*_units((golden, actual), True, (name for unit in read for name in unit.golden_names), only)]
    actual_names = [name for unit in read for name in unit.actual_names]
    if golden == actual:
        known = {name for unit in found for name in unit.golden_names}
        actual_names = [name for name in actual_names if name not in known]
    return [*found, *_units((golden, actual), False, actual_names, only)]


@dataclass(frozen=True)
class Records:
    """Records that are verified whether or not a unit reads them: damage may be what keeps them from being planned."""

    golden_names: tuple[str, ...]
    actual_names: tuple[str, ...]

    @classmethod
    def of(cls, golden: Side, actual: Side, has: Callable[[int], bool]) -> Records:
        """Return all records of the steps that both sides have and `has` asks for."""
        steps = [{where.step for _, where in side.entries.values()} for side in (golden, actual)]
        common = {step for step in steps[0] & steps[1] if has(step)}
        names = [
            tuple(name for name, (_, where) in side.entries.items() if where.step in common)
            for side in (golden, actual)
        ]
        return cls(*names)


def _units(
    paths: tuple[str, str], of_golden: bool, names: Iterable[str], only: Selection
) -> Iterator[IntegrityUnit]:
    side = open_side(paths[not of_golden])
    group: list[tuple[str, Span]] = []
    size = 0
    for name, (start, stop) in _parts(side, dict.fromkeys(names), only):
        group.append((name, (start, stop)))
        size += stop - start
        if size >= PART:
            yield _unit(paths, of_golden, group)
            group, size = [], 0
    if group:
        yield _unit(paths, of_golden, group)


def _unit(paths: tuple[str, str], of_golden: bool, parts: Sequence[tuple[str, Span]]) -> IntegrityUnit:
    return IntegrityUnit(*paths, *((tuple(parts), ()) if of_golden else ((), tuple(parts))))


def unsealed(sides: Iterable[Side]) -> Iterator[str]:
    """Yield the one note on dumps whose files have nothing that they could be verified by."""
    known = list(dict.fromkeys(str(side.folder) for side in sides if getattr(side, "unsealed", False)))
    if known:
        yield (
            f"the files of {' and '.join(known)} carry no checksums, so damage that leaves them readable is compared "
            "as if it had been written"
        )


def _parts(side: Side, names: Collection[str], only: Selection) -> Iterator[tuple[str, Span]]:
    for name in (*names, *_beside(side, names)):
        chosen = None
        if only.patterns and side.entries[name][0] in UPDATE_TYPES and spans_of(side, name):
            chosen = _wanted(side, name, only)
        for span in spans_of(side, name, chosen):
            yield name, span


def _beside(side: Side, names: Collection[str]) -> list[str]:
    """Return the other records of updates whose parameters are compared: gradients and moments explain a drift."""
    steps = {side.entries[name][1].step for name in names if side.entries[name][0] == "param"}
    return [
        name
        for name, (record_type, where) in side.entries.items()
        if where.step in steps and record_type in UPDATE_TYPES and name not in names
    ]


def _wanted(side: Side, name: str, only: Selection) -> list[str]:
    """Return the tensors of a record of an update that are compared, and the moments and gradients of these."""
    record_type = side.entries[name][0]
    found = []
    for tensor in side.read(name).tensors:
        record_types = (record_type, *(other for other in UPDATE_TYPES if other != record_type))
        for named in (tensor, tensor.rpartition("/")[0] or tensor):
            sources = (source_or_other(one, named) for one in record_types)
            if any(only.has(source.quantity, source.label) for source in sources):
                found.append(tensor)
                break
    return found
