"""Ways to compute and to judge a replay, by ``trainer.type``: from a case, a variant and a precision to verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from regress.compare.diagnosis.run_context import RunContext
from regress.compare.verdicts.tolerance_overrides import Overrides
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.dump.dump_location import Location
from regress.golden.golden_case import GoldenCase
from regress.plugins import REPLAYERS, load, named
from regress.replay.test_matrix import Item, Replay
from regress.replay.variant import Variant

if TYPE_CHECKING:
    from regress.dump.dump_reader import DumpReader
    from regress.parallel.launch.cluster_launchers import Launch
    from regress.replay.replay_outcome import ReplayOutcome


@dataclass(frozen=True)
class Machine:
    """Machine of replays.

    Attributes:
        launch: launch settings of the ranks; None: in this process, or those of a pool.
        device: device in place of the cases' own.
        work: folder or URL of the dumps, which all nodes see; None: below each replay's folder.
    """

    launch: Launch | None = None
    device: str | None = None
    work: Location | None = None


@dataclass(frozen=True)
class Judging:
    """Measures that replays are judged by.

    Attributes:
        scale: factor on tolerances.
        overrides: tolerances that the project sets by hand.
        golden: the case whose values a case is judged against, asked when it is judged: itself, unless it is being
            updated.
        tokens: True to keep token values for a report; see `regress.replay.token_value_tables`.
    """

    scale: float = 1.0
    overrides: Overrides = field(default_factory=Overrides)
    golden: Callable[[GoldenCase], GoldenCase] = lambda case: case
    tokens: bool = False


@dataclass(frozen=True)
class Judged:
    """Verdicts on a replay, in the order of computation.

    Attributes:
        scene: run context, for the diagnosis.
        place: place of the test for a verdict's place.
        keep: keeps more of it for a report, once its outcome is known.
    """

    verdicts: Sequence[Verdict]
    scene: RunContext
    place: Callable[[Place], Place] = lambda place: place
    keep: Callable[[ReplayOutcome], None] | None = None


class Replayer(Protocol):
    """One way to compute and to judge a replay.

    Attributes:
        leaves: what `compute` and `judge` leave in a replay's folder, which is removed once it is judged.
    """

    leaves: Sequence[str]

    def refuses(self, replay: Replay) -> str | None:
        """Return why a replay is not possible here; None if it is. Raises `ConfigError` for a wrong command."""

    def items(self, replay: Replay) -> Iterator[Item]:
        """Yield the tests of a replay; raises `ConfigError` if some of the case would go unjudged."""

    def computed_as(self, replay: Replay) -> Replay:
        """Return the replay whose files a replay is judged by: itself, unless another computes the same."""
        return replay

    def reference_of(self, replay: Replay, variants: Mapping[str, Variant]) -> Replay | None:
        """Return the replay whose bytes a replay has to reproduce, which has no reference; None for golden values."""
        return None

    def compute(self, replay: Replay, folder: Path) -> None:
        """Compute a replay in a folder; raises `NotSupported` where this shows that it is not possible."""

    def dump_of(self, replay: Replay, folder: Path) -> Location:
        """Return the place of the dump that a replay leaves; raises `ConfigError` if it leaves none of the engine's
        form.
        """

    def elsewhere(self, replay: Replay) -> Location | None:
        """Return the place of the dump that a replay leaves outside of its folder; None if all lies there."""
        return None

    def judge(self, replay: Replay, folder: Path, judging: Judging, reference: DumpReader | None) -> Judged:
        """Judge what was computed in a folder, by golden values or by the bytes of a reference."""


@dataclass
class Replayers:
    """Replayers of a session.

    Attributes:
        own: a user's own trainer, in place of all others.
    """

    machine: Machine = field(default_factory=Machine)
    own: Replayer | None = None
    _known: dict[str, Replayer] = field(default_factory=dict)

    def of(self, variant: Variant) -> Replayer:
        """Return the replayer of a variant; raises `ConfigError` if nothing provides that of its ``trainer.type``."""
        if self.own is not None:
            return self.own
        name = variant.trainer
        if name not in self._known:
            self._known[name] = load(named(REPLAYERS, name))(self.machine)
        return self._known[name]
