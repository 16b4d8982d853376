"""Units of one dump: the invariants of an update, and the agreement of ranks that hold the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regress.compare.alignment.element_names import Locator
from regress.compare.dumps.opened_dump import Side, open_side
from regress.compare.dumps.record_listing import headers
from regress.compare.dumps.sample_contents import groups_of
from regress.compare.dumps.scaled_verdicts import Finding
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.quantities import MICRO_TYPES, UPDATE_TYPES
from regress.compare.record_header import Header
from regress.compare.replica_agreement import QUANTITY as REPLICAS
from regress.compare.replica_agreement import Replicas
from regress.compare.update_records import Records, plan_of
from regress.compare.updates.group_advantage_sums import GroupOf
from regress.compare.updates.invariant_counts import QUANTITY as INVARIANTS
from regress.compare.updates.update_invariants import judge_invariants
from regress.compare.verdicts.tolerance import EXACT
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.record import Record
from regress.layout import TokenFrame

UNKNOWN = ("unplaced", "open", "derived", "sampler")
"""Metadata of records whose tokens or origin are unknown."""


@dataclass(frozen=True)
class SingleUnit:
    """Records of one update of the actual dump.

    Attributes:
        actual_names: their names; those of the golden side are read where it fails only.
        quantity: ``invariants``, or ``replicas`` of one record type.
        roots: rank -> the rank whose tokens it repeats, as far as the mesh tells it.
        golden_records: names of the golden records of the update, of which the same is asked if it is not true.
    """

    golden: str
    actual: str
    actual_names: tuple[str, ...]
    place: Place
    quantity: str
    roots: Mapping[int, int]
    golden_records: tuple[str, ...] = ()
    golden_names: tuple[str, ...] = ()

    @property
    def of_golden(self) -> SingleUnit:
        """The same check of the golden side."""
        side = open_side(self.golden)
        record_types = {open_side(self.actual).entries[name][0] for name in self.actual_names}
        names = tuple(name for name in self.golden_records if side.entries[name][0] in record_types)
        ranks = sorted({side.entries[name][1].rank or 0 for name in names})
        return replace(
            self, actual=self.golden, actual_names=names, roots={rank: side.root(rank) for rank in ranks}
        )


def single_units(
    paths: tuple[str, str],
    side: Side,
    golden: Sequence[Header],
    records: Sequence[Header],
    place: Place,
    only: Selection,
) -> Iterator[SingleUnit]:
    """Yield the checks of one update, planned from headers: ranks are compared where they hold something in common."""
    if side.system not in ("regress", "golden"):
        return
    golden_names = tuple(record.name for record in golden if not record.problem)
    usable = (r for r in records if not r.local and not r.problem)
    known = [record for record in usable if not any(record.meta.get(key) for key in UNKNOWN)]
    roots = {rank: side.root(rank) for rank in sorted({record.key.rank or 0 for record in known})}
    own = Records(known, side.read, TokenFrame((), ()), lambda rank: side.root(rank or 0))
    record_types = (*MICRO_TYPES, *UPDATE_TYPES) if only.has(REPLICAS, REPLICAS) else ()
    chosen: list[tuple[tuple[str, ...], str]] = [
        ((record_type,), REPLICAS) for record_type in record_types if own.held_twice(record_type)
    ]
    if only.has(INVARIANTS, INVARIANTS) and own.of_types(MICRO_TYPES):
        chosen.insert(0, (MICRO_TYPES, INVARIANTS))
    for of, quantity in chosen:
        names = tuple(record.name for record in known if record.key.record_type in of)
        yield SingleUnit(*paths, names, place, quantity, roots, golden_names)


def check_single(
    unit: SingleUnit, leave: Callable[[str, str], None] = lambda name, why: None
) -> list[Finding]:
    """Check the records of one update; ``leave`` gets the name of an invariant and why a part was not checked."""
    side = open_side(unit.actual)
    records = [side.read(name) for name in unit.actual_names]
    asked = any("advantages" in record.tensors for record in records)
    groups = groups_of(side, unit.place.step or 0, headers(side, unit.actual_names)) if asked else {}
    found = check_records(
        records,
        unit.quantity,
        place=unit.place,
        roots=unit.roots,
        config=side.config,
        groups=groups,
        leave=leave,
    )
    return [Finding(verdict, EXACT) for verdict in found]


def check_records(
    held: Iterable[Record],
    quantity: str,
    *,
    place: Place,
    roots: Mapping[int, int] | None = None,
    config: Mapping[str, Any] | None = None,
    groups: GroupOf | None = None,
    leave: Callable[[str, str], None] = lambda name, why: None,
) -> list[Verdict]:
    """Return verdicts on one update, whose samples are found in its records.

    Args:
        quantity: ``invariants``, or ``replicas``: agreement between ranks.
        roots: see `regress.compare.update_records.plan_of`.
        groups, leave: see `judge_invariants`.
    """
    records = Records.of(held)
    plan = plan_of(records, roots)
    if quantity == INVARIANTS:
        return judge_invariants(records, place=place, planned=plan, config=config, groups=groups, leave=leave)
    records.root = plan.root
    return [*Replicas(records, Locator(records.frame), place).verdicts()]
