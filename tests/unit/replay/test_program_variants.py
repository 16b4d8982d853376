"""Variants of the whole program are left out, with the reason, where they cannot be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regress.engine.tracking import tracker_availability
from regress.golden.golden_directory import open_store
from regress.replay.engine_replayer import EngineReplayer
from regress.replay.replayer_registry import Replayer
from regress.replay.test_matrix import Replay
from regress.replay.user_trainer_replays import ForeignReplayer
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS


def impossible(name: str, *, foreign: bool = False) -> str | None:
    nobody: Any = None
    replayer: Replayer = ForeignReplayer(nobody, Path()) if foreign else EngineReplayer()
    return replayer.refuses(Replay(open_store(None).case("dense"), VARIANTS[name], Precision.FLOAT64))


def test_a_missing_tracker_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_availability, "MODULES", {"tensorboard": ("there_is_no_such_module",)})
    said = impossible("tracking-on")
    assert said is not None
    assert said.startswith("tensorboard is not installed (")
    assert said.endswith("run pip install 'tensorboard>=2.17'")


@pytest.mark.parametrize("name", ["tracking-on", "eval-on", "curriculum", "resume-at3", "resume-at2"])
def test_a_trainer_of_ones_own_does_not_run_the_program(name: str) -> None:
    """An adapter that steps through the updates would pass them without a checkpoint ever being read."""
    assert impossible(name, foreign=True) == (
        "it is about the program around the steps, which is that of this package"
    )
    assert impossible("base", foreign=True) is None
