"""Recorded rollouts retold as those of a curriculum: a program has to go where the recording says."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.engine.prompt_tokens import PromptSource
from regress.errors import ReplayError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.replay.program_replay import run_program, staged
from regress.replay.replay_configuration import replay_config
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture
def dense() -> GoldenCase:
    return GoldenStore(GOLDEN).case("dense")


def test_a_program_that_chooses_the_stages_itself_cannot_replay_them(
    dense: GoldenCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"tracking.trackers": [], **staged(dense, tmp_path, 2)}
    given = replay_config(dense, VARIANTS["base"], Precision.BITWISE, 2, tmp_path, overrides)
    monkeypatch.setattr(PromptSource, "follow", lambda self, place: None)
    with pytest.raises(ReplayError, match="was recorded for another prompt"):
        run_program(given, None)


def test_prompts_that_come_back_belong_to_no_stage(dense: GoldenCase, tmp_path: Path) -> None:
    with pytest.raises(ReplayError) as caught:
        staged(dense, tmp_path, 5)
    assert str(caught.value) == (
        "dense trains on 16 different prompts in 20 places, but a prompt of a curriculum belongs to the stage of one "
        "step; leave the variants with a curriculum out"
    )
