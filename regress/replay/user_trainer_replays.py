"""Replays of golden cases by a user's own trainer: run on the ranks of the pool, judged by their dumps."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regress.compare.diagnosis.run_context import RunContext
from regress.compare.dumps.golden_source import token_text
from regress.compare.quantities import MICRO_TYPES, QUANTITIES, UPDATE_TYPES, source_of
from regress.compare.record_plan import Plan
from regress.compare.update_judge import judge_update
from regress.compare.update_records import Records
from regress.compare.updates.trajectory_judge import judge_trajectories
from regress.compare.updates.update_invariants import judge_invariants
from regress.compare.verdicts.tolerance import Tolerances
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_files import remove_tree
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.dump.record import Record
from regress.dump.trajectory import to_record
from regress.errors import DumpError, NotSupported, ReplayError
from regress.golden.golden_case import GoldenCase
from regress.replay.interprocess_lock import interprocess_lock
from regress.replay.replay_configuration import unusable_tracker
from regress.replay.replay_context import run_context_of
from regress.replay.replay_judge import stored_tolerances
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.replayer_registry import Judged, Judging, Replayer
from regress.replay.temporary_workspace import Workspace
from regress.replay.test_matrix import Item, Replay, is_judged, place_of_test
from regress.replay.user_trainer import Adapter, call_on_rank, require_agreement
from regress.replay.variant import LOCAL, Precision
from regress.replay.variant_requirements import has_other_values

WEIGHTY = ("log_probs", "gradient", "param")
"""Quantities of which at least one must be recorded: the others do not show what a trainer computes."""
_STRICT = ("gradient", "param")
"""Quantities whose golden tensors must all be recorded, once any is."""

Truth = Mapping[str, Mapping[str, Array]]


@dataclass(frozen=True)
class ForeignReplayer(Replayer):
    """Runs and judges replays by an adapter.

    Attributes:
        adapter: the function that replays a case.
        exports: folder of the exported cases, which all processes of the session see.
    """

    adapter: Adapter
    exports: Path
    leaves: Sequence[str] = ("dump",)

    def refuses(self, replay: Replay) -> str | None:
        """Return why a replay is about this package's own program, or cannot be judged."""
        if replay.variant.program:
            return "it is about the program around the steps, which is that of this package"
        if replay.variant.trainer != LOCAL:
            return "it is about the training service, which is that of this package"
        return unusable_tracker(replay.variant)

    def items(self, replay: Replay) -> Iterator[Item]:
        """Yield the tests of a replay: each quantity of an update, wherever it was recorded."""
        for step in dict.fromkeys(update.step for update in replay.plan):
            yield Item(replay, Place(step), "trajectory")
            for update in (update for update in replay.plan if update.step == step):
                recorded = set(replay.case.quantities(update.where))
                place = update.place
                for quantity in QUANTITIES:
                    structure = quantity.name in ("coverage", "invariants") or (
                        quantity.name == "replicas" and replay.world_size > 1
                    )
                    if structure or (quantity.name in recorded and is_judged(replay, quantity.name)):
                        yield Item(replay, place, quantity.name)

    def dump_of(self, replay: Replay, folder: Path) -> Path:
        """Return the place of a replay's dump."""
        return folder / "dump"

    def compute(self, replay: Replay, folder: Path) -> None:
        """Replay a case by the adapter.

        Raises:
            NotSupported: if the adapter does not have the variant.
            RegressError: if it fails, or leaves no dump.
        """
        from regress.replay.replay_pool import shared_pool

        if replay.precision is Precision.BITWISE:
            raise NotSupported("byte-for-byte replays are judged for the engine of this package only")
        if has_other_values(replay):
            raise NotSupported("the recorded values are not those of its data-parallel ranks")
        arguments = {
            "adapter": self.adapter,
            "case": self._exported(replay.case),
            "variant": replay.variant,
            "precision": replay.precision,
            "folder": folder / "dump",
        }
        what = f"{replay.name}: {self.adapter.name}"
        found = shared_pool().run(
            call_on_rank, arguments, replay.world_size, folder=folder / "ranks", what=what
        )
        try:
            require_agreement(self.adapter, found)
        except NotSupported:
            remove_tree(folder / "dump")
            raise
        try:
            DumpReader(folder / "dump")
        except DumpError as error:
            raise ReplayError(f"""{self.adapter.name} left no complete dump in the folder that it was given ({error});
            record with regress.record(folder, ...) or a Recorder""") from None

    def _exported(self, case: GoldenCase) -> Path:
        """Return the exported case, which is written unless another process wrote it."""
        from regress.replay.case_export import export_case

        target = self.exports / case.name
        self.exports.mkdir(parents=True, exist_ok=True)
        with interprocess_lock(target, f"the export of {case.name}"):
            if not target.is_dir():
                export_case(case, target)
        return target

    def judge(self, replay: Replay, folder: Path, judging: Judging, reference: DumpReader | None) -> Judged:
        """Judge the dump of an adapter by golden values within measured tolerances."""
        tolerance = stored_tolerances(replay.case, replay.precision, judging.scale, judging.overrides)
        dump = DumpReader(self.dump_of(replay, folder))
        verdicts = self._verdicts(replay, dump, judging.golden(replay.case), tolerance)
        return Judged(verdicts, foreign_scene(replay), place_of_test)

    def _verdicts(self, one: Replay, dump: DumpReader, case: GoldenCase, bound: Tolerances) -> list[Verdict]:
        """Return all verdicts on a dump, in the order of computation; unrecorded quantities have none.

        Without a plan of microbatches, every golden token must occur once over all ranks that hold different
        tokens by the mesh of the variant, and every rank must have recorded.

        Args:
            case: case with the golden values.
            bound: tolerance of each quantity.

        Raises:
            ReplayError: if the optimizer updates are not those of the case.
        """
        found = list(_updates(one, dump, self.adapter.name))
        known = _Recorded.of(record for _, records in found for record in records)
        judge = _Judge(one, case, known, bound, whole_config(one), self.adapter.name)
        verdicts = list(_rollouts(one, dump))
        for update, records in found:
            verdicts += judge.update(update, records)
        return verdicts


