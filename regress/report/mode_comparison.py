"""Comparison of the modes of one training, as whoever knows their dumps registers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from regress.compare.dumps.comparison_options import Options
from regress.plugins import MODES, load, named
from regress.report.report_model import Describable


@dataclass(frozen=True)
class Directories:
    """Directories to compare: the self-hosted dump with that of a client of a remote trainer, and that of
    this trainer.
    """

    self_hosted: str
    remote_api: str | None = None
    weaver: str | None = None


class Found(Protocol):
    """Discrepancies between the modes."""

    @property
    def notes(self) -> Sequence[str]:
        """Facts about what was looked at, a sentence each."""

    @property
    def discrepancies(self) -> Sequence[Describable]:
        """All that were found."""

    def explains(self, quantity: str) -> bool:
        """Return True if a discrepancy explains that a quantity differs."""


class Modes(Protocol):
    """The modes of one training, whose dumps are compared in pairs and as a whole."""

    @property
    def pairs(self) -> Mapping[str, tuple[str, str]]:
        """Golden and actual source of each pair, by name."""

    def sections(self) -> dict[str, Any]:
        """Return further keys of the JSON report."""

    def lines(self, sections: Mapping[str, Any]) -> Iterable[str]:
        """Return these keys as lines for a reader."""

    def found(self) -> Found:
        """Return the discrepancies between the modes."""


def modes_of(dirs: Directories, options: Options) -> Modes:
    """Open the modes whose dumps lie in some directories; raises `ConfigError` where nobody knows them."""
    opened: Callable[[Directories, Options], Modes] = load(named(MODES, "nexrl"))
    return opened(dirs, options)
