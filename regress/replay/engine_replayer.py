"""Replays by the engine of this package, judged by golden values or by the bytes of a reference.

The stored values are those of one rank's microbatches. Where several ranks cut a batch otherwise, or the loss is a mean
over ranks, one process that computes the shares of all of them, one after the other, computes what they must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from regress.dump.dump_files import remove_tree
from regress.dump.dump_location import Location, address
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.layout import Mesh, RankPlan
from regress.parallel.launch.forkserver_imports import imported_for_good
from regress.replay.replay_configuration import unmet, unusable_tracker
from regress.replay.replay_context import run_context_of
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.replayer_registry import Judged, Judging, Machine, Replayer
from regress.replay.test_matrix import Item, Replay, items
from regress.replay.variant import Precision, Variant
from regress.replay.variant_requirements import has_other_values, planned, shares
from regress.replay.variant_table import BASE

if TYPE_CHECKING:
    from regress.engine.run_construction import Run
    from regress.replay.replay_outcome import ReplayOutcome


@cache
def import_engine() -> None:
    """Import what replays in this process need."""
    with imported_for_good():
        import regress.engine.run_construction
        import regress.replay.case_run  # noqa: F401  # both stay loaded; no name of them is used here


@dataclass(frozen=True)
class EngineReplayer(Replayer):
    """Computes replays in this process, on ranks of its pool, or under a launcher."""

    machine: Machine = field(default_factory=Machine)
    leaves: Sequence[str] = ("dump",)

    def refuses(self, replay: Replay) -> str | None:
        """Return which package is absent."""
        return unmet(replay.case, replay.variant) or unusable_tracker(replay.variant)

    def items(self, replay: Replay) -> Iterator[Item]:
        """Yield the tests of a replay, rank by rank and microbatch by microbatch."""
        return items(replay)

    def reference_of(self, replay: Replay, variants: Mapping[str, Variant]) -> Replay | None:
        """Return the replay whose bytes a bitwise one has to reproduce, in float32."""
        if replay.precision is not Precision.BITWISE:
            return None
        return Replay(replay.case, variants[str(replay.variant.bitwise_reference)], Precision.FLOAT32)

    def compute(self, replay: Replay, folder: Path) -> None:
        """Run the training steps of a replay."""
        if (
            self.machine.launch is None and replay.world_size == 1
        ):  # several ranks need no torch in this process
            import_engine()
        from regress.replay.case_run import replay as run

        run(
            replay.case,
            replay.variant,
            replay.precision,
            folder,
            launch=self.machine.launch,
            overrides=overrides_on(self.machine, replay),
        )

    def dump_of(self, replay: Replay, folder: Path) -> Location:
        """Return the place of a replay's dump."""
        return self.elsewhere(replay) or folder / "dump"

    def elsewhere(self, replay: Replay) -> Location | None:
        """Return the place of a dump in a store; a folder of this machine is that of the session itself."""
        work = self.machine.work
        return None if work is None or isinstance(work, Path) else work / replay.name / "dump"

    def judge(self, replay: Replay, folder: Path, judging: Judging, reference: DumpReader | None) -> Judged:
        """Judge a dump by golden values within measured tolerances, or by the bytes of its reference."""
        from regress.replay.replay_judge import judge_by_bitwise_reference, judge_replay, stored_tolerances

        dump = DumpReader(self.dump_of(replay, folder))
        scene = run_context_of(replay, dump.manifest.provenance.config)
        if reference is not None:
            return Judged(judge_by_bitwise_reference(replay.case, dump, reference, replay.plan), scene)
        tolerance = stored_tolerances(replay.case, replay.precision, judging.scale, judging.overrides)
        golden = judging.golden(replay.case)
        truth = truth_of_ranks(replay, folder / "truth")
        verdicts = judge_replay(golden, dump, replay.plan, replay.precision, truth=truth, tolerance=tolerance)

        def keep(outcome: ReplayOutcome) -> None:
            from regress.replay.token_value_tables import keep_tables

            keep_tables(folder, replay, golden, dump, outcome, tolerance)

        return Judged(verdicts, scene, keep=keep if judging.tokens and truth is None else None)


def overrides_on(machine: Machine, replay: Replay) -> dict[str, str]:
    """Return the configuration that a replay has on a machine, by dotted key."""
    found = {} if machine.device is None else {"device": machine.device}
    if machine.work is not None:
        found["debug.dump_dir"] = address(machine.work / replay.name / "dump")
    return found


Truth = Mapping[str, Mapping[str, Array]]


def truth_of_ranks(replay: Replay, folder: Path) -> Callable[[str], Truth] | None:
    """Return the golden values by update, computed in a folder that is then removed; None for the stored ones."""
    if not has_other_values(replay):
        return None
    from regress.replay.case_run import replay as run
    from regress.replay.case_truth import canonical

    dealt = shares(replay)
    ranks = RankPlan(Mesh(dp=dealt["parallel.dp"]), dealt["parallel.sample_split"])
    dump = run(replay.case, BASE, Precision.FLOAT64, folder, prepare=partial(_take, ranks))
    try:
        return canonical(
            replay.case, dump, [_on_one(update) for update in planned(replay, dealt)]
        ).__getitem__
    finally:
        remove_tree(folder)


def _on_one(update: PlannedUpdate) -> PlannedUpdate:
    """Return the update with the microbatches of all ranks on one."""
    return replace(update, layouts=(tuple(chain.from_iterable(update.layouts)),), ranks=RankPlan())


def _take(ranks: RankPlan, run: Run) -> None:
    run.trainer.shares = ranks