def foreign_scene(replay: Replay) -> RunContext:
    """Return the run context of a replay by a user's own trainer; its microbatches are unknown."""
    name = shlex.quote(f"{replay.name}/")
    commands = {
        "variant": replay.variant.name,
        "test": f"pytest -k '{replay.name}/ and {{quantity}}'",
        "show": (
            f"pytest -k {name} --regress-keep-dumps=dumps; "
            f"regress dump show dumps/{replay.name}/dump/{{record_type}}"
        ),
    }
    return replace(run_context_of(replay, whole_config(replay)), micros=None, commands=commands)


def whole_config(one: Replay) -> dict[str, Any]:
    """Return the configuration of a replay, defaults included, nested: the objective of the golden values."""
    from regress.engine.config import to_plain
    from regress.replay.replay_configuration import replay_config

    with Workspace() as folder:
        config = replay_config(one.case, one.variant, one.precision, len(one.case.trajectories()), folder)
    return to_plain(config)


def _updates(one: Replay, dump: DumpReader, name: str) -> Iterator[tuple[PlannedUpdate, list[Record]]]:
    """Yield the case's updates with their records: by step and update, or the k-th optimizer step as k-th."""
    entries = dump.manifest.files
    files: dict[Place, list[str]] = {}
    for file in dump.names():
        entry = entries[file]
        if entry.type != "trajectory":
            files.setdefault(entry.where.of_update, []).append(file)
    planned = [update.place for update in one.plan]
    found = sorted(files)
    counted = [Place(number) for number in range(len(planned))]
    if set(found) != set(planned) and found != counted:
        places = ", ".join(map(str, found)) or "none"
        raise ReplayError(f"""{name} recorded the optimizer updates {places}, but {one.case.name} has {len(planned)}
        ({", ".join(map(str, planned))}); count them as the case does, or from 0""")
    keys = planned if set(found) == set(planned) else counted
    for update, key in zip(one.plan, keys, strict=True):
        yield update, [dump.read(file) for file in files[key]]


