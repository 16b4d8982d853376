"""State that a replay leaves in its process."""

from __future__ import annotations

import sys

import pytest
import torch

from regress.replay.run import torch_settings


def _interrupted_run() -> None:
    with torch_settings(1):
        assert torch.get_num_threads() == 1
        assert not torch.are_deterministic_algorithms_enabled()
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        raise KeyboardInterrupt


@pytest.mark.parametrize("warn_only", [True, False])
def test_the_settings_of_torch_come_back(warn_only: bool) -> None:
    threads, limit = torch.get_num_threads(), sys.getrecursionlimit()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with pytest.raises(KeyboardInterrupt):
            _interrupted_run()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warn_only
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.get_num_threads() == threads
    assert sys.getrecursionlimit() == limit
