"""One-time work of the forkserver of mutants: imports, a first replay, and the collected unit tests."""

from __future__ import annotations

import tempfile
from pathlib import Path

import regress.replay.forkserver_warmup
from mutation.force import remember
from mutation.mutants import ROOT
from mutation.scopes import PATHS
from mutation.unit_tests import collect
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import run_steps
from regress.replay.replay_configuration import replay_config
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

FIRST = "dense"
"""Case that is replayed once, since a first replay of a process takes three times the time of a second."""


def _replayed_once() -> None:
    with tempfile.TemporaryDirectory() as folder:
        case = GoldenStore(ROOT / "golden").case(FIRST)
        run_steps(replay_config(case, VARIANTS["base"], Precision.FLOAT64, 1, Path(folder)))


_replayed_once()
collect()
remember(PATHS)

__all__ = ["regress"]
