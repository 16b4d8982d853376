"""Tokens at a bound of the clip range: rounding may take them over it, a wrong bound is a difference all the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from off_policy_loop import straddled, tiny_model, train

from regress.compare.comparison_request import compare_sources
from regress.oracle.oracle_judge import judge_dump
from regress.oracle.update_repetition import taken_branches

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STRADDLED = 4
"""Tokens at each bound that rounding carries over it."""
WRONG = ((0.7, 1.3), (0.88, 1.12))
"""Clip ranges that are none of rounding."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run in float32, and the same one under autocast."""
    folder = tmp_path_factory.mktemp("runs")
    old = straddled(tiny_model(), STRADDLED)
    train(folder / "golden", old=old)
    train(folder / "healthy", autocast=True, old=old)
    return folder, old


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.extended)])
def wrong(runs: tuple[Path, torch.Tensor], request: pytest.FixtureRequest) -> str:
    """Name of a run of a wrong clip range."""
    name = f"wrong{request.param}"
    train(runs[0] / name, autocast=True, old=runs[1], clip=WRONG[request.param])
    return name


def compared(folder: Path, name: str, **options: Any) -> Any:
    return compare_sources(folder / "golden", folder / name, **{"precision": "bfloat16", **options})


def test_tokens_that_rounding_carries_over_a_bound_count_as_equal(runs: tuple[Path, torch.Tensor]) -> None:
    found = compared(runs[0], "healthy")
    assert not found.failed, found.failed[:3]
    notes = [note for note in found.notes if "at a bound of the clip range" in note]
    assert len(notes) == 1
    carried = re.match(r"step0/rank0/micro0: (\d+) tokens lie at a bound", notes[0])
    assert carried is not None
    assert int(carried[1]) >= 2 * STRADDLED
    (problem,) = found.problems
    assert "no dump holds what a token adds to them: judge them with regress oracle" in problem
    assert found.exit_code == 2

    tokens = compared(runs[0], "healthy", only=["token_gradient", "log_probs", "loss"])
    assert tokens.exit_code == 0


def test_the_caller_s_own_tolerance_knows_no_such_tokens(runs: tuple[Path, torch.Tensor]) -> None:
    found = compared(runs[0], "healthy", precision=None, rtol=0.1, only="token_gradient")
    assert [verdict.quantity for verdict in found.failed] == ["token_gradient"]


def test_a_wrong_bound_is_caught_at_its_tokens(runs: tuple[Path, torch.Tensor], wrong: str) -> None:
    found = compared(runs[0], wrong)
    assert found.exit_code == 1
    first = found.failed[0]
    assert first.quantity == "token_gradient"
    assert 0.0 in (first.worst.golden, first.worst.actual)


def test_a_kl_term_is_no_fault_of_tokens_that_rounding_carried(
    runs: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    train(tmp_path / "golden", old=runs[1], kl=0.04)
    train(tmp_path / "healthy", autocast=True, old=runs[1], kl=0.04)
    train(tmp_path / "wrong", autocast=True, old=runs[1], kl=0.04, clip=WRONG[0])
    found = compared(tmp_path, "healthy")
    assert not found.failed, found.failed[:3]
    assert any("at a bound of the clip range" in note for note in found.notes)
    assert compared(tmp_path, "wrong").failed[0].quantity == "token_gradient"


def test_the_oracle_takes_the_branches_of_the_trainer(
    runs: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    found = judge_dump(runs[0] / "healthy", tmp_path / "a", preset="dapo", settings=CLIP)
    assert found.comparison.exit_code == 0, (found.comparison.failed[:3], found.comparison.problems)


def test_the_oracle_catches_a_wrong_bound(
    runs: tuple[Path, torch.Tensor], wrong: str, tmp_path: Path
) -> None:
    found = judge_dump(runs[0] / wrong, tmp_path, preset="dapo", settings=CLIP)
    assert "token_gradient" in {verdict.quantity for verdict in found.comparison.failed}


CLIP = {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "algorithm.old_log_probs": "sampler"}


def test_branches_follow_gradients_within_rounding_only() -> None:
    high, low = np.log(1.2), np.log(0.8)
    ratios = np.array([high + 0.001, high - 0.001, high + 0.1, low - 0.001, low + 0.001, 0.0])
    gradient = np.array([-1.0, 0.0, -1.0, 1.0, 0.0, -1.0])
    found = taken_branches(ratios, gradient, (0.8, 1.2), np.full(6, 0.01))
    assert list(found > high) == [False, True, True, False, False, False]
    assert list(found < low) == [False, False, False, False, True, False]
    assert found[2] == ratios[2]
    assert found[5] == 0.0
