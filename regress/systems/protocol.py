"""System under test: its cells, its part on each rank, and the values that both sides exchange. Imports no torch.

An adapter is one file with a class that has the members of `SystemUnderTest`, registered in the ``pyproject.toml`` of
its package under the group ``regress.systems``::

    [project.entry-points."regress.systems"]
    mytrainer = "mypackage.regress_system:MyTrainer"

It is imported in two places: by the calling Python, which asks for `cells` and `objective` (so the module imports
neither torch nor the system at its top), and on each rank, in the system's own environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from regress.replay.exported_case import ExportedCase


@dataclass(frozen=True)
class Layout:
    """How the work is laid out.

    Attributes:
        name: as in the table: ``fsdp2-accumulation``.
        ranks: number of processes.
        settings: whatever the adapter needs to make it, plain values.
    """

    name: str
    ranks: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Declared:
    """An expected difference from the truth, which is reported if it is not there.

    Attributes:
        quantity: quantity that differs first, such as ``loss`` or ``gradient``; what follows from it may differ, too.
        reason: why it is right that it differs, in one sentence.
        factor: actual values are the truth times this number; or
        amount: relative L2 error of the worst tensor, met within a tenth of it.
    """

    quantity: str
    reason: str
    factor: float | None = None
    amount: float | None = None

    def __post_init__(self) -> None:
        if (self.factor is None) == (self.amount is None):
            raise ValueError(f"the declared difference of {self.quantity} needs either a factor or an amount")


@dataclass(frozen=True)
class Cell:
    """One cell of the conformance table: a layout, an objective and a recorded batch.

    Attributes:
        layout: how the work is laid out.
        objective: as in the table: a preset (``trl:dapo``), ``sft``, or a name that the adapter's `objective` knows.
        case: golden case whose export is the input.
        declared: expected differences.
        updates: number of optimizer updates, from the first recorded one.
        precision: what the system computes in: ``float32``, or ``bfloat16`` for declared mixed precision.
        warm: the adapter begins with the recorded state of the optimizer, else the optimizer starts without one.
        batches: sizes of the batches into which the first samples of the case are cut anew, an update each; for
            objectives that leave groups out of account. By default the batches are the recorded ones.
        without: token ids; samples that hold one of them are left out before batches are cut.
    """

    layout: Layout
    objective: str
    case: str = "dense"
    declared: tuple[Declared, ...] = ()
    updates: int = 1
    precision: str = "float32"
    warm: bool = False
    batches: tuple[int, ...] = ()
    without: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name in the table and on the command line, such as ``fsdp2/sft/dense``."""
        suffix = "" if self.precision == "float32" else f"/{self.precision}"
        return f"{self.layout.name}/{self.objective}/{self.case}{suffix}"

    @property
    def identity(self) -> str:
        """Everything that the cell says, as text."""
        return json.dumps(self.to_json(), sort_keys=True, default=str)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """Rebuild a cell written by `to_json`."""
        declared = tuple(Declared(**one) for one in data["declared"])
        plain = {**data, **{key: tuple(data.get(key, ())) for key in ("batches", "without")}}
        return cls(**{**plain, "layout": Layout(**data["layout"]), "declared": declared})


@dataclass(frozen=True)
class Engaged:
    """Proof that the layout is on.

    Attributes:
        facts: what shows it, such as ``{"parameters": "DTensor", "collectives": 14}``.
        missing: what is not there; the cell is then an error, never green.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True)
class Shim:
    """Something that an adapter replaces in a system so that it runs here.

    Attributes:
        title: what is replaced, in a few words.
        lines: lines of code of the replacement.
        reason: why the system does not run without.
        touches_numerics: True if numbers under judgement pass through it.
        layouts: patterns of the names of layouts that need it; by default all.
    """

    title: str
    lines: int
    reason: str
    touches_numerics: bool = False
    layouts: tuple[str, ...] = ("*",)


class SystemUnderTest(Protocol):
    """A trainer under test. One object carries one cell on one rank: prepare, step, engaged, close.

    Attributes:
        name: as on the command line and in the table.
        version_of: distribution whose version the table shows.
        requirements: exact pins of its environment, installed without their dependencies; what the calling Python has
            in this very version is shared with it.
        modules: modules that are imported once before the ranks are forked.
        shims: what the adapter replaces.
        environ: variables that must be set before the modules are imported.
        builds: Python code that compiles what the system needs, run once in its environment; empty for none.
    """

    name: str
    version_of: str
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    shims: tuple[Shim, ...]
    environ: Mapping[str, str]
    builds: str

    def cells(self) -> Iterable[Cell]:
        """Yield the cells of the table."""
        ...

    def objective(self, cell: Cell) -> Mapping[str, Any]:
        """Return what the system's configuration claims, as dotted keys of the engine's configuration.

        ``algorithm.preset`` replaces the whole objective of the case, other keys single values of it; see
        `regress.oracle.truth`. Each recorded rollout batch makes one update, unless a key of ``trainer.`` differs.
        """
        ...

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Build the trainer on this rank; with several the default process group is up (gloo, one thread).

        Args:
            case: recorded batch.
            folder: where the dump is to be recorded.
        """
        ...

    def step(self) -> None:
        """Make all updates of the cell, recorded into the folder by `regress.record` or taps."""
        ...

    def engaged(self) -> Engaged:
        """Return the proof that the layout was on; called after `step`."""
        ...

    def close(self) -> None:
        """Release what `prepare` took; called however the step ended."""
        ...


class System:
    """Defaults for adapters: no shims, the packages of the calling Python, nothing to release."""

    requirements: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    shims: tuple[Shim, ...] = ()
    environ: Mapping[str, str] = {}
    builds: str = ""

    def close(self) -> None:
        """Release nothing."""
