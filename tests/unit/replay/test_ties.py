"""Layouts under which rounding would decide between equal samples of a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from regress.cli import main
from regress.golden.golden_directory import GoldenStore
from regress.replay import variant_requirements
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[3] / "golden"


def test_a_layout_that_computes_equal_samples_apart_is_left_out_with_the_reason() -> None:
    """It fails or passes by the processor: both have the best reward, but for the rounding of their divergences."""
    words = ["replay", "geo_mean", "--golden-dir", str(GOLDEN)]
    found = CliRunner().invoke(main, [*words, "--variants", "packed"])
    assert found.exit_code == 2
    assert "rounding decides which of two equal samples is the best of its group" in found.output
    listed = CliRunner().invoke(main, [*words, "--list"])
    assert "layouts that judge geo_mean: base, left, resume-at2, dp2, fsdp2, pp2, cp2;" in " ".join(
        listed.output.split()
    )


@pytest.mark.parametrize(
    "different",
    [
        {"algorithm.kl_placement": "loss"},
        {"algorithm.advantage": "grpo"},
        {"reward": 7.0},
    ],
)
def test_nothing_is_left_out_where_nothing_is_tied(
    different: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact rewards tie exactly, the mean of a group takes nobody, and different rewards are different."""
    packed = Replay(GoldenStore(GOLDEN).case("geo_mean"), VARIANTS["packed"], Precision.FLOAT64)
    assert not variant_requirements.keeps_ties(packed)
    facts, steps = (
        variant_requirements.facts_of(packed.case),
        variant_requirements.trajectories_of(packed.case),
    )
    (key, value) = next(iter(different.items()))
    section, _, name = key.partition(".")
    changed = replace(facts, config={**facts.config, section: {**facts.config.get(section, {}), name: value}})
    if not name:
        changed = facts
        steps = {
            step: [replace(one, reward=value + number) for number, one in enumerate(samples)]
            for step, samples in steps.items()
        }
    monkeypatch.setattr(variant_requirements, "facts_of", lambda case: changed)
    monkeypatch.setattr(variant_requirements, "trajectories_of", lambda case: steps)
    assert variant_requirements.keeps_ties(packed)
