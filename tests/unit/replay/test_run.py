"""State that a replay leaves in its process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from regress.errors import ReplayError
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay, torch_settings
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[3] / "golden"


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


@contextmanager
def noted(file: Path) -> Iterator[Any]:
    """Append to a file when the context is entered, when a run is prepared, and when it is left."""

    def note(word: str, _: object = None) -> None:
        with file.open("a") as stream:
            stream.write(word + " ")

    note("entered")
    yield partial(note, "prepared")
    note("left")


@pytest.mark.parametrize(("variant", "ranks"), [("base", 1), ("dp2", 2)])
def test_a_context_is_around_the_run_of_every_rank(variant: str, ranks: int, tmp_path: Path) -> None:
    case, file = GoldenStore(GOLDEN).case("dense"), tmp_path / "notes"
    around = partial(noted, file)
    replay(case, VARIANTS[variant], Precision.FLOAT64, tmp_path / "run", steps=1, around=around)
    words = file.read_text().split()
    assert sorted(words) == sorted(["entered", "prepared", "left"] * ranks)
    assert words[-1] == "left"


def test_the_whole_program_builds_its_own_run(tmp_path: Path) -> None:
    case = GoldenStore(GOLDEN).case("dense")
    with pytest.raises(ReplayError, match="cannot break the whole program, which builds its own"):
        replay(
            case,
            VARIANTS["eval-on"],
            Precision.FLOAT64,
            tmp_path / "run",
            steps=1,
            around=partial(nullcontext, print),
        )
