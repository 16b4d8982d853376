"""Checks of one dump alone, update by update: invariants, agreement between ranks, and what it must hold by itself.

A record is missing where other records of the dump, its mesh or its configuration say that it was made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from regress.compare.coverage import QUANTITY as COVERAGE
from regress.compare.coverage import lost
from regress.compare.dumps.joined_samples import joined_samples, joined_words
from regress.compare.dumps.opened_dump import Side, close_sides, open_side
from regress.compare.dumps.record_listing import by_step, headers
from regress.compare.dumps.sample_contents import samples_of
from regress.compare.dumps.sample_matching import Sample
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.quantities import MICRO_TYPES, STEP_TYPES, UPDATE_TYPES, source_or_other
from regress.compare.record_header import Header
from regress.compare.single_dump_units import check_single, single_units
from regress.compare.updates.invariant_counts import QUANTITY as INVARIANTS
from regress.compare.updates.invariant_counts import REASON
from regress.compare.verdicts.verdict import Status, Verdict
from regress.compare.verdicts.verdict_sequence import in_order
from regress.dump.coordinates import Place
from regress.errors import CompareError, ConfigError
from regress.layout import Mesh

_NAMED = 64
"""Most ranks without records that have a verdict each; more have one together."""
EVERYWHERE = ("batch_inputs", "forward_data")
"""Types that are written for every microbatch, if for any."""
CAPTURED = (*EVERYWHERE, "loss", "token_gradient")
"""Those that `regress.record` writes for every microbatch, if for any."""
BESIDE = {
    "gradient": ("param", "optimizer"),
    "param": ("optimizer",),
    "optimizer": ("param",),
}
"""Types of an update, and those that are written only together with them, where both are recorded at all."""
REMEDY = "copy or record it again"
MASKED = ("forward_data", "is_loss_debug")
FINITE = (*MASKED, "loss", "token_gradient", "gradient", "gradient_clipped", "optimizer", "param")
"""Record types in which no value may be NaN or infinite, and those of them where this holds at loss tokens only."""

CHECKSUM = "weights_sha256"
"""Key in the metadata of records: the weights that a rollout was sampled with, or that a forward pass used."""


@dataclass
class Judged:
    """Verdicts on a dump, and of each invariant, by name, why a part of it was not checked."""

    verdicts: list[Verdict] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)

    def leave(self, name: str, why: str) -> None:
        """Keep why a part of an invariant was not checked."""
        self.left.setdefault(name, []).append(why)


def check_dump(path: str) -> Judged:
    """Judge a dump without golden values: invariants, agreement between ranks, missing ranks and samples in one.

    Args:
        path: a folder or URL of a dump, or a golden case.

    Returns:
        The verdicts in the order of computation, and what was left out.

    Raises:
        DumpError: if there is no dump, or it is damaged.
        CompareError: if it has no records from which anything could be checked.
    """
    close_sides()
    side = open_side(path)
    judged, found = Judged(), [*lost_steps(side)]
    sampled: list[Sample] = []
    for step, names in sorted(by_step(side).items()):
        records = headers(side, names)
        for name in names:
            side.verify(name)
        sampled += samples_of(side, [record for record in records if record.key.record_type == "trajectory"])
        updates: dict[int | None, list[Header]] = {}
        for record in (r for r in records if r.key.record_type not in ("trajectory", *STEP_TYPES)):
            updates.setdefault(side.entries[record.name][1].update, []).append(record)
        for number, own in sorted(updates.items(), key=lambda item: item[0] or 0):
            update = Alone(side, own, Place(step, number))
            found += update.verdicts()
            for unit in single_units((path, path), side, (), own, update.place, Selection()):
                found += (finding.verdict for finding in check_single(unit, judged.leave))
            found += update.joined(sampled)
            if not number:
                found += update.weights(records)
    if not found:
        raise CompareError(f"""nothing in {path} could be checked: record batch_inputs, forward_data, is_loss_debug and
        loss, with their token layouts""")
    judged.verdicts = in_order(found)
    return judged


@dataclass(frozen=True)
class Alone:
    """The records of one update of a dump, judged by each other, by the mesh and by the configuration."""

    side: Side
    records: Sequence[Header]
    place: Place

    def verdicts(self) -> Iterator[Verdict]:
        """Yield verdicts on records that are missing or unusable, and on values that cannot be."""
        yield from self.lost_ranks()
        yield from self._whole_types()
        yield from self._microbatches()
        yield from self.exchanged()
        yield from self._of_parameters()
        yield from self._unplaced()
        yield from self._not_finite()
        yield from self._unwritten()

    def _at(self, rank: int | None, micro: int | None = None) -> Place:
        return replace(self.place, rank=rank, micro=micro)

    @cached_property
    def _there(self) -> dict[tuple[int, int | None], set[str]]:
        """Types of the records of each rank and microbatch; those of full tensors have no microbatch."""
        found: dict[tuple[int, int | None], set[str]] = {}
        for key in (record.key for record in self.records):
            if key.record_type in (*MICRO_TYPES, *UPDATE_TYPES):
                found.setdefault((key.rank or 0, key.micro), set()).add(key.record_type)
        return found

    @cached_property
    def _mesh(self) -> Mesh | None:
        try:
            return Mesh(**self.side.mesh)
        except (TypeError, ConfigError):
            return None

    def _pipeline(self, rank: int) -> int:
        """Return the pipeline stage of a rank; the same for all where the mesh is unknown."""
        known = self._mesh is not None and rank < self._mesh.world_size
        return self._mesh.coordinates(rank)["pp"] if known and self._mesh is not None else 0

    # what was made, and is not there

    def lost_ranks(self) -> Iterator[Verdict]:
        """Yield verdicts on ranks of the mesh that recorded nothing, or less than those that hold the same."""
        there: dict[int, set[tuple[str, int | None]]] = {}
        for (rank, micro), record_types in self._there.items():
            there.setdefault(rank, set()).update((record_type, micro) for record_type in record_types)
        world = 0 if self._mesh is None else self._mesh.world_size
        if world < 2 or not there:
            return
        gone = world - sum(rank < world for rank in there)
        if gone > _NAMED:  # the mesh is not that of the dump, or the dump is of one rank of a large run
            words = f"{gone} of {world} ranks recorded nothing of this update"
            yield lost(f"{gone} ranks", self.place, words)
        for rank in range(world if gone <= _NAMED else 0):
            if rank not in there:
                words = f"rank {rank} of {world} recorded nothing of this update"
                yield lost(f"rank {rank}", self.place, words)
        alike: dict[tuple[int, int], list[int]] = {}
        for rank in there:
            alike.setdefault((self.side.root(rank), self._pipeline(rank)), []).append(rank)
        for rank in sorted(there):
            if rank >= world:
                words = f"rank {rank} recorded, but the mesh in the manifest has the ranks 0 to {world - 1}"
                yield lost(f"rank {rank}", self.place, words)
                continue
            peers = alike[self.side.root(rank), self._pipeline(rank)]
            for record_type, micro in sorted(set().union(*(there[p] for p in peers)) - there[rank], key=str):
                other = next(p for p in peers if (record_type, micro) in there[p])
                words = (
                    f"{_named(record_type, micro)} is on rank {other} and not on rank {rank}, which holds the same "
                    "tokens"
                )
                yield lost(record_type, self._at(rank, micro), words)

    def _whole_types(self) -> Iterator[Verdict]:
        """Yield verdicts on types that the run says it recorded, and of which the update has nothing."""
        debug = self.side.config.get("debug")
        options = debug.get("dump_options") if isinstance(debug, Mapping) else None
        asked = options if isinstance(options, Mapping) else {}
        there = [record.key.record_type for record in self.records]
        for record_type in EVERYWHERE:
            said = self.side.config.get("capture") or asked.get(record_type) is True
            if there and record_type not in there and said:
                words = f"no {record_type} was recorded of the update, though {there[0]} was: {REMEDY}"
                yield lost(record_type, self.place, words)

    def _microbatches(self) -> Iterator[Verdict]:
        """Yield verdicts on microbatches that lack a type which others of the same pipeline stage have."""
        micros = {
            at: record_types for at, own in self._there.items() if (record_types := own & {*MICRO_TYPES})
        }
        known: dict[int, set[str]] = {}
        for (rank, _), record_types in micros.items():
            known.setdefault(self._pipeline(rank), set()).update(record_types)
        types = CAPTURED if self.side.config.get("capture") else EVERYWHERE
        for (rank, micro), record_types in sorted(micros.items(), key=str):
            for record_type in types:
                if record_type in known[self._pipeline(rank)] and record_type not in record_types:
                    words = f"{_named(record_type, micro)} is missing, though it has {min(record_types)}: {REMEDY}"
                    yield lost(record_type, self._at(rank, micro), words)

    def exchanged(self) -> Iterator[Verdict]:
        """Yield verdicts on records of a microbatch that hold samples which its inputs do not."""
        inputs = {
            record.key[1:]: {*record.samples}
            for record in self.records
            if record.key.record_type == "batch_inputs" and record.samples
        }
        for record in (r for r in self.records if r.key.record_type in MICRO_TYPES and r.key[1:] in inputs):
            strange = next((key for key in record.samples if key not in inputs[record.key[1:]]), None)
            if strange is not None:
                words = (
                    f"{record.key} holds sample {strange[0]}/{strange[1]}, which its batch_inputs do not: records of "
                    "ranks or microbatches were exchanged; record again"
                )
                yield lost(record.key.record_type, self._at(*record.key[1:]), words)

    def _of_parameters(self) -> Iterator[Verdict]:
        """Yield verdicts on gradients, parameters and states that ranks lack, though other updates have them."""
        if not self.side.config.get("capture"):
            return
        everywhere = {(type, where.rank or 0) for type, where in self.side.entries.values()}
        there: dict[int, set[str]] = {}
        for (rank, _), record_types in self._there.items():
            there.setdefault(rank, set()).update(
                record_type.removesuffix("_clipped") for record_type in record_types
            )
        for rank, record_types in sorted(there.items()):
            for record_type, beside in BESIDE.items():
                other = next((one for one in beside if one in record_types), None)
                if (
                    other is not None
                    and record_type not in record_types
                    and (record_type, rank) in everywhere
                ):
                    words = f"{record_type} is missing, though {other} of the update is there: {REMEDY}"
                    yield lost(record_type, self._at(rank), words)

    # what cannot be

    def _unplaced(self) -> Iterator[Verdict]:
        """Yield verdicts on records whose token or shard layout is unusable, so that they cannot be checked."""
        for record in self.records:
            wrong = next((name for name in record.tensors if record.layout(name) is None), None)
            problem = record.problem
            if not problem and wrong is not None:
                problem = f"{wrong} in {record.key} has no usable shard layout"
            if problem:
                yield lost(record.key.record_type, self._at(*record.key[1:]), problem)

    def _not_finite(self) -> Iterator[Verdict]:
        """Yield verdicts on NaN and infinite values in gradients, losses and quantities of loss tokens."""
        captured = bool(self.side.config.get("capture"))
        for record in (record for record in self.records if record.key.record_type in FINITE):
            record_type, tensors = record.key.record_type, self.side.read(record.name).tensors
            mask = tensors.get("effective_valid", tensors.get("response_mask"))
            for name, array in tensors.items():
                if array.dtype.kind in "iub":
                    continue
                if record_type in MASKED:  # values beside the loss tokens may be anything
                    if mask is not None and mask.shape == array.shape:
                        array = array[mask.astype(bool)]
                    elif mask is not None or not captured or record_type != "forward_data":
                        continue  # of a captured trainer every log-prob is one of its model
                count = array.size - int(np.isfinite(array).sum())
                if count:
                    source, where = source_or_other(record_type, name), self._at(*record.key[1:])
                    words = f"{count} of {array.size} values are NaN or infinite"
                    yield Verdict.fault(
                        Status.NONFINITE, source.quantity, source.label, where, words, count, count=array.size
                    )

    def _unwritten(self) -> Iterator[Verdict]:
        """Yield verdicts on gradients that are zeros though their norm is not, and on models whose weights are.

        A tensor of zeros alone is none: experts without tokens have such gradients, and fresh adapters such weights.
        """
        norms = (r.meta.get("grad_norm") for r in self.records if r.key.record_type == "gradient")
        known = [n for n in norms if isinstance(n, int | float) and not isinstance(n, bool)]
        norm = max((float(n) for n in known if math.isfinite(n)), default=0.0)
        if norm > 0:
            yield from self._all_zero("gradient", f"though grad_norm is {norm:.9g}")
        yield from self._all_zero("param", "which no trained model's are")

    def _all_zero(self, record_type: str, why: str) -> Iterator[Verdict]:
        """Yield a verdict if all values of all records are 0; the first other value ends the search."""
        count = 0
        for record in (record for record in self.records if record.key.record_type == record_type):
            for array in self.side.read(record.name).tensors.values():
                if np.any(array != 0):
                    return
                count += array.size
        if count > 1:
            words = f"each of {count} values is 0, {why}: the values were lost or never written; record them again"
            yield Verdict.fault(Status.DRIFT, record_type, record_type, self.place, words, count, count=count)

    def joined(self, sampled: Sequence[Sample]) -> Iterator[Verdict]:
        """Yield a verdict on samples that are several rollouts, one behind the other."""
        there = {key for r in self.records if r.key.record_type == "forward_data" for key in r.samples}
        unknown = there - {sample.key for sample in sampled}
        found = [*joined_samples(self.side, self.records, unknown, sampled)] if sampled else []
        if found:
            words, count = joined_words(found), len(there)
            yield Verdict.fault(
                Status.COVERAGE, COVERAGE, "samples", self.place, words, len(found), count=count
            )

    def weights(self, step: Iterable[Header]) -> Iterator[Verdict]:
        """Yield a verdict on whether the step's first update uses the weights that sampled, where both are recorded."""
        rollouts = (record.meta.get(CHECKSUM) for record in step if record.key.record_type == "trajectory")
        sampled = next((checksum for checksum in rollouts if checksum is not None), None)
        checksums = [
            (record.key, record.meta[CHECKSUM]) for record in self.records if CHECKSUM in record.meta
        ]
        if sampled is None or not checksums:
            return
        wrong = next((key for key, found in checksums if found != sampled), None)
        if wrong is None:
            yield Verdict(Status.OK, INVARIANTS, "weights", self.place, count=len(checksums), reason=REASON)
            return
        words = (
            f"{wrong} was computed with other weights than the rollouts were sampled with: {CHECKSUM} differs"
        )
        yield Verdict.fault(Status.DRIFT, INVARIANTS, "weights", self.place, words, 1, count=len(checksums))


def lost_steps(side: Side) -> Iterator[Verdict]:
    """Yield a verdict on steps that a recording of a trainer lacks: it counts from 0, in even strides."""
    kinds = (*MICRO_TYPES, *UPDATE_TYPES)
    steps = sorted({where.step for type, where in side.entries.values() if type in kinds})
    capture = side.config.get("capture")
    if not isinstance(capture, Mapping) or not capture or not steps:
        return
    interval = capture.get("every_n_steps")
    least = min((after - before for before, after in pairwise(steps)), default=steps[0] or 1)
    stride = interval if isinstance(interval, int) and interval > 0 else least
    gone = sorted({*range(0, steps[-1], stride)} - {*steps})
    if gone:
        some = ", ".join(map(str, gone[:4])) + (f" and {len(gone) - 4} more" if len(gone) > 4 else "")
        words = f"step {some} is missing among those that were recorded ({len(steps)} of them): {REMEDY}"
        yield lost("steps", Place(gone[0]), words)


def _named(record_type: str, micro: int | None) -> str:
    return record_type if micro is None else f"{record_type} of microbatch {micro}"
