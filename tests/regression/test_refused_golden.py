"""A broken engine cannot be recorded: what is true of every update is asked before anything becomes golden."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regress.errors import ReplayError
from regress.golden.golden_directory import GoldenStore
from regress.grpo import token_losses
from regress.replay.case_truth import compute_truth

GOLDEN = Path(__file__).parents[2] / "golden"


def test_golden_values_of_a_wrong_ratio_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = token_losses.importance_ratio
    monkeypatch.setattr(token_losses, "importance_ratio", lambda *args: torch.sqrt(right(*args)))
    case = GoldenStore(GOLDEN).case("dense")
    with pytest.raises(
        ReplayError, match=r"case dense cannot become golden, .*\(ratio at step0: the ratio is exp"
    ):
        compute_truth(case, tmp_path)
