"""Checks of the actual dump alone, update by update: invariants, and agreement between ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from regress.compare.dumps.contents import groups_of
from regress.compare.dumps.findings import Finding
from regress.compare.dumps.listing import Listed, headers
from regress.compare.dumps.selection import Selection
from regress.compare.dumps.sides import Side, open_side
from regress.compare.quantities import MICRO_STAGES, UPDATE_STAGES
from regress.compare.updates.checked import QUANTITY as INVARIANTS
from regress.compare.updates.coverage import QUANTITY as COVERAGE
from regress.compare.updates.replicas import QUANTITY as REPLICAS
from regress.compare.updates.single_dump import check_records
from regress.compare.verdicts.tolerance import EXACT
from regress.compare.verdicts.verdict import Place, Status, Verdict
from regress.errors import ConfigError
from regress.layout import Mesh

_UNPLACED = ("unplaced", "open", "derived", "sampler")
"""Metadata of records whose tokens or origin are unknown."""


_NAMED = 64
"""Most ranks without records that have a verdict each; more have one together."""


@dataclass(frozen=True)
class SingleUnit:
    """Records of one update of the actual dump.

    Attributes:
        actual_names: their names; those of the golden side are read where it fails only.
        quantity: ``invariants``, or ``replicas`` of one stage.
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
        stages = {open_side(self.actual).entries[name][0] for name in self.actual_names}
        names = tuple(name for name in self.golden_records if side.entries[name][0] in stages)
        ranks = sorted({side.entries[name][1].rank or 0 for name in names})
        return replace(
            self, actual=self.golden, actual_names=names, roots={rank: side.root(rank) for rank in ranks}
        )


def single_units(
    paths: tuple[str, str],
    side: Side,
    golden: Sequence[Listed],
    records: Sequence[Listed],
    place: Place,
    only: Selection,
) -> Iterator[SingleUnit]:
    """Yield the checks of one update, planned from headers: ranks are compared where they hold something in common."""
    if side.system not in ("regress", "golden"):
        return
    names = tuple(record.name for record in golden if not record.problem)
    known = [
        r for r in records if not r.local and not r.problem and not any(r.meta.get(k) for k in _UNPLACED)
    ]
    roots = {rank: side.root(rank) for rank in sorted({record.key.rank or 0 for record in known})}
    tokens = tuple(record.name for record in known if record.key.stage in MICRO_STAGES)
    if tokens and only.has(INVARIANTS, INVARIANTS):
        yield SingleUnit(*paths, tokens, place, INVARIANTS, roots, names)
    if not only.has(REPLICAS, REPLICAS):
        return
    for stage in (*MICRO_STAGES, *UPDATE_STAGES):
        own = [record for record in known if record.key.stage == stage]
        shared = _held_twice(own) if stage in UPDATE_STAGES else _repeated(own, roots)
        if shared:
            yield SingleUnit(*paths, tuple(r.name for r in own), place, REPLICAS, roots, names)


def _held_twice(records: Iterable[Listed]) -> bool:
    """Return True if the parts of a tensor on all ranks add up to more than the whole."""
    held: dict[tuple[str, tuple[int, ...]], int] = {}
    for record in records:
        for name in record.tensors:
            layout = record.layout(name)
            if layout is not None:
                key = name, layout.shape
                held[key] = held.get(key, 0) + math.prod(layout.local_shape)
                if held[key] > math.prod(layout.shape):
                    return True
    return False


def _repeated(records: Iterable[Listed], roots: Mapping[int, int]) -> bool:
    """Return True if ranks that repeat each other's tokens have records of one microbatch."""
    seen = set()
    for record in records:
        place = roots[record.key.rank or 0], record.key.micro
        if place in seen:
            return True
        seen.add(place)
    return False


def check_single(
    unit: SingleUnit, leave: Callable[[str, str], None] = lambda name, why: None
) -> list[Finding]:
    """Check the records of one update; ``leave`` is told the name of an invariant, and why a part was not checked."""
    side = open_side(unit.actual)
    records = [side.read(name) for name in unit.actual_names]
    place = unit.place.step or 0, unit.place.update
    asked = any("advantages" in record.tensors for record in records)
    groups = groups_of(side, place[0], headers(side, unit.actual_names)) if asked else {}
    found = check_records(
        records, unit.quantity, place=place, roots=unit.roots, config=side.config, groups=groups, leave=leave
    )
    return [Finding(verdict, EXACT) for verdict in found]


def lost_ranks(side: Side, records: Sequence[Listed], place: Place) -> Iterator[Verdict]:
    """Yield verdicts on ranks of the mesh that recorded nothing, or less than those that hold the same."""
    try:
        mesh = Mesh(**side.mesh)
    except (TypeError, ConfigError):
        return
    if mesh.world_size < 2:
        return
    there: dict[int, set[tuple[str, int | None]]] = {}
    for record in records:
        if record.key.stage in MICRO_STAGES or record.key.stage in UPDATE_STAGES:
            there.setdefault(record.key.rank or 0, set()).add((record.key.stage, record.key.micro))
    if not there:
        return
    lost = mesh.world_size - sum(rank < mesh.world_size for rank in there)
    if lost > _NAMED:  # the mesh is not that of the dump, or the dump is of one rank of a large run
        detail = f"{lost} of {mesh.world_size} ranks recorded nothing of this update"
        yield _lost(f"{lost} ranks", place, detail)
    else:
        for rank in (rank for rank in range(mesh.world_size) if rank not in there):
            yield _lost(
                f"rank {rank}", place, f"rank {rank} of {mesh.world_size} recorded nothing of this update"
            )
    for rank in sorted(there):
        if rank >= mesh.world_size:
            detail = (
                f"rank {rank} recorded, but the mesh in the manifest has the ranks 0 to {mesh.world_size - 1}"
            )
            yield _lost(f"rank {rank}", place, detail)
            continue
        peers = [
            p for p in there if side.root(p) == side.root(rank) and _stage(mesh, p) == _stage(mesh, rank)
        ]
        for stage, micro in sorted(set().union(*(there[p] for p in peers)) - there[rank], key=str):
            other = next(p for p in peers if (stage, micro) in there[p])
            where = "" if micro is None else f" of microbatch {micro}"
            detail = f"{stage}{where} is on rank {other} and not on rank {rank}, which holds the same tokens"
            yield _lost(stage, Place(place.step, place.update, rank, micro), detail)


def _stage(mesh: Mesh, rank: int) -> int:
    """Return the pipeline stage of a rank."""
    return mesh.coordinates(rank)["pp"] if rank < mesh.world_size else 0


def stage_of_pipeline(side: Side) -> Callable[[int], int]:
    """Return a function that tells the pipeline stage of a rank; the same for all where the mesh is unknown."""
    try:
        mesh = Mesh(**side.mesh)
    except (TypeError, ConfigError):
        return lambda _: 0
    return partial(_stage, mesh)


def _lost(name: str, place: Place, detail: str) -> Verdict:
    return Verdict.fault(Status.COVERAGE, COVERAGE, name, place, detail, 1)