@dataclass(frozen=True)
class _Recorded:
    """Tensors that a dump holds anywhere: ``(quantity, name)``."""

    names: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, records: Iterator[Record]) -> _Recorded:
        found = set()
        for record in records:
            sources = (source_of(record.type, name) for name in record.tensors)
            found |= {(source.quantity, source.name) for source in sources if source is not None}
            if record.type == "gradient" and record.meta.get("grad_norm") is not None:
                found.add(("grad_norm", "grad_norm"))
        return cls(frozenset(found))

    def truth(self, golden: Truth) -> dict[str, dict[str, Array]]:
        """Return the golden tensors that a dump must hold because it holds others of their kind."""
        kept: dict[str, dict[str, Array]] = {}
        for quantity, tensors in golden.items():
            own = {name for known, name in self.names if known == quantity}
            if quantity == "optimizer":
                kinds = {name.rpartition("/")[2] for name in own}
                chosen = {n: v for n, v in tensors.items() if n.rpartition("/")[2] in kinds}
            elif quantity in _STRICT:
                chosen = dict(tensors) if own else {}
            else:
                chosen = {name: value for name, value in tensors.items() if name in own}
            if chosen:
                kept[quantity] = chosen
        return kept

    def only(self, record: Record, truth: Truth) -> Record:
        """Return a record without the tensors that have no golden value, such as those of a trainer's own."""
        if record.type in _STRICT:
            return record
        sources = {name: source_of(record.type, name) for name in record.tensors}
        kept = {
            name: record.tensors[name]
            for name, source in sources.items()
            if source is not None and source.name in truth.get(source.quantity, {})
        }
        return replace(record, tensors=kept)


@dataclass(frozen=True)
class _Judge:
    replay: Replay
    case: GoldenCase
    recorded: _Recorded
    bound: Tolerances
    config: Mapping[str, Any]
    name: str

    def update(self, update: PlannedUpdate, records: Sequence[Record]) -> Iterator[Verdict]:
        """Yield verdicts on one optimizer update."""
        truth = self.recorded.truth(self.case.truth(update.where))
        kept = [own for record in records if (own := self.recorded.only(record, truth)).tensors]
        plan = _plan(update, kept, self.replay.world_size)
        place, config = update.place, self.config
        text = token_text(self.case)
        yield from judge_update(
            kept, truth, update.frame, self.bound, place=place, planned=plan, text=text, config=config
        )
        yield from judge_invariants(
            Records.of(records, update.frame), place=place, planned=plan, config=config
        )
        yield from self._coverage(truth, kept, place)

    def _coverage(self, truth: Truth, records: Sequence[Record], place: Place) -> Iterator[Verdict]:
        """Yield verdicts on ranks that recorded nothing, and on a dump without any of the required quantities."""
        for rank in range(self.replay.world_size):
            if all((record.rank or 0) != rank for record in records):
                detail = f"rank {rank} recorded nothing, but the replay has {self.replay.world_size} ranks"
                yield Verdict(Status.COVERAGE, "coverage", f"rank{rank}", place, detail)
        if not any(quantity in truth for quantity in WEIGHTY):
            detail = (
                f"{self.name} recorded none of {', '.join(WEIGHTY)}, so nothing that it computes was judged"
            )
            yield Verdict(Status.COVERAGE, "coverage", "recorded", place, detail)


def _plan(update: PlannedUpdate, records: Sequence[Record], world_size: int) -> Plan:
    """Return the recorded microbatches; the mesh of the variant tells which ranks repeat each other's tokens."""
    micros = {
        (record.rank or 0, record.micro or 0)
        for record in records
        if record.type in MICRO_TYPES and (record.rank or 0) < world_size
    }
    holders = {record.rank or 0 for record in records if record.type in UPDATE_TYPES}
    micros |= {(rank, 0) for rank in holders if all(own != rank for own, _ in micros)}
    shared = update.records
    return Plan(tuple(sorted(micros)), shared.replicas, shared.parts, shared.without_loss, repeated=False)


def _rollouts(one: Replay, dump: DumpReader) -> Iterator[Verdict]:
    """Yield verdicts on recorded rollouts, of steps that have any."""
    for step, trajectories in sorted(one.case.trajectories().items()):
        record = next(dump.records("trajectory", step), None)
        if record is not None:
            yield from judge_trajectories(record, to_record(trajectories, step))
