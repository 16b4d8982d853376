"""Reward curves: what counts as noticed, and a file that goes on where it was left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.registry import corpus
from tests.faults.trials import curves


def test_the_named_faults_exist_and_run_in_one_process() -> None:
    assert len({*curves.NAMED}) == 20
    assert all("ranks" not in corpus()[name].inject.__module__ for name in curves.NAMED)


def test_a_curve_is_noticed_outside_of_the_range_of_healthy_ends() -> None:
    rising = [0.0] * 40 + [0.5] * 10
    found = curves.verdicts(
        {
            curves.HEALTHY: {0: rising, 1: [0.0] * 40 + [0.6] * 10},
            "same": {0: rising, 1: [0.9] * 40 + [0.6] * 10},
            "worse": {0: [0.9] * 40 + [0.1] * 10},
            "better": {0: [0.0] * 40 + [0.7] * 10},
        }
    )
    assert [(one.fault, one.noticed) for one in found] == [("same", False), ("worse", True), ("better", True)]
    assert (found[0].low, found[0].high) == pytest.approx((0.5, 0.6))


def test_curves_are_kept_and_only_the_missing_ones_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []

    def drawn(fault: str, seed: int, steps: int) -> list[float]:
        made.append((fault, seed))
        if len(made) == 3:
            raise KeyboardInterrupt
        return [float(seed)] * steps

    monkeypatch.setattr(curves, "curve", drawn)
    path = tmp_path / "curves.json"
    with pytest.raises(KeyboardInterrupt):
        curves.drawn(["kl_detached"], path, steps=11, seeds=1, healthy=2)
    found = curves.drawn(["kl_detached"], path, steps=11, seeds=1, healthy=2)
    assert made == [("", 0), ("", 1), ("kl_detached", 0), ("kl_detached", 0)]
    assert found == curves.read(path, 11)
    assert json.loads(path.read_text())["steps"] == 11
    assert curves.read(path, 12) == {}


@pytest.mark.extended
def test_a_training_has_a_reward_for_each_step_and_a_fault_changes_them() -> None:
    healthy, broken = curves.curve("", 0, 6), curves.curve("advantages_reversed", 0, 6)
    assert len(healthy) == len(broken) == 6
    assert healthy[0] == broken[0]
    assert healthy != broken
