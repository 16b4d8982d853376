"""Replays with ``trainer.type=remote``: computed through a service of this machine, judged by what was sent to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from regress.compare.quantities import QUANTITIES
from regress.dump.dump_location import Location
from regress.errors import ConfigError
from regress.optional_packages import missing
from regress.replay.replay_configuration import unmet, unusable_tracker
from regress.replay.replayer_registry import Judged, Judging, Machine, Replayer
from regress.replay.test_matrix import Item, Replay, is_judged, place_of_test, require_recorded_plan
from regress.replay.variant import Precision
from regress.service.replay.remote_variants import quantities

if TYPE_CHECKING:
    from regress.dump.dump_reader import DumpReader


@dataclass(frozen=True)
class RemoteReplayer(Replayer):
    """Computes replays through a service; judges them by the truth in float32, else by the step on what was sent."""

    machine: Machine = field(default_factory=Machine)
    leaves: Sequence[str] = ("client", "service", "reference")

    def refuses(self, replay: Replay) -> str | None:
        """Return which package is absent; raises `ConfigError` for a launcher, and for a folder of several nodes."""
        if self.machine.launch is not None or self.machine.work is not None:
            raise ConfigError(f"""variant {replay.variant.name} trains through a service that starts its ranks on this
            machine; leave it out, or --launcher and --work away""")
        absent = missing("service")
        needs = unmet(replay.case, replay.variant) or (None if absent is None else f"it {absent}")
        return needs or unusable_tracker(replay.variant)

    def items(self, replay: Replay) -> Iterator[Item]:
        """Yield the tests of a replay, whose ranks and microbatches are the service's own."""
        require_recorded_plan(replay)
        for update in replay.plan:
            place, recorded = update.place, {*replay.case.quantities(update.where)}
            for quantity in (q.name for q in QUANTITIES):
                over_wire = quantity in quantities(replay.precision) and quantity in recorded
                if quantity == "coverage" or (over_wire and is_judged(replay, quantity)):
                    yield Item(replay, place, quantity)

    def computed_as(self, replay: Replay) -> Replay:
        """Return the replay in float32 for the bitwise one: a wire carries no more."""
        if replay.precision is not Precision.BITWISE:
            return replay
        return Replay(replay.case, replay.variant, Precision.FLOAT32)

    def compute(self, replay: Replay, folder: Path) -> None:
        """Train through a service that lives for this replay."""
        from regress.replay.engine_replayer import import_engine

        import_engine()
        from regress.service.replay.remote_replay import replay_remote

        overrides = None if self.machine.device is None else {"device": self.machine.device}
        replay_remote(replay.case, replay.variant, replay.precision, folder, overrides=overrides)

    def dump_of(self, replay: Replay, folder: Path) -> Location:
        """Raise `ConfigError`."""
        raise ConfigError(f"""{replay.variant.name} trains through a service, which writes dumps of another form; take
        them with --regress-keep-dumps and regress compare""")

    def judge(self, replay: Replay, folder: Path, judging: Judging, reference: DumpReader | None) -> Judged:
        """Judge the dump of the service."""
        from regress.service.replay.remote_judge import (
            compare_with_reference,
            compare_with_truth,
            judged,
            scene_of,
        )
        from regress.service.replay.remote_reference import replay_sent
        from regress.service.replay.remote_replay import RemoteReplay

        found = RemoteReplay.of(replay.variant, folder)
        if replay.precision is Precision.FLOAT32:
            golden = judging.golden(replay.case)
            compared = compare_with_truth(golden, found, scale=judging.scale, overrides=judging.overrides)
        else:
            sent = replay_sent(replay.case, found, replay.precision, folder / "reference")
            compared = compare_with_reference(sent, found, replay.precision)
        verdicts = judged(replay, compared, masked=found.masked)
        return Judged(verdicts, scene_of(replay, compared), place_of_test)
